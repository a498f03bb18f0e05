"""The srun command that starts a session on a node of a running job (`scaletrain exec`, `shell`, `port-forward`).

``--overlap`` lets the step share the processors, memory and GPUs that the step of the node agents holds; it needs no
right beyond those of the job's owner. Before Slurm 22.05 it shares processors only, so that a step which also asks for
GPUs or memory would wait until the run ends: there the step asks for none. A site that confines devices then shows
none to it.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.base import JobNode, session_words
from scaletrain_cli.launch.backends.slurm.array import number_of_step
from scaletrain_cli.launch.backends.slurm.script import session_script, session_srun_words
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_VERSION = re.compile(r"\b(\d+)\.(\d+)")
_SHARES_ALL = (22, 5)
_START_SECONDS = 60  # for the controller to create the step; without it srun would wait without end
_VERSION_SECONDS = 10.0


def session_command(spec: RunSpec, run_folder: Path, node: JobNode) -> tuple[str, ...]:
    """Return the words of srun. ``run_folder``: as the node sees it. Raises SchedulerError without the node's name."""
    if not node.named:
        raise SchedulerError(Reason("slurm.session-node-unknown", {"job": node.job_id, "number": node.number}))
    script = session_script(spec, run_folder, session_words(run_folder, node))
    options = overlap_options(srun_version())
    container = [word for text in session_srun_words(spec.cluster, run_folder) for word in shlex.split(text)]
    return (
        "srun",
        f"--jobid={number_of_step(node.job_id)}",
        *options,
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node.name}",
        f"--immediate={_START_SECONDS}",
        "--export=ALL",
        "--mpi=none",
        "--quiet",
        *container,
        "/bin/bash",
        "-c",
        script,
    )


def overlap_options(version: tuple[int, int] | None) -> Iterator[str]:
    """Yield the options by which the step waits for nothing; ``version`` of srun, None if it is unknown."""
    yield "--overlap"  # shares processors, memory and GPUs; before Slurm 22.05 processors only, and waits for the rest
    if version is not None and version < _SHARES_ALL:
        yield "--gres=none"
        yield "--mem=0"


def srun_version() -> tuple[int, int] | None:
    """Return the major and minor version of srun; None if it is not known."""
    if shutil.which("srun") is None:
        return None
    try:
        said = subprocess.run(
            ["srun", "--version"], capture_output=True, text=True, errors="replace", timeout=_VERSION_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said)
    return (int(found[1]), int(found[2])) if found else None
