"""The settings of a dev cluster, its paths and the names that are derived from them. Starts nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Slurm's sockets are DIR/spool/nX/nX_JOB.STEP, and the path of a unix socket has at most 107 bytes.
MAX_DIR_LENGTH = 65
# The cgroups of slurmd are in a folder of the whole machine, named by node and job id. Clusters have distinct job ids,
# which are derived from their ports, at least 200 apart.
JOB_IDS_PER_PORT = 100
PORTS_PER_CLUSTER = 200


class ClusterError(Exception):
    """An error with the exit code of the command."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Cluster:
    """The options of `start`, stored in DIR/cluster.json for the other commands."""

    dir: str
    nodes: int
    gpus: int
    gpu_type: str  # empty: GPUs without a type
    cpus: int
    memory_mb: int
    netns: bool
    accounting: bool
    subnet: str  # first three bytes, "198.18.7"; empty without netns
    port: int
    grace_seconds: int
    kill_wait_seconds: int
    slurmd_timeout_seconds: int
    conf: list[str]
    gres: list[str] = field(default_factory=list)  # "n3=gpu:a100:4": the GRES of single nodes, in place of `gpus`

    @property
    def directory(self) -> Path:
        return Path(self.dir)

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    @property
    def controller_address(self) -> str:
        return f"{self.subnet}.254" if self.netns else "127.0.0.1"

    def node_address(self, node: str) -> tuple[str, int]:
        index = int(node[1:])
        return f"{self.subnet}.{index}" if self.netns else "127.0.0.1", self.port + 100 + index

    def gres_of(self, node: str) -> str:
        """Return the GRES of a node as in slurm.conf: ``gpu:h100:8``, or empty."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        own = dict(line.split("=", 1) for line in self.gres)
        return own.get(node, f"gpu:{kind}{self.gpus}" if self.gpus else "")

    @property
    def job_ids(self) -> range:
        return range(self.port * JOB_IDS_PER_PORT, (self.port + PORTS_PER_CLUSTER) * JOB_IDS_PER_PORT)

    def save(self) -> None:
        (self.directory / "cluster.json").write_text(json.dumps(asdict(self), indent=2) + "\n")


def load(directory: Path) -> Cluster:
    try:
        return Cluster(**json.loads((directory / "cluster.json").read_text()))
    except FileNotFoundError:
        raise ClusterError(f"no cluster in {directory}; `start --dir {directory}` creates one", 2) from None


def conf_path(directory: Path) -> Path:
    return directory / "etc" / "slurm.conf"


def tag(directory: Path) -> str:
    """Return the prefix of the names of the cluster's bridge, links and namespaces. Interface names have 15 bytes."""
    return "st-" + hashlib.sha256(str(directory).encode()).hexdigest()[:6]
