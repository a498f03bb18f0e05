"""One node's part of one attempt: check the node, start its ranks, watch them (watch.py), record how they ended.

The ranks run a copy of the user's code, which is checked here. Expects options.AGENT_SIGNALS to be blocked.
"""

import contextlib
import fcntl
import gzip
import hashlib
import logging
import math
import os
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scaletrain_cli.errors import ExitCode, PreemptedError, ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.launch.node.heartbeats import START_SECONDS, stopped_seconds
from scaletrain_cli.launch.node.hub import fetch_hub_files
from scaletrain_cli.launch.node.idle import GpuUse, IdleWatch
from scaletrain_cli.launch.node.inspection import inspect_node, write_inspection
from scaletrain_cli.launch.node.observer import MirrorProcess, Observer
from scaletrain_cli.launch.node.options import LAST_LOOK_SIGNAL, AgentOptions
from scaletrain_cli.launch.node.processes import (
    StoppedProcesses,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    next_signal,
    own_identity,
)
from scaletrain_cli.launch.node.ranks import LocalRanks, program_command, rank_environment
from scaletrain_cli.launch.node.record import (
    NodeRecord,
    RankRecord,
    announce,
    is_announced,
    read_node_records,
    write_node_record,
)
from scaletrain_cli.launch.node.telemetry import NodeTelemetry, measures_gpus
from scaletrain_cli.launch.node.watch import StartWatch, Watch
from scaletrain_cli.launch.resource_checks.checks import check_on_node
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import python_command, usable_cores
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir, copies_folder, swap_folder
from scaletrain_cli.rundir.record import (
    CodeRecord,
    RunRecord,
    code_file,
    differences,
    hash_of,
    paths_in,
    read_record_of,
)
from scaletrain_cli.safe_files import (
    closing_descriptor,
    expand_home,
    make_folder,
    make_private_folder,
    open_new,
    open_to_append,
)
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.text import listed
from scaletrain_cli.worker.failures import failure_of, write_failure
from scaletrain_cli.worker.memory_copies import remove_abandoned, remove_copies
from scaletrain_cli.worker.run_environment import RENDEZVOUS_VARIABLE

_LAST_SUBMISSION_SECONDS = 5.0  # for which the job keeps its nodes after the last rank has ended
_TOGETHER_SECONDS, _TOGETHER_POLL_SECONDS = 1800.0, 1.0
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_TEMPORARY = ("/tmp", "/var/tmp")
logger = logging.getLogger(__name__)

# Final exit codes: one of these from a rank becomes the node's exit code; any other failure becomes 1.
FINAL_CODES = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.WRONG_NODES, ExitCode.DO_NOT_REQUEUE)


