"""What the process environment says: where files are kept that can be made again, and how mlx was told to compute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CERTIFICATES = "MLX_SPEC_CERTIFICATES"
"""Environment variable: the folder for certificates, or "off"."""


def cache_folder() -> Path:
    """This user's folder for converted models and certificates. It may not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_spec"
    return Path.home() / ".cache" / "mlx_spec"


def certificate_folder() -> Path | None:
    """The folder for certificates; None where they are not to be kept."""
    named = os.environ.get(CERTIFICATES, "")
    if named.lower() == "off":
        return None
    return Path(named) if named else cache_folder() / "certificates"


def mlx_settings() -> str:
    """The variables by which a user can make mlx take other kernels."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith("MLX_") and name != CERTIFICATES}
    return " ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
