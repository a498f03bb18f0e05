"""The words around the node agent that put it into a container, as bash reads them. Pure.

Pyxis (srun's own options) and Apptainer: in both the agent gets the signals, and the runs root is at the same place.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.spec import ClusterSpec

# Over what the image has by these names: of the rest the image's own values win, and the agent sets the ranks'.
_FROM_THE_JOB = "MASTER_ADDR,MASTER_PORT"


def srun_words(cluster: ClusterSpec, run_folder: Path) -> Iterator[str]:
    """Options of srun."""
    container = cluster.slurm.container
    if container is None or container.runtime != "pyxis":
        return
    yield shlex.quote(f"--container-image={container.image}")
    yield shlex.quote(f"--container-mounts={','.join(_mounts(cluster, run_folder))}")
    yield f"--container-env={_FROM_THE_JOB}"


def agent_words(cluster: ClusterSpec, run_folder: Path) -> Iterator[str]:
    """What srun starts, up to the interpreter."""
    container = cluster.slurm.container
    if container is None:
        yield '"$python"'
        return
    if container.runtime == "apptainer":
        yield "apptainer exec"
        if cluster.gpu != "cpu":
            yield "--nv"
        for mount in _mounts(cluster, run_folder):
            yield f"--bind {shlex.quote(mount)}"
        yield shlex.quote(container.image)
    yield shlex.quote(container.python)
    yield "-s"  # packages of the image alone: home, with what pip has put there, is often mounted


def _mounts(cluster: ClusterSpec, run_folder: Path) -> list[str]:
    """The runs root first: data sets and the list of bad nodes are beside the run."""
    assert cluster.slurm.container is not None
    root = str(run_folder.parent)
    if set(root) & set(",:\n"):
        raise SchedulerError(
            f"{root}: a comma, a colon or a line end in it would be read as part of the list of mounts. "
            "Move the runs root: $SCALETRAIN_RUNS."
        )
    return [f"{root}:{root}", *cluster.slurm.container.mounts]
