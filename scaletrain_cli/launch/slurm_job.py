"""The first and the last word of a Slurm job; ``python -m scaletrain_cli.launch.slurm_job begin|end RUN_DIR``.

Runs in the batch script, on the first node. ``begin`` prints ``ATTEMPT MASTER_ADDR MASTER_PORT``; ``end`` prints
``requeue`` or ``stop`` and exits with the run's code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.attempts import Decision, begin_attempt, close_unended, read_attempts
from scaletrain_cli.launch.conclusion import conclude_attempt, conclude_run
from scaletrain_cli.launch.ports import free_port
from scaletrain_cli.launch.restart_policy import decide
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record


def main(arguments: Sequence[str] | None = None) -> int:
    """Begin or end an attempt; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="slurm_job", description="Begin or end an attempt inside a Slurm job.")
    parser.add_argument("word", choices=("begin", "end"))
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--srun-exit-code", type=int)
    options = parser.parse_args(arguments)
    run = RunDir(options.run_folder.absolute())
    try:
        record = read_record(run)
        if options.word == "begin":
            return begin(run, record, os.environ)
        return end(run, record, options.attempt, options.srun_exit_code, os.environ)
    except ScaletrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def begin(run: RunDir, record: RunRecord, environment: Mapping[str, str]) -> int:
    """Claim the next attempt and print where its ranks meet; non-zero when the run must not go on."""
    job_id = environment["SLURM_JOB_ID"]
    refusal = _refusal(run, record, job_id)
    if refusal is not None:
        print(refusal.why, file=sys.stderr)
        return conclude_run(run, refusal)
    nodes = tuple(environment.get("SLURM_JOB_NODELIST", "").split())
    number = begin_attempt(run, record.spec, scheduler="slurm", job_id=job_id, nodes=nodes)
    print(number, _own_address(environment), free_port(""))
    return ExitCode.DONE


def end(run: RunDir, record: RunRecord, number: int, srun_exit_code: int, environment: Mapping[str, str]) -> int:
    """Judge the attempt and print what the script must do."""
    first = _first_attempt(run, environment["SLURM_JOB_ID"])
    decision = conclude_attempt(run, record, number, first_attempt=first, launcher_exit_code=srun_exit_code)
    print("requeue" if decision.requeue else "stop")
    return decision.exit_code if decision.requeue else conclude_run(run, decision)


def _refusal(run: RunDir, record: RunRecord, job_id: str) -> Decision | None:
    """Why this attempt must not begin: cancelled, or Slurm itself requeued a job whose budget is used up."""
    closed = close_unended(run, record.spec)
    if run.stop_file.exists():
        return Decision(False, ExitCode.PREEMPTED, "cancelled before the attempt began")
    history = [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]
    if not closed or not history or history[-1].reason is None or history[-1].exit_code is None:
        return None
    last = history[-1]
    decision = decide(
        int(history[-1].exit_code), history[-1].reason, history, record.spec.restarts, last.reason == "cancelled"
    )
    return None if decision.requeue else decision


def _first_attempt(run: RunDir, job_id: str) -> int:
    """A requeued job keeps its id, so the attempts of one submission are those of one job."""
    return min((attempt.number for attempt in read_attempts(run) if attempt.job_id == job_id), default=1)


def _own_address(environment: Mapping[str, str]) -> str:
    """The first of this node's names that resolves: Slurm's, which need not be the host's."""
    names = [environment.get("SLURMD_NODENAME", ""), socket.gethostname()]
    for name in names:
        with contextlib.suppress(OSError):
            if name:
                socket.getaddrinfo(name, None)
                return name
    return names[-1]


if __name__ == "__main__":
    sys.exit(main())
