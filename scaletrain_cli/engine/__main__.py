"""``python -m scaletrain_cli.engine RUN_DIR``: one rank, from its first signal handler to its exit code.

Every exception becomes an exit code and a failure record for the restart policy.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path

from scaletrain_cli.errors import ExitCode, PreemptedError
from scaletrain_cli.hub.cache import HubSettings
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.rundir.documents import DamagedError
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec.hub_files import with_local_files
from scaletrain_cli.worker.agent_watch import AgentWatch
from scaletrain_cli.worker.failures import report_exception
from scaletrain_cli.worker.heartbeat import IMPORT_SECONDS, Heartbeat, install_stack_dump
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent, own_exit_seconds

logger = logging.getLogger(__name__)


def main() -> int:
    """Train, and return the exit code of the rank."""
    flag = PreemptionFlag()
    flag.install()
    die_with_agent()
    install_stack_dump(os.environ)
    heartbeat = Heartbeat.from_environment(os.environ)
    heartbeat.beat(0, "imports", IMPORT_SECONDS)
    run, attempt, rank = RunDir(Path(sys.argv[1])), int(os.environ["SCALETRAIN_ATTEMPT"]), int(os.environ["RANK"])
    set_up_logging(f"rank {rank}", descriptor=1)
    watch = AgentWatch.of_rank(run, attempt)
    watch.start()
    code = _exit_code(run, attempt, rank, flag, heartbeat, watch)
    watch.leave()
    return code


def _exit_code(
    run: RunDir, attempt: int, rank: int, flag: PreemptionFlag, heartbeat: Heartbeat, watch: AgentWatch
) -> int:
    try:
        return int(_train(run, attempt, flag, heartbeat, watch))
    except PreemptedError as error:
        logger.info("%s", error)
        return int(error.exit_code)
    except Exception as error:
        if (evidence := getattr(error, "evidence", None)) is not None:
            # Unless another rank of the attempt has recorded it; two ranks may do so at the same instant.
            event = "damaged-data"
            with contextlib.suppress(OSError, DamagedError):
                known = {(e.get("attempt"), e.get("file")) for e in read_events(run) if e["event"] == event}
                if (attempt, evidence["file"]) not in known:
                    record_event(run, event, attempt=attempt, rank=rank, **evidence)
        return report_exception(run, attempt, rank, error)


def _train(run: RunDir, attempt: int, flag: PreemptionFlag, heartbeat: Heartbeat, watch: AgentWatch) -> ExitCode:
    gc.disable()  # it would look through the modules again and again while they load
    from scaletrain_cli.engine.assembly import assemble, preflight_alone
    from scaletrain_cli.engine.health import preflight
    from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
    from scaletrain_cli.engine.process_group import Ranks
    from scaletrain_cli.rundir.record import read_record_of

    gc.freeze()
    gc.enable()
    record, ranks = read_record_of(run, attempt), Ranks.from_environment()
    # The node agent has fetched the files of the hub, and set the cache of this environment.
    local = with_local_files(record.spec, record.hub, HubSettings.from_environment(os.environ))
    record = dataclasses.replace(record, spec=local)
    flag.call_after(own_exit_seconds(record.spec.cluster.grace_seconds), partial(_exit_without_saving, watch))
    with reporting_out_of_memory(run, record.plan, attempt, ranks.rank):
        only = os.environ.get(preflight.ONLY)
        if only == "preflight":
            return preflight_alone(run, record, ranks, attempt)
        trainer = assemble(run, record, ranks, attempt, flag, heartbeat)
        if only == "rehearsal":
            from scaletrain_cli.engine.rehearsal.run import rehearse

            return rehearse(trainer, os.environ)
        return trainer.fit()


def _exit_without_saving(watch: AgentWatch) -> None:
    """Exit from a thread, while the main one compiles, waits for a collective or saves."""
    logger.warning("grace period expired; the latest committed checkpoint will be used")
    watch.leave()
    os._exit(ExitCode.PREEMPTED)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group whose peer has died would hang or abort in its destructor and hide the code