def run_node(options: AgentOptions) -> int:
    """Run the local ranks to their end, and return the node's exit code.

    Raises UsageError for a damaged record, WrongNodesError for an unfit node.
    """
    if options.parent_pid is not None and not die_with_parent(options.parent_pid, signal.SIGTERM):
        raise ScaletrainError(Reason("node.parent-ended", {"pid": options.parent_pid}))
    adopt_orphans()
    options = replace(options, run_folder=options.run_folder.absolute())
    run = RunDir(options.run_folder)
    if not run.path.is_dir():  # before the record is read: a missing record would be a UsageError
        raise WrongNodesError(Reason("node.run-missing", {"path": str(run.path), "host": socket.gethostname()}))
    record = read_record_of(run, options.attempt)
    set_up_logging(
        f"node agent {options.node_rank} on {options.node_name}", environment={**os.environ, **record.spec.env}
    )
    me = own_identity()
    node = NodeRecord(
        node=f"node-{options.node_rank:04d}-{options.node_name}",
        hostname=socket.gethostname(),
        node_rank=options.node_rank,
        agent_pid=me.pid,
        agent_start_ticks=me.start_ticks,
        started=time.time(),
        agent_boot=me.boot,
    )
    _claim(run, options.attempt, node)
    gpu_locks = contextlib.ExitStack() if record.spec.cluster.traits.runs_here else None  # until this process ends
    # A user's training program may send no heartbeat.
    limit = math.inf if record.spec.code.own_program else START_SECONDS
    local_ranks = LocalRanks(limit, foreign=record.spec.code.command is not None)
    own_folders = _own_folders(run, record, options)
    try:
        report = inspect_node(run, record, node.node, os.environ, gpu_locks)
        with contextlib.suppress(OSError):  # informational; the failure record has the reason
            write_inspection(run, options.attempt, report)
        for note in report.notes:
            logger.warning("%s", note)
        if report.problems:
            first, *others = report.problems
            cause = Reason("node.unfit", {"problems": "; ".join(map(str, report.problems))}) if others else first
            raise WrongNodesError(cause)
        if [gpu.index for gpu in report.gpus] != [*range(len(report.gpus))]:  # else CUDA takes the same ones by itself
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid for gpu in report.gpus))
        watch = _run_ranks(local_ranks, run, record, options, node)
        ranks, first_failure = tuple(local_ranks.ranks), local_ranks.first_failure
        code = node_exit_code(ranks, first_failure) if watch.disk_full is None else int(ExitCode.DO_NOT_REQUEUE)
        with contextlib.suppress(ScaletrainError, OSError):
            if lost := left_in_code(run, record, own_folders[1]):
                where = f"written to the folder of the code are removed: {listed(lost[:5])}"
                logger.warning("%d files %s. Programs must write to $SCALETRAIN_RUN_DIR", len(lost), where)
        ended = replace(node, ranks=ranks, ended=time.time(), exit_code=code, first_failure=first_failure)
        if code != ExitCode.CRASHED or watch.preempted:  # else the next attempt may begin on this node
            remove_copies(copies_folder(run))
        _remove(*own_folders)
        if watch.disk_full is not None:
            write_failure(run, options.attempt, f"{node.node}-disk", watch.disk_full)
        write_node_record(run, options.attempt, ended)
    except PreemptedError as error:  # before any rank was started
        logger.warning("%s", error)
        _remove(*own_folders)
        write_node_record(run, options.attempt, replace(node, ended=time.time(), exit_code=error.exit_code))
        return int(error.exit_code)
    except Exception as error:  # recorded; otherwise the node would count as lost, and would be excluded
        failure = replace(failure_of(error, None), node=node.node)
        ended = replace(node, ranks=tuple(local_ranks.ranks), ended=time.time(), exit_code=failure.exit_code)
        write_failure(run, options.attempt, node.node, failure)
        announce(run, options.attempt, "failed")
        write_node_record(run, options.attempt, ended)
        _remove(*own_folders)
        raise
    if options.end_together and code == ExitCode.DONE and not watch.preempted:
        _wait_for_other_nodes(run, options, record.spec.cluster.nodes)
    return code


