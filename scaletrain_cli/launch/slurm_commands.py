"""How Slurm's commands are called: with what of the environment, for how long, and what becomes of a refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError

_TIMEOUT_SECONDS = 120
# The job gets these of the submitter's environment and no others: the rest may hold secrets, which Slurm would store.
PASSED_ON = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LC_ALL TZ TMPDIR SLURM_CONF LD_LIBRARY_PATH CUDA_HOME VIRTUAL_ENV PYTHONPATH "
    "SSL_CERT_FILE XDG_CACHE_HOME MODULEPATH MODULESHOME LMOD_PKG".split()
)


def node_names(nodes: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Slurm's ``n[1-3]`` as names. Asks no controller."""
    if not nodes:
        return ()
    return tuple(call_slurm(["scontrol", "show", "hostnames", nodes], without=without).stdout.split())


def call_slurm(
    command: Sequence[str],
    *,
    text: str | None = None,
    folder: Path | None = None,
    accept: Sequence[str] = (),
    without: Sequence[str] = (),
    seconds: float = _TIMEOUT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run one Slurm command. Raises SchedulerError when it fails, unless it says one of ``accept``.

    ``without`` names variables that it must not see, whatever they are called.
    """
    if shutil.which(command[0]) is None:
        raise SchedulerError(f"{command[0]} is not on this machine. Submit from a login node, or use scheduler: local.")
    try:
        answer = subprocess.run(
            command,
            input=text,
            cwd=folder,
            env=passed_on(without),
            text=True,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilentError(f"{command[0]} did not answer within {seconds:.0f} s.") from error
    if answer.returncode and not any(phrase in answer.stderr for phrase in accept):
        said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise SchedulerError(f"{' '.join(command[:2])} refused: {said}")
    return answer


def passed_on(without: Sequence[str] = ()) -> dict[str, str]:
    """What a Slurm command, and so the job, gets of this process's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name in PASSED_ON or name.startswith("SCALETRAIN_")) and name not in without
    }
