"""The process that mirrors a run: a child of the first node's agent (node/observer.py), or of what ends the run.

``python -m scaletrain_cli.launch.mirroring RUN_DIR --parent-pid PID``. It reads the run directory and the checkpoint
folder and writes to the mirror, mirror.json and events.jsonl. The end of its standard input asks for the newest
checkpoint and the history; it then ends. With ``--release`` it does only that, and records in the mirror that the run
has ended here. It has the lowest priority and dies with its parent; no rank waits for it.
"""

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.launch.node.observer import MODULE
from scaletrain_cli.launch.node.processes import die_with_parent, yield_to_training
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.mirror.object_store import open_store, store_variables
from scaletrain_cli.mirror.stores import MirrorError
from scaletrain_cli.mirror.sync import Mirror
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.mirror_state import MirrorState, read_superseded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import locked

_LOOK_SECONDS = 1.0  # between two looks for a new checkpoint
_LAST_PAUSE_SECONDS = 1.0  # between two last tries
_LAST_TRIES = 3
_KILL_SECONDS = 1.0
LOCK = "mirror.lock"
logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Mirror until the standard input ends; return the exit code of the process: 0 if nothing is left to do."""
    parser = argparse.ArgumentParser(prog="mirroring", description="Mirror a run while it trains.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--release", action="store_true", help="record in the mirror that the run has ended here")
    options = parser.parse_args(arguments)
    if not die_with_parent(options.parent_pid, signal.SIGKILL):
        return ExitCode.CRASHED
    yield_to_training()
    set_up_logging("mirror")
    run = RunDir(options.run_folder)
    try:
        record = read_record(run)
        with locked(run.path / LOCK, wait_seconds=None if options.release else 0) as alone:
            if not alone:
                logger.warning("another process mirrors this run")
                return ExitCode.CRASHED
            return mirror_until_asked(run, record, releases=options.release, descriptor=0)
    except (ScaletrainError, OSError) as error:
        logger.warning("the run is not mirrored: %s", error)
        return ExitCode.CRASHED


def mirror_until_asked(run: RunDir, record: RunRecord, *, releases: bool, descriptor: int) -> int:
    """Mirror until ``descriptor`` can be read, which is its end, and then a last time; see main()."""
    mirror = Mirror(run, record, open_store(str(record.spec.checkpoint.mirror.to), run.run_id))
    while not releases:
        if mirror.has_news():
            mirror.look()
        if mirror.is_superseded:
            return ExitCode.DONE
        if select.select([descriptor], [], [], _LOOK_SECONDS)[0]:
            break
    done = mirror.look(is_last=True)
    for _ in range(_LAST_TRIES):
        if done:
            break
        select.select([], [], [], _LAST_PAUSE_SECONDS)
        done = mirror.look(is_last=True)
    if done and releases and not mirror.is_superseded:
        mirror.release()
    return ExitCode.DONE if done else ExitCode.CRASHED


def mirror_now(run: RunDir, record: RunRecord) -> MirrorState:
    """Copy the newest checkpoint and the history in this process; return the state of the mirror.

    If only a resume continues the run, the mirror also records that it has ended here.
    Raises UsageError for a run without a mirror or one that is mirrored by another process, else what keeps the mirror
    from being current.
    """
    to = record.spec.checkpoint.mirror.to
    if to is None:
        raise UsageError(Reason("mirror.no-mirror-set", {"run": run.run_id}))
    with store_variables(record.spec.env), locked(run.path / LOCK, wait_seconds=0) as alone:
        if not alone:
            raise UsageError(Reason("mirror.other-process", {"run": run.run_id}))
        mirror = Mirror(run, record, open_store(to, run.run_id))
        mirror.look(is_last=True)
        if mirror.state.problem is not None or mirror.is_superseded:
            raise MirrorError(mirror.state.problem or Reason("mirror.stops", {"owner": mirror.state.owner}))
        if is_known_over(run):
            mirror.release()
        return mirror.state


def is_known_over(run: RunDir) -> bool:
    """Return whether only a resume continues the run; False if the scheduler does not say."""
    from scaletrain_cli.launch.status import is_over, run_status

    try:
        return is_over(run, run_status(run))
    except ScaletrainError:
        return False


def release_mirror(run: RunDir, record: RunRecord, environment: Mapping[str, str], seconds: float) -> None:
    """Copy what is left and record in the mirror that the run has ended here, for at most ``seconds``. Never raises."""
    if record.spec.checkpoint.mirror.to is None or read_superseded(run) is not None:
        return
    command = python_command(MODULE, str(run.path), "--parent-pid", str(os.getpid()), "--release")
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(environment))
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead file system
                process.wait(_KILL_SECONDS)
    except OSError as error:
        logger.warning("the mirror of the run was not completed: %s", error)


if __name__ == "__main__":
    sys.exit(main())