def _run_ranks(
    local_ranks: LocalRanks, run: RunDir, record: RunRecord, options: AgentOptions, node: NodeRecord
) -> Watch:
    """Start the ranks and watch them to their end. No process of theirs is left then, also after an error."""
    telemetry: NodeTelemetry | None = None
    try:
        _start_ranks(local_ranks, run, record, options)
        write_node_record(run, options.attempt, replace(node, ranks=tuple(local_ranks.ranks)))
        stopped = StoppedProcesses(stopped_seconds(record.spec))
        watch = Watch(run, options, node.node, local_ranks, record.spec.cluster, stopped)
        if not record.spec.code.own_program:
            watch.start = StartWatch(run, options, node.node, record.spec.cluster.nodes)
        if options.node_rank == 0:
            watch.observer = Observer(run, options.attempt, notifies=bool(record.spec.notify))
            if record.spec.checkpoint.mirror.to is not None:
                watch.mirror = MirrorProcess(run, record)
        interval = record.spec.telemetry.interval
        use = GpuUse()
        if record.spec.cluster.idle_timeout is not None:
            place = (node.node, options.node_rank, record.spec.cluster, interval)
            watch.idle = IdleWatch(run, options.attempt, *place, use)
        if record.spec.telemetry.enabled or (watch.idle is not None and measures_gpus(record.spec)):
            path = node_file(run, options.attempt, node.node) if record.spec.telemetry.enabled else None
            telemetry = watch.telemetry = NodeTelemetry(
                path, interval, local_ranks.rows, lambda: local_ranks.step, use.add
            )
            telemetry.start(record.spec)
        submitting = _start_submitting_evaluations(run, record, options)
        if submitting is not None:
            watch.own_pids = (submitting.pid,)
        watch.run_to_end()
        if watch.mirror is not None:
            watch.mirror.ask_for_the_last()
        if telemetry is not None:
            telemetry.finish((watch.deadline - time.monotonic()) / 4 if watch.preempted else math.inf)
        if watch.observer is not None:
            # Half of what is left of the grace period: the end of the node is recorded after it.
            left = (watch.deadline - time.monotonic()) / 2 if watch.preempted else math.inf
            watch.observer.finish(left, failed=local_ranks.first_failure is not None)
        if watch.mirror is not None:
            failed = local_ranks.first_failure is not None or watch.disk_full is not None
            grace_seconds = record.spec.cluster.grace_seconds
            watch.mirror.finish(failed=failed, seconds_left=watch.seconds_for_mirror, grace_seconds=grace_seconds)
        if submitting is not None:
            if node_exit_code(local_ranks.ranks, local_ranks.first_failure) == ExitCode.DONE:
                # It is running already, so that this takes no longer than one answer of the scheduler.
                from scaletrain_cli.launch.evaluate import record_left_evaluations

                with contextlib.suppress(ScaletrainError, OSError):  # evaluations never change the end of training
                    submitting.send_signal(LAST_LOOK_SIGNAL)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        submitting.wait(_LAST_SUBMISSION_SECONDS)
                    record_left_evaluations(run, record)
            submitting.kill()
    finally:
        # Before the end is recorded: a process that reads it may start the next attempt on this node.
        kill_descendants(() if telemetry is None else telemetry.pids)  # a driver that hangs must not delay the record
    return watch


def _wait_for_other_nodes(run: RunDir, options: AgentOptions, nodes: int) -> None:
    """Wait until every node of a finished run has recorded its end, or a signal arrives; _TOGETHER_SECONDS at most.

    srun ends the other agents some seconds after the first one, but the end of a node may take minutes: trackers, the
    deletion of old checkpoints, the last copy to a mirror. The first node reads the records, the others its mark. Not
    after a failure or a signal: a node that is lost never records its end, and the next attempt must not wait for it.
    """
    until = time.monotonic() + _TOGETHER_SECONDS
    with contextlib.suppress(ScaletrainError, OSError):
        while nodes > 1 and not is_announced(run, options.attempt, "ended", "failed") and time.monotonic() < until:
            records = read_node_records(run, options.attempt) if options.node_rank == 0 else []
            if sum(node.ended is not None for node in records) >= nodes:
                announce(run, options.attempt, "ended")
            elif next_signal((signal.SIGTERM, signal.SIGINT), _TOGETHER_POLL_SECONDS) is not None:
                return


def node_exit_code(ranks: Sequence[RankRecord], first_failure: int | None) -> int:
    """Return 0 if all are done, 75 if some were preempted, else the first failed rank's if it is final, else 1."""
    codes = {rank.rank: rank.exit_code for rank in ranks}
    if first_failure is None:
        return ExitCode.DONE if all(code == 0 for code in codes.values()) else ExitCode.PREEMPTED
    code = codes[first_failure]
    return int(code) if code in FINAL_CODES else ExitCode.CRASHED


def _start_submitting_evaluations(
    run: RunDir, record: RunRecord, options: AgentOptions
) -> subprocess.Popen[bytes] | None:
    """Start a process on the first node that submits evaluations of the checkpoints; None if another place does it.

    Return None, with a warning in the log, if it cannot be started: evaluations never disturb training.
    """
    settings, traits = record.spec.evaluation, record.spec.cluster.traits
    if options.node_rank > 0 or not settings.tasks or settings.job.submit != "auto" or not traits.submits_from_nodes:
        return None
    # In a process of its own, so that a slow scheduler cannot delay the agent.
    command = python_command("scaletrain_cli", "evaluation", "submit", str(run.path), "--follow")
    try:
        with closing_descriptor(open_to_append(run.path / "evaluations.log")) as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    except OSError as error:
        logger.warning("evaluations are not submitted from this node: %s", error)
        return None


