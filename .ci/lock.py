"""Write constraints.txt: the version of every package that `make setup` installs, as pip resolves them today.

usage: lock.py EXTRAS    (as in `make lock`; nothing is installed)

torch keeps the version that install_torch.sh names. The CUDA libraries are left out: the wheel of torch's CUDA build
requires each of them in one version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
HEAD = """\
# The version of every package that `make setup` installs, so that a new release of one changes nothing here. Written by
# `make lock` on Python {python}; with an older Python, pip chooses. By hand: pip install -c constraints.txt '.[train]'
# `scaletrain doctor` compares what is installed with these. A test holds torch to .ci/install_torch.sh.
"""
# Of the CUDA build alone. The rest of the file holds for both builds.
CUDA = re.compile(r"(nvidia|cuda|triton)\b(?!-ml-py)")
ANY_PYTHON = ("deepspeed", "torch")


def resolved(extras: str) -> dict[str, str]:
    """Return the version of each package by name, from pip's dry run."""
    torch = re.findall(r"^readonly version=(.+)$", (PROJECT / ".ci" / "install_torch.sh").read_text(), re.MULTILINE)[0]
    wanted = ["pip", "hatchling", "editables", f"torch=={torch}", f"{PROJECT}[{extras}]"]
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, *wanted]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = (entry["metadata"] for entry in report["install"])
    return {re.sub(r"[-_]+", "-", one["name"]).lower(): one["version"].partition("+")[0] for one in packages}


def main() -> None:
    """Write the file."""
    versions = resolved(sys.argv[1])
    del versions["scaletrain"]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lines = [
        f"{name}=={version}" + ("" if name in ANY_PYTHON else f'; python_version >= "{python}"')
        for name, version in sorted(versions.items())
        if not CUDA.match(name)
    ]
    (PROJECT / "constraints.txt").write_text(HEAD.format(python=python) + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
