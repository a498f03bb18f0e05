"""A single-node job for any back end: it runs attempts until the run is done, cancelled or must not be retried.

``python -m scaletrain_cli.launch.node.job RUN_DIR --scheduler NAME --job-id ID`` is the whole job. SIGTERM ends it: the
ranks save a checkpoint within ``cluster.grace_seconds``, and no attempt follows in this job. SIGUSR1 also makes them
save, but another attempt follows. The exit code is that of the run (docs/exit-codes.md).

With ``--requeued`` the scheduler starts the job again, under the same id, when it was killed or ends with 75. It ends
with 75 if SIGTERM ended an attempt that another one should follow, and only then: for a run that must not continue it
ends with 93 in place of 75. The restart budgets count over all starts of the job.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.launch.attempts import Decision, begin_attempt, read_attempt, revise_decision
from scaletrain_cli.launch.node.heartbeats import stopped_seconds
from scaletrain_cli.launch.node.options import AGENT_SIGNALS
from scaletrain_cli.launch.node.processes import StoppedProcesses, adopt_orphans, kill_descendants, next_signal, reap
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE, free_port
from scaletrain_cli.launch.restart import (
    automatic_submissions,
    conclude_abandoned,
    conclude_attempt,
    conclude_run,
    first_attempt_of_job,
    why_not_begin,
)
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import absolute_paths, python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, copies_folder
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import locked
from scaletrain_cli.unexpected import known_error
from scaletrain_cli.worker.memory_copies import remove_copies

WAIT_SECONDS = 1.0
_AGENT_MARGIN_SECONDS = 30.0  # beyond the grace period, which the agent enforces itself unless it hangs
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code of the run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AGENT_SIGNALS)
    parser = argparse.ArgumentParser(prog="node_job", description="Run a job of one node on this machine.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--scheduler", required=True, help="the back end that submitted it")
    parser.add_argument("--job-id", required=True, help="as the back end calls the job")
    parser.add_argument("--requeued", action="store_true", help="the scheduler starts a preempted job again")
    parser.add_argument("--engine", default=ENGINE_MODULE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    adopt_orphans()
    set_up_logging("job")
    run = RunDir(options.run_folder.absolute())
    try:
        with locked(run.path / "job.lock", wait_seconds=0) as alone:
            if not alone:  # the other one records the end
                logger.error("%s", Reason("node.job-exists", {"run": run.run_id}))
                return ExitCode.SCHEDULER
            job = OneNodeJob(run, read_record(run), options.scheduler, options.job_id, options.engine)
            job.requeued = options.requeued
            return job.run_to_end()
    except Exception as error:
        return end_by_error(run, error, "node.job-failed")


def end_by_error(run: RunDir, error: Exception, code: str, *, was_begun: bool = True) -> int:
    """Record the error, as the Reason ``code``, after which no attempt follows; return the exit code of the job.

    ``was_begun``: else the command that submitted the job still waits, says why, and undoes what it has written.
    """
    failure = known_error(error, "")
    exit_code = int(ExitCode.DO_NOT_REQUEUE if is_full(error) else failure.exit_code)
    reason = Reason(code, {"error": str(failure).rstrip(".")})
    logger.error("%s", reason)
    with contextlib.suppress(OSError, ScaletrainError):
        if was_begun:
            conclude_run(run, decision := Decision.because(False, exit_code, reason))
            last = read_attempt(run, max(run.attempts(), default=0))
            if last is not None and last.decision is not None and last.decision.requeue:
                revise_decision(run, last, decision)
        else:
            record_event(run, "stopped", exit_code=exit_code, why=str(reason), **reason.to_document())
    return exit_code


@dataclass
class OneNodeJob:
    """The loop over attempts. ``stopping`` is set by SIGTERM."""

    run: RunDir
    record: RunRecord
    scheduler: str  # name of the back end, for the record of each attempt
    job_id: str
    engine: str = ENGINE_MODULE
    stopping: bool = field(default=False, init=False)
    requeued: bool = field(default=False, init=False)
    stop_reason: ClassVar[Reason] = Reason("launch.job-stopped")

    def before_first_attempt(self) -> None:
        """Wait for preconditions of the job. Does nothing by default; back ends override it."""

    def on_begin(self) -> None:
        """Called when an attempt, or the decision against one, has begun. Does nothing by default."""

    def run_to_end(self) -> int:
        """Run all attempts and return the exit code of the run."""
        self.before_first_attempt()
        conclude_abandoned(self.run, self.record)  # attempts of a job that was killed
        # A new submission grants new budgets, so earlier attempts do not count against them.
        first = max(self.run.attempts(), default=0) + 1
        if self.requeued:
            first = first_attempt_of_job(self.run, self.job_id, first)
            refusal = why_not_begin(self.run, self.record, self.job_id)
            if refusal is not None:
                return self._conclude(refusal)
        while True:
            self.listen()
            if self.stopping or self.run.is_cancelled:
                follows = self.requeued and not self.run.is_cancelled
                decision = Decision.because(follows, ExitCode.PREEMPTED, Reason("launch.stop-before-start"))
                self.on_begin()
            else:
                decision = self._attempt(first)
            if not decision.requeue:
                return self._conclude(decision)
            if self.requeued and self.stopping:
                return ExitCode.PREEMPTED

    def _conclude(self, decision: Decision) -> int:
        remove_copies(copies_folder(self.run))
        code = conclude_run(self.run, decision)
        return ExitCode.DO_NOT_REQUEUE if self.requeued and code == ExitCode.PREEMPTED else code

    def _attempt(self, first: int) -> Decision:
        here = (socket.gethostname(),)
        number = begin_attempt(self.run, self.record.spec, scheduler=self.scheduler, job_id=self.job_id, nodes=here)
        self.on_begin()
        code = self._run_agent(number)
        if automatic_submissions(self.run):  # this job was submitted in the place of others, without a person
            first = min(first, first_attempt_of_job(self.run, self.job_id, number))
        return conclude_attempt(
            self.run,
            self.record,
            number,
            first_attempt=min(first, number),
            launcher_exit_code=code,
            # SIGTERM may have come while the agent ran.
            stop_reason=self.stop_reason if self.stopping and not self.requeued else None,
        )

    def _run_agent(self, number: int) -> int:
        """Run one node agent to its end, kill all processes that it left, and return its exit code."""
        options = {
            "--attempt": number,
            "--node-rank": 0,
            "--node-name": socket.gethostname(),
            "--master-addr": "127.0.0.1",
            "--master-port": free_port("127.0.0.1"),
            "--parent-pid": os.getpid(),
            "--engine": self.engine,
        }
        arguments = [str(part) for option in options.items() for part in option]
        command = python_command("scaletrain_cli.launch.node.agent", str(self.run.path), *arguments)
        # In its own session: Ctrl-C in the terminal does not reach the ranks directly. It inherits the blocked signals,
        # so that none can kill it before it waits for them.
        agent = os.posix_spawn(command[0], command, absolute_paths(os.environ), setsid=True)
        code = self._wait_for(agent)
        kill_descendants()
        return code if code >= 0 else int(ExitCode.CRASHED)

    def _wait_for(self, agent: int) -> int:
        deadline, stopped = float("inf"), StoppedProcesses(stopped_seconds(self.record.spec))
        while True:
            for pid, code in reap():
                if pid == agent:
                    return code
            if stopped.longest([agent]) is not None:
                logger.error(
                    "the node agent %s is stopped (state T) and receives no signal; ending it with its ranks", agent
                )
                os.kill(agent, signal.SIGKILL)
            if time.monotonic() > deadline:
                os.kill(agent, signal.SIGKILL)
                deadline = float("inf")
            signum = self.listen(timeout=WAIT_SECONDS)
            if signum is not None:
                os.kill(agent, signum)
                deadline = min(
                    deadline, time.monotonic() + self.record.spec.cluster.grace_seconds + _AGENT_MARGIN_SECONDS
                )

    def listen(self, timeout: float = 0.0) -> int | None:
        """Return the next signal to forward to the ranks; None if none arrives within ``timeout`` seconds."""
        signum = next_signal(AGENT_SIGNALS, timeout)
        if signum is None or signum in (signal.SIGCHLD, signal.SIGHUP):
            return None
        if signum == signal.SIGUSR1:
            return signal.SIGUSR1  # a preemption to be followed by another attempt
        self.stopping = True
        return signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
