"""One node's part of one attempt, from the check of the node to its last process.

Expects the signals of node_agent.HEARD to be blocked. Checks, starts, records; what happens in between is watch's.
Knows no scheduler, and of the engine only its exit codes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.launch.node.code import code_environment, place_code, unpacked_folder
from scaletrain_cli.launch.node.heartbeats import stopped_seconds
from scaletrain_cli.launch.node.inspection import inspect_node, usable_cores, write_inspection
from scaletrain_cli.launch.node.options import AgentOptions
from scaletrain_cli.launch.node.processes import (
    Standstill,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    own_identity,
)
from scaletrain_cli.launch.node.ranks import LocalRanks, NodePlace, rank_environment
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, announce_failure, write_node_record
from scaletrain_cli.launch.node.watch import Watch
from scaletrain_cli.launch.resource_checks.checks import check_on_node
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir, swap_folder
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import make_private_folder
from scaletrain_cli.worker.failures import Failure, write_failure

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_TEMPORARY = ("/tmp", "/var/tmp")

# What a retry cannot cure, or only elsewhere: such a code of a rank becomes the node's, any other failure becomes 1.
VERDICTS = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.WRONG_NODES, ExitCode.DO_NOT_REQUEUE)


def run_node(options: AgentOptions) -> int:
    """Run the ranks to their end. Raises UsageError for a damaged record, WrongNodesError for an unfit node."""
    if options.parent_pid is not None and not die_with_parent(options.parent_pid, signal.SIGTERM):
        raise ScaletrainError(f"the parent {options.parent_pid} is gone; nobody is left to judge this attempt.")
    adopt_orphans()
    run = RunDir(options.run_folder.absolute())
    if not run.path.is_dir():  # before the record is missed, which would be the user's fault
        raise WrongNodesError(f"{run.path} is not there on {socket.gethostname()}; is its file system mounted?")
    record = read_record(run)
    me = own_identity()
    node = NodeRecord(
        node=f"node-{options.node_rank:04d}-{options.node_name}",
        hostname=socket.gethostname(),
        node_rank=options.node_rank,
        agent_pid=me.pid,
        agent_start_ticks=me.start_ticks,
        started=time.time(),
    )
    _claim(run, options.attempt, node)
    found = inspect_node(run, record, node.node, os.environ)
    with contextlib.suppress(OSError):  # for people; the verdict stands in the failure
        write_inspection(run, options.attempt, found)
    for note in found.notes:
        print(f"{node.node}: {note}", file=sys.stderr, flush=True)
    if found.problems:
        _refuse(run, options.attempt, node, "; ".join(found.problems))
    gang = (
        LocalRanks(math.inf) if record.spec.code.engine else LocalRanks()
    )  # a program of the user's may know no heartbeat
    try:
        try:
            _start_ranks(gang, run, record, options)
        except (ScaletrainError, OSError) as error:  # nothing to watch; say why, or it would count as a lost node
            verdict = error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED
            verdict = ExitCode.DO_NOT_REQUEUE if is_full(error) else verdict
            reason = "disk-full" if is_full(error) else "crash"
            failure = Failure(None, reason, f"{node.node}: {error}", int(verdict), node.node)
            _give_up(run, options.attempt, node, failure)
            _remove(*_own_folders(run, record, options))
            raise
        write_node_record(run, options.attempt, replace(node, ranks=tuple(gang.ranks)))
        standstill = Standstill(stopped_seconds(record.spec))
        watch = Watch(run, options, node.node, gang, record.spec.cluster, standstill)
        watch.run_to_end()
    finally:
        # Before the record says "ended": who reads that may start the next attempt here.
        kill_descendants()
    code = node_exit_code(gang.ranks, gang.first_failure) if watch.full is None else int(ExitCode.DO_NOT_REQUEUE)
    ended = replace(node, ranks=tuple(gang.ranks), ended=time.time(), exit_code=code, first_failure=gang.first_failure)
    _remove(*_own_folders(run, record, options))
    if watch.full is not None:
        write_failure(run, options.attempt, f"{node.node}-disk", watch.full)
    write_node_record(run, options.attempt, ended)
    return code


def node_exit_code(ranks: Sequence[RankRecord], first_failure: int | None) -> int:
    """All done: 0; some preempted: 75; else what the rank that failed first ended with if it is a verdict, else 1."""
    codes = {rank.rank: rank.exit_code for rank in ranks}
    if first_failure is None:
        return ExitCode.DONE if all(code == 0 for code in codes.values()) else ExitCode.PREEMPTED
    code = codes[first_failure]
    return int(code) if code in VERDICTS else ExitCode.CRASHED


def _claim(run: RunDir, attempt: int, node: NodeRecord) -> None:
    """Write the first record: the proof that the run directory is the shared one and can be written."""
    try:
        if not run.attempt(attempt).is_dir():
            raise UsageError(f"{run.path} has no attempt {attempt}; is it the directory that the launcher sees?")
        write_node_record(run, attempt, node)
    except OSError as error:
        if is_full(error):
            raise
        raise WrongNodesError(f"the run directory {run.path} cannot be written on {node.hostname}: {error}") from error


def _refuse(run: RunDir, attempt: int, node: NodeRecord, problem: str) -> None:
    message = f"{node.node}: {problem}"
    _give_up(run, attempt, node, Failure(None, "wrong-nodes", message, int(ExitCode.WRONG_NODES), node.node))
    raise WrongNodesError(message)


def _give_up(run: RunDir, attempt: int, node: NodeRecord, failure: Failure) -> None:
    write_failure(run, attempt, node.node, failure)
    announce_failure(run, attempt)
    write_node_record(run, attempt, replace(node, ended=time.time(), exit_code=failure.exit_code))


def _own_folders(run: RunDir, record: RunRecord, options: AgentOptions) -> tuple[Path, Path]:
    """What this node has beside the run directory, for this attempt alone: offloaded states, and the user's code."""
    place = (record.run_id, options.attempt, options.node_rank)
    return (
        swap_folder(*place, {**os.environ, **record.spec.env}),
        unpacked_folder(run, options.attempt, options.node_rank, os.environ),
    )