def _claim(run: RunDir, attempt: int, node: NodeRecord) -> None:
    """Write the first node record, which proves that the run directory is shared and writable."""
    try:
        if not run.attempt(attempt).is_dir():
            raise UsageError(Reason("node.attempt-missing", {"path": str(run.path), "attempt": attempt}))
        write_node_record(run, attempt, node)
    except OSError as error:
        if is_full(error):
            raise
        params = {"path": str(run.path), "host": node.hostname, "error": str(error)}
        raise WrongNodesError(Reason("node.run-unwritable", params)) from error


def _own_folders(run: RunDir, record: RunRecord, options: AgentOptions) -> tuple[Path, Path, Path]:
    """Return the folders of this attempt elsewhere: of offloaded states, of the user's code, and of the rendezvous."""
    swap = swap_folder(record.run_id, options.attempt, options.node_rank, {**os.environ, **record.spec.env})
    code = unpacked_folder(run, options.attempt, options.node_rank, os.environ)
    return swap, code, code.with_name(f"{code.name}-rendezvous")


def _remove(*folders: Path) -> None:
    """Remove the folders: offloaded states may be several times the size of the model."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node of the run may be on this machine
            folder.parent.rmdir()


def compiled_code(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for torch.compile's cache; empty if one of the environments sets it.

    The default below /tmp could be a folder of another user, and the cached code is executed.
    """
    if any(_COMPILED in environment for environment in environments):
        return {}
    name = f"scaletrain-compiled-{os.geteuid()}"
    unguessed = f"{name}-{os.urandom(8).hex()}"  # if another user has taken the name
    # The job's TMPDIR may be one of the login node, which does not exist here.
    for parent in (os.environ.get("TMPDIR") or _TEMPORARY[0], *_TEMPORARY):
        for folder in (Path(parent).absolute() / name, Path(parent).absolute() / unguessed):
            with contextlib.suppress(OSError):
                make_private_folder(folder)
                return {_COMPILED: str(folder)}
    return {_COMPILED: str(folder)}  # needed only by runs that compile


def _start_ranks(local_ranks: LocalRanks, run: RunDir, record: RunRecord, options: AgentOptions) -> None:
    # Relative paths in the spec do not depend on the folder in which the attempt is started.
    if os.path.isdir(record.working_folder):
        os.chdir(record.working_folder)
    own = _own_folders(run, record, options)
    remove_abandoned(copies_folder(run))
    for folder in (path for mine in own for path in mine.parent.glob("attempt-*")):
        if folder.name < f"attempt-{options.attempt:04d}-":
            _remove(folder)  # of an earlier attempt whose agent was killed, or counts as lost
    if record.spec.layout.offload_device == "nvme":  # optimizer states are read back from there
        make_private_folder(own[0].parent)
    code = place_code(run, record, own[1])
    words = record.spec.code.command
    command = (
        program_command(words, code or Path.cwd())
        if words is not None
        else python_command(record.spec.code.engine or options.engine, str(run.path))
    )
    rendezvous: dict[str, str] = {}
    if record.spec.cluster.nodes == 1 and not record.spec.code.own_program:
        # TCP, if another user has taken the name, or on a file system without locks
        with contextlib.suppress(OSError):
            make_private_folder(own[2].parent)
            shutil.rmtree(own[2], ignore_errors=True)  # of an agent that was killed
            make_private_folder(own[2])
            with open_new(own[2] / "probe") as probe:
                fcntl.flock(probe, fcntl.LOCK_EX)
            rendezvous = {RENDEZVOUS_VARIABLE: str(own[2] / "store")}
    secrets = read_document(run.secrets) or {}
    # Otherwise the scheduler sets them in the environment.
    given = set() if record.spec.cluster.traits.secrets_from_submitter else os.environ.keys()
    missing = set(record.spec.secret_env) - secrets.keys() - given
    if missing:
        raise UsageError(Reason("node.secrets-missing", {"path": str(run.secrets), "names": sorted(missing)}))
    local = fetch_hub_files(run, record, options, secrets)
    check_on_node(run, replace(record, spec=local.spec), options.node_rank, code)
    base = {**compiled_code(os.environ, record.spec.env), **os.environ}
    cores = usable_cores()
    per_node = record.spec.cluster.gpus_per_node
    per_process = per_node if record.spec.code.processes_per_node == 1 else 1  # ranks of one process
    for local_rank in range(0, per_node, per_process):
        rank = options.node_rank * per_node + local_rank
        environment = rank_environment(record.spec, options, local_rank, base=base, secrets=secrets, cores=cores)
        if code is not None:
            environment |= code_environment(record, code, environment)
        environment |= {**local.variables, **rendezvous}
        log = run.attempt(options.attempt) / "logs" / f"{options.node_name}-{rank:05d}.log"
        local_ranks.start(rank, command, environment, log, per_process)


