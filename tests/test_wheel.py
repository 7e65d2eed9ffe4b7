"""The wheel carries the Metal files, and the installed package finds them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

READ_ALL = """
import sys
from mlx_spec.ops.kernel import metal_folder, metal_text
print(metal_folder())
for name in sys.argv[1:]:
    assert "METAL_FUNC" in metal_text(name), name
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what an installed wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.slow
def test_every_metal_file_is_there_and_found(installed: Path) -> None:
    kernels = sorted(path.stem for path in (ROOT / "metal").glob("*.metal"))
    assert kernels
    for kernel in kernels:
        text = (ROOT / "metal" / f"{kernel}.metal").read_text()
        assert (installed / "mlx_spec" / "_metal" / f"{kernel}.metal").read_text() == text
    command = [sys.executable, "-c", READ_ALL, *kernels]
    said = subprocess.run(
        command, cwd=installed, env={"PYTHONPATH": str(installed)}, check=True, capture_output=True, text=True
    )
    assert Path(said.stdout.strip()) == installed / "mlx_spec" / "_metal"
