"""Find out whether a run will have a key of Weights & Biases, in the places where wandb looks. Does not import it."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from scaletrain_cli.spec import RunSpec

_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SERVICE = "https://api.wandb.ai"


def has_login(spec: RunSpec, environment: Mapping[str, str], folder: Path) -> bool:
    """Return whether the ranks will have a key: in their environment, or in the .netrc of their user."""
    kubernetes = spec.cluster.scheduler == "kubernetes"
    for name in _KEYS:
        if name in spec.env or (kubernetes and name in spec.cluster.kubernetes.secrets):
            return True
        # A local run inherits the environment; Slurm's ranks get of it what secret_env names.
        handed_on = spec.cluster.scheduler == "local" or name in spec.secret_env
        if not kubernetes and environment.get(name) and handed_on:
            return True
    if kubernetes:
        return False  # pods have a home of their own
    host = urlsplit(_base_url({**environment, **spec.env}, folder)).hostname or ""
    return any(_has_entry(path, host) for path in _netrc_files(environment))


def _base_url(environment: Mapping[str, str], folder: Path) -> str:
    if url := environment.get("WANDB_BASE_URL"):
        return url
    home = Path(os.path.expanduser(environment.get("HOME", "~")))
    config = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")
    for settings in (folder / "wandb" / "settings", config / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(settings, encoding="utf-8")
        except (configparser.Error, OSError, ValueError):
            continue
        if url := parser.get("default", "base_url", fallback=""):
            return url
    return _SERVICE


def _netrc_files(environment: Mapping[str, str]) -> list[Path]:
    if named := environment.get("NETRC"):
        return [Path(os.path.expanduser(named))]
    home = Path(os.path.expanduser(environment.get("HOME", "~")))
    return [home / ".netrc", home / "_netrc"]


def _has_entry(path: Path, host: str) -> bool:
    try:
        found = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError, ValueError):
        return False
    return found is not None and bool(found[2])