def _remove(*folders: Path) -> None:
    """Of no use to anyone any more; the states may be several times the model."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node of the run may be on this machine
            folder.parent.rmdir()


def compiled_code(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return where torch.compile keeps what it compiled: its own default below /tmp could be another user's folder.

    What is in it is run. Nothing is returned where one of the environments says another place.
    """
    if any(_COMPILED in environment for environment in environments):
        return {}
    name = f"scaletrain-compiled-{os.geteuid()}"
    unguessed = f"{name}-{os.urandom(8).hex()}"  # where somebody took the name
    # A job's TMPDIR may be that of the login node, which is not there.
    for parent in (os.environ.get("TMPDIR") or _TEMPORARY[0], *_TEMPORARY):
        for folder in (Path(parent).absolute() / name, Path(parent).absolute() / unguessed):
            with contextlib.suppress(OSError):
                make_private_folder(folder)
                return {_COMPILED: str(folder)}
    return {_COMPILED: str(folder)}  # what compiles nothing can run without


def _start_ranks(gang: LocalRanks, run: RunDir, record: RunRecord, options: AgentOptions) -> None:
    # Relative paths in the spec mean the same whoever starts the attempt, and from where.
    if os.path.isdir(record.working_folder):
        os.chdir(record.working_folder)
    own = _own_folders(run, record, options)
    for folder in (found for mine in own for found in mine.parent.glob("attempt-*")):
        if not folder.name.startswith(f"attempt-{options.attempt:04d}-"):
            _remove(folder)  # of an attempt whose agent was killed, or is taken for lost
    if record.spec.layout.offload_device == "nvme":  # optimizer states are read back from there
        make_private_folder(own[0].parent)
    code = place_code(run, record, own[1])
    check_on_node(run, record, options.node_rank, code)
    command = python_command(record.spec.code.engine or options.engine, str(run.path))
    place = NodePlace(options.attempt, options.node_rank, options.master_addr, options.master_port)
    secrets = read_document(run.secrets) or {}
    # Else the scheduler puts them into the environment.
    given = set() if record.spec.cluster.traits.secrets_from_submitter else os.environ.keys()
    missing = set(record.spec.secret_env) - secrets.keys() - given
    if missing:
        raise UsageError(f"{run.secrets} does not hold {', '.join(sorted(missing))}, which secret_env names.")
    base = {**compiled_code(os.environ, record.spec.env), **os.environ}
    cores = usable_cores()
    per_node = record.spec.cluster.gpus_per_node
    for local_rank in range(per_node):
        rank = options.node_rank * per_node + local_rank
        environment = rank_environment(record.spec, place, local_rank, base=base, secrets=secrets, cores=cores)
        if code is not None:
            environment |= code_environment(record, code, environment)
        log = run.attempt(options.attempt) / "logs" / f"{options.node_name}-{rank:05d}.log"
        gang.start(rank, command, environment, log)
