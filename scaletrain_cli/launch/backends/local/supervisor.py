"""The supervisor of a local run; ``python -m scaletrain_cli.launch.backends.local.supervisor RUN_DIR``.

It runs attempts until the run is done, cancelled or must not be retried. It is a detached process, which survives the
end of the terminal session. SIGTERM means that the machine shuts down or the run is cancelled: no attempt follows.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.local.backend import (
    SUPERVISOR_FAILED,
    SUPERVISOR_STOPPED,
    LocalBackend,
    live_agents,
    run_to_wait_for,
    write_supervisor,
)
from scaletrain_cli.launch.node.job import WAIT_SECONDS, OneNodeJob, end_by_error
from scaletrain_cli.launch.node.options import AGENT_SIGNALS
from scaletrain_cli.launch.node.processes import adopt_orphans, die_with_parent, own_identity
from scaletrain_cli.launch.node.ranks import ENGINE_MODULE
from scaletrain_cli.launch.restart import conclude_abandoned
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.safe_files import locked

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a run until its end; return its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AGENT_SIGNALS)
    parser = argparse.ArgumentParser(prog="local_supervisor", description="Run a job's attempts on this machine.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--parent-pid", type=int, help="save a checkpoint and stop the run if this parent process ends")
    parser.add_argument("--engine", default=ENGINE_MODULE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.parent_pid is not None and not die_with_parent(options.parent_pid, signal.SIGTERM):
        return ExitCode.CRASHED
    adopt_orphans()
    set_up_logging("supervisor")
    run, job = RunDir(options.run_folder.absolute()), None
    try:
        with locked(run.path / "supervisor.lock", wait_seconds=0) as alone:
            if not alone:  # the other one records the end
                logger.error("%s", Reason("local.supervisor-exists", {"run": run.run_id}))
                return ExitCode.SCHEDULER
            write_supervisor(run, own_identity())
            job = Supervision(run, read_record(run), LocalBackend.name, str(os.getpid()), options.engine)
            return job.run_to_end()
    except Exception as error:
        return end_by_error(run, error, SUPERVISOR_FAILED, was_begun=job is not None and job.at_work)


@dataclass
class Supervision(OneNodeJob):
    """The job of a local run. It records in supervisor.json that it has begun, for the process that submitted it."""

    at_work: bool = field(default=False, init=False)
    stop_reason: ClassVar[Reason] = Reason(SUPERVISOR_STOPPED)

    def before_first_attempt(self) -> None:
        """Wait for the node agent of a supervisor that was killed, and for the run before this one in its sweep."""
        if live_agents(self.run):
            self.on_begin()
        while live_agents(self.run) and not self.stopping:
            self.listen(timeout=WAIT_SECONDS)  # the agent's ranks are saving
        conclude_abandoned(self.run, self.record)
        if run_to_wait_for(self.run) is not None:
            self.on_begin()
        while run_to_wait_for(self.run) is not None and not (self.stopping or self.run.is_cancelled):
            self.listen(timeout=WAIT_SECONDS)

    def on_begin(self) -> None:
        """Record in supervisor.json, once, that this supervisor is at work."""
        if not self.at_work:
            write_supervisor(self.run, own_identity(), at_work=True)
        self.at_work = True


if __name__ == "__main__":
    sys.exit(main())
