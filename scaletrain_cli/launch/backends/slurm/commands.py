"""Call Slurm's commands with a filtered environment and a timeout; each failure becomes a SchedulerError."""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.backends.base import Check
from scaletrain_cli.reasons import Reason, recorded

logger = logging.getLogger(__name__)
TIMEOUT_SECONDS = 120
_SEARCHES, _SEARCH_PAUSE_SECONDS = 3, 1.0  # for a job whose answer was lost
_CHECK_SECONDS = 10  # of `scaletrain doctor`, which must not hang
# Messages of Slurm's commands about a request that was sent but not answered (schedmd/slurm, slurm_errno.c). Of "Unable
# to contact slurm controller", only "(receive failure)": else the controller has received nothing.
_ANSWER_LOST = (
    *("Socket timed out", "Connection timed out", "Connection reset", "Broken pipe", "Zero Bytes were transmitted"),
    *("receive failure", "Unexpected message received", "Protocol authentication error"),
)
TOKEN = "SLURM_JWT"  # for Slurm's commands on this machine; the job script removes it
# The only variables of the submitter that the job gets: others may contain secrets, which Slurm would store.
PASSED_ON = frozenset(
    f"PATH HOME USER LOGNAME SHELL LANG LC_ALL TZ TMPDIR SLURM_CONF SLURM_CONF_SERVER {TOKEN} "
    "LD_LIBRARY_PATH CUDA_HOME VIRTUAL_ENV PYTHONPATH "
    "SSL_CERT_FILE XDG_CACHE_HOME MODULEPATH MODULESHOME LMOD_PKG KRB5CCNAME "  # of which auks sends the ticket
    # Nodes without a route to the internet reach the hub and trackers through a proxy.
    "http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY".split()
)


def call_slurm(
    command: Sequence[str],
    *,
    text: str | None = None,
    folder: Path | None = None,
    accept: Sequence[str] = (),
    without: Sequence[str] = (),
    seconds: float = TIMEOUT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run one Slurm command. Raises SchedulerError if it fails, unless its message contains one of ``accept``.

    Raises SchedulerSilentError if it was killed or lost the connection: the controller may have executed the request.
    ``without``: names of variables that are removed from its environment in any case.
    """
    if shutil.which(command[0]) is None:
        raise SchedulerError(Reason("slurm.no-command", {"command": command[0]}))
    logger.debug("running %s", " ".join(command))
    environment = passed_on(without)
    try:
        answer = subprocess.run(  # as text: names of jobs and messages of the site may be in any encoding
            command, input=text, cwd=folder, env=environment, errors="replace", capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilentError(Reason("slurm.no-answer", {"command": command[0], "seconds": seconds})) from error
    if answer.returncode and not any(phrase in answer.stderr for phrase in accept):
        message = " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
        if answer.returncode < 0 or any(phrase in answer.stderr for phrase in _ANSWER_LOST):
            raise SchedulerSilentError(Reason("slurm.answer-lost", {"command": command[0], "said": message}))
        raise SchedulerError(Reason("slurm.command-failed", {"command": " ".join(command[:2]), "said": message}))
    return answer


def queue_script(script: Path, comment: str, *options: str, without: Sequence[str] = ()) -> str:
    """Queue a batch script in its folder and return the id of its job. Raises SchedulerError as call_slurm() does."""
    command = ["sbatch", "--parsable", f"--comment={comment}", *options, script.name]
    # In the folder, so that the log's name needs no path, which could contain blanks and quotes.
    said = call_slurm(command, folder=script.parent, without=without).stdout
    # ID or ID;CLUSTER in a line of its own: plug-ins (auks) and wrappers (TACC) of sites print others to stdout, too.
    if not (ids := re.findall(r"^(\d+)(?:;.*)?$", said.strip(), re.MULTILINE)):
        raise SchedulerSilentError(Reason("slurm.no-job-id", {"said": " ".join(said.split())}))
    return str(ids[-1])


def lost_job(name: str, error: SchedulerSilentError, find: Callable[[], str | None]) -> str:
    """Return the id of the job that Slurm accepted although its answer was lost, as ``find`` returns it.

    ``name``: of the run or the sweep. Raises SchedulerSilentError if the job does not appear.
    """
    for _ in range(_SEARCHES):
        with contextlib.suppress(SchedulerError):
            if (job_id := find()) is not None:
                return job_id
        time.sleep(_SEARCH_PAUSE_SECONDS)
    failure = cause_of(error)
    raise SchedulerSilentError(Reason("slurm.submission-unknown", {"run": name, "failure": failure})) from error


def cause_of(error: SchedulerError) -> Reason:
    """Return the reason of an error, to name it in another one."""
    return error.reason or recorded(error.message.rstrip("."))


def passed_on(without: Sequence[str] = ()) -> dict[str, str]:
    """Return the part of this process's environment that Slurm's commands, and therefore the job, get."""
    kept = [name for name in os.environ if name in PASSED_ON or name.startswith("SCALETRAIN_")]
    left_out = {*without, *proxies_with_password()}
    return {name: os.environ[name] for name in kept if name not in left_out}


def proxies_with_password() -> list[str]:
    """Return the variables of proxies whose URL has a password, as http://user:password@proxy: Slurm would store it."""
    return sorted(name for name, url in os.environ.items() if name.lower().endswith("_proxy") and "@" in url)


def commands_check() -> Check:
    """Return the check of `scaletrain doctor` that Slurm's commands are installed and the controller answers."""
    path = shutil.which("sbatch")
    if path is None:
        return Check("slurm", "none", "no sbatch", "required for cluster.scheduler: slurm")
    missing = [other for other in ("srun", "squeue", "scontrol", "sacct") if shutil.which(other) is None]
    if missing:
        return Check("slurm", "warn", path, f"{', '.join(missing)} not found; check PATH")
    try:
        said = call_slurm(["scontrol", "ping"], seconds=_CHECK_SECONDS).stdout.splitlines()
    except SchedulerError as error:
        return Check("slurm", "warn", path, str(cause_of(error)))
    return Check("slurm", "ok", f"{path}, {said[0] if said else 'the controller answers'}")
