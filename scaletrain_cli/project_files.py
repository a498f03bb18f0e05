"""Files distributed with the code: recipes, slurm/, k8s/, grafana/, constraints.txt; and the location of the checkout.

An installed package has them in ``project/`` below this folder; a checkout has them beside it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDERS = ("slurm", "k8s", "grafana")  # for the cluster side
_PACKAGE = Path(__file__).parent


@cache
def packaged_data(name: str) -> dict[str, Any]:
    """Return the JSON object in a file of this package, such as ``plan/catalogue/hardware.json``. Do not change it."""
    document: dict[str, Any] = json.loads((_PACKAGE / name).read_text(encoding="utf-8"))
    return document


def project_file(name: str) -> Path:
    """Return the path of a file or folder such as ``k8s/base/rbac.yaml``, which exists in every installation."""
    installed = _PACKAGE / "project" / name
    return installed if installed.exists() else _PACKAGE.parent / name


def checkout() -> Path | None:
    """Return the folder with pyproject.toml that this package comes from, if it is still there."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return _PACKAGE.parent
    recorded = _installed_from()
    return recorded if recorded and (recorded / "pyproject.toml").is_file() else None


def _installed_from() -> Path | None:
    """Return the folder in direct_url.json, which pip writes beside a package that it installed from a folder."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        recorded = json.loads(distribution("scaletrain").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    url = urlsplit(str(recorded.get("url", "")))
    return Path(unquote(url.path)) if url.scheme == "file" else None


def recipes() -> dict[str, Path]:
    """Return the spec of each recipe by its name, such as ``llama-7b-h100`` or ``own-engine``."""
    folder = project_file("recipes")
    specs = {path.stem: path for path in folder.glob("*.yaml")}
    specs |= {path.parent.name: path for path in folder.glob("*/run.yaml")}
    return dict(sorted(specs.items()))