def unpacked_folder(run: RunDir, attempt: int, node_rank: int, environment: Mapping[str, str]) -> Path:
    """Return the folder of an attempt's code on this node, below the folder for temporary files."""
    parent = Path(environment.get("TMPDIR") or "/tmp").absolute()
    root = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]  # a run below another root may have the same name
    return parent / f"scaletrain-code-{run.run_id}-{root}" / f"attempt-{attempt:04d}-node-{node_rank:04d}"


def place_code(run: RunDir, record: RunRecord, folder: Path) -> Path | None:
    """Return the folder with the code of the run's program: ``folder``, created anew, or ``code.on_nodes``; else None.

    Raises UsageError if the code differs from the submitted one, WrongNodesError if this node cannot read or store it.
    """
    code = record.code
    if code is None or not record.spec.code.own_program:  # only recorded; the built-in engine imports none of it
        return None
    expected = _listing(run, code)
    there = record.spec.code.on_nodes
    if there is None:
        _unpack(code_file(run, code, "tar.gz"), folder)
    place = folder if there is None else Path(there)
    differing = differences(place, expected)
    if differing:
        params = {"folder": str(place), "code": code.name, "files": list(differing)}
        raise UsageError(Reason("node.code-differs-in-image" if there else "node.code-differs", params))
    return place


def left_in_code(run: RunDir, record: RunRecord, folder: Path) -> list[str]:
    """Return the files that a program has written to ``folder``, which is removed at the end of the attempt."""
    if record.code is None or record.spec.code.command is None or not folder.is_dir():
        return []
    kept = paths_in(_listing(run, record.code))
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in kept and "__pycache__" not in name.split("/"))


def code_environment(record: RunRecord, place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a rank import from ``place`` first, not from the submitter's working tree."""
    tree = os.path.normpath(Path(record.working_folder, expand_home(record.spec.code.path or ".")))
    paths = [os.path.normpath(place / record.spec.code.import_root)]
    for entry in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        meant = os.path.normpath(Path(record.working_folder, entry))
        inside = Path(meant).is_relative_to(tree)
        paths.append(os.path.normpath(place / os.path.relpath(meant, tree)) if inside else meant)
    return {"PYTHONPATH": os.pathsep.join(paths), "SCALETRAIN_CODE": str(place)}


def _listing(run: RunDir, code: CodeRecord) -> str:
    path = code_file(run, code, "sha256")
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise WrongNodesError(Reason("node.code-list-unreadable", {"error": str(error)})) from error
    if hash_of(text) != code.sha256:
        raise UsageError(Reason("node.code-list-differs", {"path": str(path)}))
    return text


def _unpack(archive: Path, folder: Path) -> None:
    try:
        parent = folder.parent
        make_folder(parent, mode=0o700)
        status = parent.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise WrongNodesError(Reason("node.code-folder-not-private", {"folder": str(parent)}))
        shutil.rmtree(folder, ignore_errors=True)  # left by an agent that was killed
        make_folder(folder, exist_ok=False)
        with tarfile.open(archive, "r:gz") as packed:
            for entry in packed:  # regular files only; each is verified afterwards
                path = folder / entry.name
                if entry.isfile() and path.resolve().is_relative_to(folder.resolve()):
                    make_folder(path.parent)
                    content = packed.extractfile(entry)
                    assert content is not None, "a regular file has content"
                    with open_new(path) as file:
                        shutil.copyfileobj(content, file)
                    path.chmod(entry.mode & 0o755)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(Reason("node.code-archive-differs", {"path": str(archive), "error": str(error)})) from error
    except OSError as error:
        raise WrongNodesError(Reason("node.code-not-unpacked", {"path": str(archive), "error": str(error)})) from error
