"""Gather the packages that a machine with torch alone lacks, and install them there without a network.

``wheels.py gather FOLDER`` downloads the packages of wheels.txt in the versions of constraints.txt, and builds those
without a wheel. ``wheels.py install FOLDER VENV`` makes a virtual environment that also sees the packages of the
interpreter that runs this, and installs there what that one lacks. Imports only the standard library.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

_PROJECT = Path(__file__).parents[2]
_LIST = Path(__file__).with_name("wheels.txt")
PYTHON_VERSION = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_BUILT = ("deepspeed",)  # published as source alone; without its C++ and CUDA operators it is pure Python
MOST_BYTES = 60_000_000


def gather(folder: Path, python_version: str = PYTHON_VERSION) -> None:
    """Fill ``folder`` with wheels for that CPython on x86-64 Linux, and COMMIT. Exits if they exceed MOST_BYTES."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    ready = [line for line in requirements() if not line.startswith(_BUILT)]
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    download = ["download", "--only-binary=:all:", "--python-version", python_version, *platforms]
    _pip(*download, "--dest", str(folder), *ready)
    os.environ["DS_BUILD_OPS"] = "0"
    # Not isolated: its build imports torch.
    _pip("wheel", "--no-build-isolation", "--no-binary", ",".join(_BUILT), "--wheel-dir", str(folder), *_BUILT)
    found = subprocess.run(
        ["git", "-C", str(_PROJECT), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    (folder / "COMMIT").write_text(found.stdout.strip() or "unknown", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES / 1e6:.0f} MB")


def install(folder: Path, venv: Path) -> None:
    """Make ``venv`` if it is not there, and install the listed packages that this interpreter's environment lacks.

    pip keeps what is there in a version that the list admits. Needs pip 22.3 or later, and neither ensurepip nor root.
    """
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        show = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
        # --system-site-packages would leave out those of an environment that is a virtual one itself.
        folders = [path for path in (*site.getsitepackages(), *sys.path) if path.endswith("-packages")]
        (Path(own) / "base.pth").write_text("\n".join(dict.fromkeys(folders)) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--find-links", str(folder), "--disable-pip-version-check", "--requirement", str(_LIST)]
    subprocess.run(command, check=True)


def _pip(verb: str, *words: str) -> None:
    constraints = str(_PROJECT / "constraints.txt")
    subprocess.run(
        [sys.executable, "-m", "pip", verb, "--quiet", "--no-deps", "--constraint", constraints, *words], check=True
    )


def requirements() -> list[str]:
    """Return the lines of wheels.txt without comments."""
    lines = (line.partition("#")[0].strip() for line in _LIST.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def main() -> None:
    """Run the verb of the command line."""
    match sys.argv[1:]:
        case ["gather", folder]:
            gather(Path(folder))
        case ["gather", folder, python_version]:
            gather(Path(folder), python_version)
        case ["install", folder, venv]:
            install(Path(folder), Path(venv))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
