"""What the process environment says: where files are kept that can be made again, and how mlx was told to compute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CERTIFICATES = "MLX_SPEC_CERTIFICATES"
"""Environment variable: the folder for certificates, or "off"."""


def cache_folder() -> Path | None:
    """This user's folder for converted models and certificates, which may not exist yet; None without a home."""
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and no account has this number, as in many containers
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mlx_spec"
    return home / ".cache" / "mlx_spec"


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path in which a leading `~` is the user's home, where there is one: a shell leaves it in many places."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def certificate_folder() -> Path | None:
    """The folder for certificates; None where they are not to be kept."""
    named = os.environ.get(CERTIFICATES, "")
    if named.lower() == "off":
        return None
    if named:
        return expanded(named)
    folder = cache_folder()
    return None if folder is None else folder / "certificates"


def mlx_settings() -> str:
    """The variables by which a user can make mlx take other kernels."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith("MLX_") and name != CERTIFICATES}
    return " ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
