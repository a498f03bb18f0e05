"""The supervisor of a local run; ``python -m scaletrain_cli.launch.backends.local.supervisor RUN_DIR``.

Attempt after attempt until the run is done, cancelled or beyond help. A process of its own, so that it survives the
terminal and owns its signals: SIGTERM means that the machine goes down or the run is cancelled, so no attempt follows.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.launch.attempts import Decision, begin_attempt
from scaletrain_cli.launch.backends.local.backend import CANNOT_GO_ON, living_agents, run_to_wait_for, write_supervisor
from scaletrain_cli.launch.node.heartbeats import stopped_seconds
from scaletrain_cli.launch.node.options import HEARD
from scaletrain_cli.launch.node.processes import (
    StoppedProcesses,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    next_signal,
    own_identity,
    reap,
)
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE, free_port
from scaletrain_cli.launch.restart import conclude_abandoned, conclude_attempt, conclude_run
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import absolute_paths, python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import locked

_AGENT_MARGIN_SECONDS = 30.0  # the agent keeps to the grace period itself; this is for an agent that hangs
_WAIT_SECONDS = 1.0
_LOG = logging.getLogger(__name__)
_TOLD_TO_STOP = Reason("local.supervisor-stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a run; returns the run's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    parser = argparse.ArgumentParser(prog="local_supervisor", description="Run a job's attempts on this machine.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--parent-pid", type=int, help="stop the run, its state saved, when this parent dies")
    parser.add_argument("--engine", default=ENGINE_MODULE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.parent_pid is not None and not die_with_parent(options.parent_pid, signal.SIGTERM):
        return ExitCode.CRASHED
    adopt_orphans()
    set_up_logging("supervisor")
    run = RunDir(options.run_folder.absolute())
    try:
        with supervisor_lock(run):
            write_supervisor(run, own_identity())
            return Supervision(run, read_record(run), options.engine).run_to_end()
    except ScaletrainError as error:
        _LOG.error("%s", error)
        return error.exit_code
    except OSError as error:
        why = f"{CANNOT_GO_ON}: {error}. No attempt follows; `scaletrain resume` goes on once that is put right"
        with contextlib.suppress(OSError):
            record_event(run, "stopped", exit_code=int(ExitCode.CRASHED), why=why)
        _LOG.error("%s", why)
        return ExitCode.DO_NOT_REQUEUE if is_full(error) else ExitCode.CRASHED


@contextlib.contextmanager
def supervisor_lock(run: RunDir) -> Iterator[None]:
    """Be the run's only supervisor. Raises SchedulerError at once if another one is."""
    with locked(run.path / "supervisor.lock", wait_seconds=0) as alone:
        if not alone:
            raise SchedulerError(f"{run.run_id} has a supervisor already.")
        yield


@dataclass
class Supervision:
    """The loop over attempts, and what it was told meanwhile."""

    run: RunDir
    record: RunRecord
    engine: str
    told_to_stop: bool = field(default=False, init=False)
    at_work: bool = field(default=False, init=False)

    def run_to_end(self) -> int:
        """The exit code of the run as a whole."""
        if living_agents(self.run):
            self._be_at_work()
        while living_agents(self.run) and not self.told_to_stop:
            self._listen(timeout=_WAIT_SECONDS)  # of a supervisor that was killed: its agent is saving the state
        conclude_abandoned(self.run, self.record)
        if run_to_wait_for(self.run) is not None:
            self._be_at_work()
        while run_to_wait_for(self.run) is not None and not (self.told_to_stop or self.run.is_told_to_stop):
            self._listen(timeout=_WAIT_SECONDS)
        # Whoever submits anew grants new budgets, so earlier attempts do not count against them.
        first = max(self.run.attempts(), default=0) + 1
        while True:
            self._listen()
            if self.told_to_stop or self.run.is_told_to_stop:
                decision = Decision.because(False, ExitCode.PREEMPTED, Reason("launch.stop-before-start"))
                self._be_at_work()
            else:
                decision = self._attempt(first)
            if not decision.requeue:
                return conclude_run(self.run, decision)

    def _be_at_work(self) -> None:
        """Tell who submitted the run that it has begun."""
        if not self.at_work:
            write_supervisor(self.run, own_identity(), at_work=True)
        self.at_work = True

    def _attempt(self, first: int) -> Decision:
        here = (socket.gethostname(),)
        number = begin_attempt(self.run, self.record.spec, scheduler="local", job_id=str(os.getpid()), nodes=here)
        self._be_at_work()
        code = self._run_agent(number)
        return conclude_attempt(
            self.run,
            self.record,
            number,
            first_attempt=first,
            launcher_exit_code=code,
            told_to_stop=_TOLD_TO_STOP if self.told_to_stop else None,  # perhaps only while the agent ran
        )

    def _run_agent(self, number: int) -> int:
        """One node agent to its end, and after it every process that it may have left."""
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
        # Its own session: a Ctrl-C in the terminal reaches the ranks by way of the supervisor or not at all.
        # The blocked signals stay blocked in it, so that none can hit it before it listens.
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
                _LOG.error(
                    "the node agent %s is stopped (state T) and receives no signal; ending it with its ranks", agent
                )
                os.kill(agent, signal.SIGKILL)
            if time.monotonic() > deadline:
                os.kill(agent, signal.SIGKILL)
                deadline = float("inf")
            signum = self._listen(timeout=_WAIT_SECONDS)
            if signum is not None:
                os.kill(agent, signum)
                deadline = min(
                    deadline, time.monotonic() + self.record.spec.cluster.grace_seconds + _AGENT_MARGIN_SECONDS
                )

    def _listen(self, timeout: float = 0.0) -> int | None:
        """The next signal that is meant for the ranks, if one comes within ``timeout`` seconds."""
        heard = next_signal(HEARD, timeout)
        if heard is None or heard in (signal.SIGCHLD, signal.SIGHUP):
            return None
        if heard == signal.SIGUSR1:
            return signal.SIGUSR1  # a preemption to be followed by another attempt
        self.told_to_stop = True
        return signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
