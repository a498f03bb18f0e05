"""The Slurm scheduler: sbatch, squeue, scancel and scontrol, by their stable text interfaces.

What runs inside the job is in slurm_script (the text) and slurm_job (its first and last word).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.scheduler import Job, JobState
from scaletrain_cli.launch.slurm_script import job_script, sbatch_options
from scaletrain_cli.launch.submission import read_submission
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec

_TIMEOUT_SECONDS = 120
_QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"}
_RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"}
# The job gets these of the submitter's environment and no others: the rest may hold secrets, which Slurm would store.
_PASSED_ON = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "SLURM_CONF"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "PYTHONPATH", "SSL_CERT_FILE", "XDG_CACHE_HOME"),
}


class SlurmScheduler:
    """Jobs of the cluster that this machine's Slurm commands talk to."""

    def preflight(self, spec: RunSpec) -> list[str]:
        """Let Slurm judge the request without queueing it. Raises SchedulerError with its own words."""
        _check_path(runs_root())
        script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in sbatch_options(spec, "preflight"))])
        answer = call_slurm(["sbatch", "--test-only"], text=script + "\ntrue\n", without=spec.secret_env)
        return [line.removeprefix("sbatch: ") for line in answer.stderr.splitlines() if line.strip()]

    def render(self, run: RunDir, record: RunRecord) -> str:
        return job_script(record.spec, record.run_id, run.path)

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Queue the job, unless one of this run is there: a submitter may have died after sbatch."""
        _check_path(run.path)
        secrets = record.spec.secret_env
        # The name alone may be that of a run under another root; the comment is this directory's own.
        mark = hashlib.sha256(str(run.path).encode()).hexdigest()[:16]
        question = ["squeue", "--noheader", "--me", f"--name={record.run_id}", "--format=%A|%k"]
        for line in call_slurm(question, without=secrets).stdout.splitlines():
            job_id, _, comment = line.strip().partition("|")
            if comment == mark:
                return job_id
        script = run.path / "job.sh"
        script.write_text(self.render(run, record), encoding="utf-8")
        # From the run directory: the log's name needs no path then, which may hold blanks and quotes.
        answer = call_slurm(
            ["sbatch", "--parsable", f"--comment={mark}", script.name], folder=run.path, without=secrets
        )
        return answer.stdout.strip().split(";")[0]  # "id" or "id;cluster"

    def job(self, run: RunDir, record: RunRecord) -> Job:
        submission = read_submission(run)
        if submission is None:
            return Job("", "unknown", "never submitted")
        job_id = submission.job_id
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r|%N"]
        answer = call_slurm(command, accept=("Invalid job id",))
        fields = answer.stdout.strip().split("|")
        if len(fields) != 3:
            return Job(job_id, "ended", "Slurm no longer knows the job")
        state, reason, nodes = fields
        detail = state if reason in ("None", "") else f"{state} ({reason})"
        return Job(job_id, job_state(state), detail, node_names(nodes))

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Ask the ranks to save and leave; the job's last word is slurm_job's. A queued job just goes."""
        run.stop_file.touch()
        job = self.job(run, record)
        if job.state == "running":
            # Plain scancel would leave KillWait, not the grace period, before SIGKILL.
            call_slurm(["scancel", "--signal=TERM", job.id])
        elif job.state == "queued":
            call_slurm(["scancel", job.id])
            record_event(run, "cancelled")


def job_state(slurm_state: str) -> JobState:
    """Slurm's state in the words that all schedulers share."""
    if slurm_state in _QUEUED:
        return "queued"
    return "running" if slurm_state in _RUNNING else "ended"


def node_names(nodes: str) -> tuple[str, ...]:
    """Slurm's ``n[1-3]`` as names. Asks no controller."""
    if not nodes:
        return ()
    return tuple(call_slurm(["scontrol", "show", "hostnames", nodes]).stdout.split())


def _check_path(path: Path) -> None:
    if "%" in str(path) or "\\" in str(path):
        raise SchedulerError(
            f"{path}: Slurm interprets % and \\ in the path of a job's log. Move the runs root: $SCALETRAIN_RUNS."
        )


def call_slurm(
    command: Sequence[str],
    *,
    text: str | None = None,
    folder: Path | None = None,
    accept: Sequence[str] = (),
    without: Sequence[str] = (),
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
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{command[0]} did not answer within {_TIMEOUT_SECONDS} s.") from error
    if answer.returncode and not any(phrase in answer.stderr for phrase in accept):
        said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise SchedulerError(f"{' '.join(command[:2])} refused: {said}")
    return answer


def passed_on(without: Sequence[str] = ()) -> dict[str, str]:
    """What a Slurm command, and so the job, gets of this process's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED_ON or name.startswith("SCALETRAIN_")) and name not in without
    }
