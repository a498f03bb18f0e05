"""Begin and end an attempt inside a Slurm job; ``python -m scaletrain_cli.launch.backends.slurm.job WORD RUN_DIR``.

Runs in the batch script, on the first node. ``begin`` prints ``ATTEMPT MASTER_ADDR MASTER_PORT``, or nothing if the run
must not continue; for a run with a range of nodes or with spare ones also ``NODES NAMES HELD ALL``, those of the
attempt and of the job. ``end`` prints ``restart`` and after how many seconds the next attempt may begin in this job,
``requeue`` and what ``scontrol update`` must change, or ``stop``, and exits with the run's code; ``not-requeued``
withdraws a restart that failed; ``watch-reservation`` signals the ranks before the job's reservation ends.
"""

import argparse
import contextlib
import logging
import math
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.launch.attempts import AttemptRecord, begin_attempt, read_attempt, read_stop_request
from scaletrain_cli.launch.backends.slurm.array import own_job_id
from scaletrain_cli.launch.backends.slurm.commands import TIMEOUT_SECONDS, call_slurm
from scaletrain_cli.launch.backends.slurm.explain import job_fields
from scaletrain_cli.launch.backends.slurm.queue import job_cause, latest_job_id
from scaletrain_cli.launch.backends.slurm.script import exchanges_nodes, lead_seconds
from scaletrain_cli.launch.backends.slurm.site import exclude_option, exclusion_for, last_exclusion, record_exclusion
from scaletrain_cli.launch.backends.slurm.tables import (
    limit_seconds,
    moment,
    node_names,
    records,
    reservations,
    settings,
)
from scaletrain_cli.launch.node.job import end_by_error
from scaletrain_cli.launch.node.ranks import free_port, route_address
from scaletrain_cli.launch.node.record import is_announced
from scaletrain_cli.launch.restart import (
    conclude_abandoned,
    conclude_attempt,
    conclude_run,
    first_attempt_of_job,
    why_not_begin,
    withdraw_restart,
)
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.spec import ClusterSpec
from scaletrain_cli.text import listed
from scaletrain_cli.unexpected import known_error
from scaletrain_cli.worker.failures import read_failures

logger = logging.getLogger(__name__)
# States of nodes on which no further job would start: a health check or an administrator wants them free.
_LEAVES = re.compile("DRAIN|FAIL|REBOOT|MAINT")
_PAUSE_SECONDS = 60  # after an attempt without progress, which an outage of some minutes may have ended
_START_SECONDS = 180.0  # from the end of an attempt until the agents of the next one receive signals
_PROMPT_SECONDS = 10.0  # for an answer of Slurm without which the job is requeued
_ASKED_NODES = 4  # one is enough, unless its name does not resolve
# Slurm may send the signal of --signal up to a minute early, and if an administrator sets the end of a job, the limit
# that it shows, in minutes, is 30 to 90 seconds late (measured with 22.05).
_EARLY_SECONDS = 150.0
_POLL_SECONDS = 60.0  # between two questions when a reservation ends, which an administrator may change


def main(arguments: Sequence[str] | None = None) -> int:
    """Begin or end an attempt; return the exit code of the process."""
    leave_current_folder()
    set_up_logging("slurm job")
    parser = argparse.ArgumentParser(prog="slurm_job", description="Begin or end an attempt inside a Slurm job.")
    parser.add_argument("word", choices=("begin", "end", "not-requeued", "watch-reservation"))
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--srun-exit-code", type=int)
    parser.add_argument("--may-restart", action="store_true", help="the script, of this version, knows `restart`")
    parser.add_argument("--follows", action="store_true", help="an attempt has ended in this start of the job")
    parser.add_argument("--ended-by-slurm", action="store_true", help="the batch script got SIGTERM")
    options = parser.parse_args(arguments)
    run = RunDir(options.run_folder.absolute())
    is_ended = options.ended_by_slurm and not _still_runs(os.environ)
    stop_reason = Reason("slurm.job-being-ended") if is_ended else None
    try:
        record = read_record(run)
        if options.word == "begin":
            return begin(run, record, os.environ, follows=options.follows)
        if options.word == "watch-reservation":
            return watch_reservation(record.spec.cluster, os.environ)
        if options.word == "end":
            code = options.srun_exit_code
            return end(run, record, options.attempt, code, os.environ, stop_reason, may_restart=options.may_restart)
        if stop_reason is not None:  # Slurm is ending the job, and may still requeue it
            return withdraw_restart(run, options.attempt, stop_reason, left_to_scheduler=True).exit_code
        why = Reason("launch.stop-cancelled") if run.is_cancelled else Reason("slurm.job-not-requeued")
        return conclude_run(run, withdraw_restart(run, options.attempt, why))
    except Exception as error:
        failure, full = known_error(error, options.word), is_full(error)
        code = ExitCode.DO_NOT_REQUEUE if full else failure.exit_code
        # The script requeues the job in whose start an attempt has ended, and begin() fails with this code. What fails
        # the file system often fails the attempt, too: then the next start of the job records the end.
        after_end = options.word == "end" and failure.code != "internal"
        requeues = code == ExitCode.CRASHED and stop_reason is None and (options.follows or after_end)
        if options.word == "end":
            print("requeue" if requeues else "stop")
        may_go_on = requeues or stop_reason is not None or options.word == "watch-reservation"
        in_job = "SLURM_JOB_ID" in os.environ
        with contextlib.suppress(ScaletrainError, OSError):  # the run of another job goes on
            if in_job and not may_go_on and latest_job_id(run) == own_job_id(os.environ):
                return end_by_error(run, error if full else failure, "node.job-failed")
        logger.error("%s", failure)
        return code


def _still_runs(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm does not end this job, although its script got SIGTERM (`scancel --batch --signal=TERM`)."""
    try:
        job = job_fields(own_job_id(environment))
    except SchedulerError:
        return False
    return job.get("JobState") == "RUNNING" and job.get("PreemptTime", "None") in ("None", "Unknown")


def begin(run: RunDir, record: RunRecord, environment: Mapping[str, str], *, follows: bool = False) -> int:
    """Claim the next attempt and print its rendezvous address; print nothing if the run must not continue.

    A run with a range of nodes begins on the largest usable size; prints its number of nodes and their names, too.
    ``follows``: another attempt has ended in this start of the job. Then too few nodes may be usable: the exit code is
    that of a crash, and what is printed is as for ``end``.
    """
    job_id, cluster = own_job_id(environment), record.spec.cluster
    names = node_names(environment.get("SLURM_JOB_NODELIST", ""))
    allocated, planned = environment.get("SLURM_JOB_NUM_NODES"), cluster.allocated_nodes
    if not record.sizes and allocated is not None and int(allocated) != planned:
        # Requeued manually after a resize. The run belongs to another job, so nothing is written here.
        logger.warning("job %s has %s nodes, and the run uses %s since it was resized", job_id, allocated, planned)
        return ExitCode.USAGE
    if record.sizes and min(record.sizes) > len(names):  # submitted before the range was changed
        logger.warning("job %s has %d nodes, and the run uses %s", job_id, len(names), listed(record.sizes))
        return ExitCode.USAGE
    # An attempt of this job, killed before it could record the end; before the record changes: of the size before.
    conclude_abandoned(run, record, was_ended_by_slurm)
    refusal = why_not_begin(run, record, job_id)
    if refusal is not None:
        logger.error("%s", refusal.why)
        return conclude_run(run, refusal)
    if not exchanges_nodes(cluster, record.sizes):
        number = begin_attempt(run, record.spec, scheduler="slurm", job_id=job_id, nodes=names)
        print(number, own_address(environment, names), free_port(""))
        return ExitCode.DONE
    before = read_attempt(run, max(run.attempts(), default=0))
    bad = {node.node for node in read_bad_nodes(run.path.parent, time.time())}
    fresh = sorted(names, key=lambda name: name != names[0] and name in bad)
    usable = usable_held_nodes(run, names, job_id) if follows else tuple(fresh)
    size = chosen_size(record, len(usable), follows=follows)
    if size is None:  # another node was lost meanwhile
        logger.warning("job %s has too few usable nodes: it is requeued", job_id)
        print("requeue", *_changes(run, record, environment))
        return ExitCode.CRASHED
    if not follows and size + cluster.spare_nodes < len(names):
        usable = names = _give_back(job_id, names, size + cluster.spare_nodes)
    chosen = sorted(usable[:size], key=names.index)
    revised = record
    if record.sizes:
        from scaletrain_cli.launch.submit import take_size

        revised = take_size(run, record, size, job_id)
    number = begin_attempt(run, revised.spec, scheduler="slurm", job_id=job_id, nodes=chosen, revision=revised.revision)
    if follows and before is not None and before.nodes != tuple(chosen):
        left, joined = sorted({*before.nodes} - {*chosen}), sorted({*chosen} - {*before.nodes})
        record_event(run, "nodes-replaced", attempt=number, nodes=left, by=joined)
    print(number, own_address(environment, chosen), free_port(""), size, ",".join(chosen), len(names), ",".join(names))
    return ExitCode.DONE


def chosen_size(record: RunRecord, usable: int, *, follows: bool) -> int | None:
    """Return the number of nodes of the next attempt; None if too few are usable.

    The largest size that leaves the spare nodes, or the size so far if the attempt ``follows`` one in the same job, or
    else the largest one.
    """
    now = record.spec.cluster.nodes
    most = max(usable - record.spec.cluster.spare_nodes, now if follows and now <= usable else 0)
    sizes = [size for size in record.sizes or (now,) if size <= usable]
    return max((size for size in sizes if size <= most), default=max(sizes, default=None))


def usable_held_nodes(run: RunDir, names: Sequence[str], job_id: str) -> tuple[str, ...]:
    """Return the nodes of the job on which its next attempt may begin, those of the last one first.

    Empty if Slurm does not answer, or if the first node, where the batch script runs, is not usable.
    """
    try:
        command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%N"]
        held = {*node_names(call_slurm(command, seconds=_PROMPT_SECONDS).stdout.strip())}
    except SchedulerError:
        return ()
    bad = {node.node for node in read_bad_nodes(run.path.parent, time.time())}
    last = read_attempt(run, max(run.attempts(), default=0))
    started, used = (0.0, ()) if last is None else (last.started, last.nodes)
    usable = [
        node["NodeName"]
        for node in shown_nodes([name for name in names if name in held], _PROMPT_SECONDS)
        if not is_lost(node, started) and not _LEAVES.search(node.get("State", "")) and node["NodeName"] not in bad
    ]
    return tuple(sorted(usable, key=lambda name: name not in used)) if names[0] in usable else ()


def _give_back(job_id: str, names: Sequence[str], size: int) -> tuple[str, ...]:
    """Return the nodes that the job keeps: the first ones. The others are released, or idle if Slurm refuses."""
    with tempfile.TemporaryDirectory() as folder:  # scontrol writes a script into its current folder
        try:
            call_slurm(["scontrol", "update", f"JobId={job_id}", f"NumNodes={size}"], folder=Path(folder))
            logger.info("job %s has %d nodes, and the run can use %d: released the others", job_id, len(names), size)
            kept = call_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%N"]).stdout.strip()
            if len(kept_names := node_names(kept)) == size:
                return tuple(kept_names)
        except SchedulerError as error:
            left = len(names) - size
            logger.warning("job %s holds %d nodes that the run does not use: %s", job_id, left, error)
    return tuple(names[:size])


def end(
    run: RunDir,
    record: RunRecord,
    number: int,
    srun_exit_code: int,
    environment: Mapping[str, str],
    stop_reason: Reason | None = None,
    *,
    may_restart: bool = False,
) -> int:
    """Conclude the attempt and print what the script must do.

    Prints ``stop`` for an attempt that a later one of the same job has superseded.
    """
    if number < max(run.attempts(), default=number):
        print("stop")
        logger.warning("attempt %s was replaced by a later one; the run has not ended", number)
        return ExitCode.CRASHED
    job_id, attempt = own_job_id(environment), read_attempt(run, number)
    abandoned = is_announced(run, number, "abandoned")  # then a node without a record of its end may be healthy
    down: frozenset[str] | None = None
    if attempt is not None and (stop_reason is not None or abandoned):
        silent = {one.node.split("-", 2)[2] for one in read_failures(run, number) if one.reason == "node"}
        down = (lost_nodes(attempt) or frozenset()) | silent
    decision = conclude_attempt(
        run,
        record,
        number,
        first_attempt=first_attempt_of_job(run, job_id, number),
        launcher_exit_code=srun_exit_code,
        stop_reason=stop_reason,
        time_is_up=lambda: time_is_up(job_id, record.spec.cluster, environment),
        down=down,
        keeps_nodes=lambda against: (
            may_restart
            and attempt is not None
            and _keeps_nodes(
                run, record, attempt, environment, [name for name in against if not abandoned or name in (down or ())]
            )
        ),
    )
    if decision.in_place:
        ended = read_attempt(run, number)
        print("restart", 0 if ended is not None and ended.made_progress else _PAUSE_SECONDS)
    else:
        print(*(("requeue", *_changes(run, record, environment)) if decision.requeue else ("stop",)))
    may_go_on = decision.requeue or decision.left_to_scheduler
    return decision.exit_code if may_go_on else conclude_run(run, decision)


def _keeps_nodes(
    run: RunDir, record: RunRecord, attempt: AttemptRecord, environment: Mapping[str, str], against: Sequence[str]
) -> bool:
    """Return whether another attempt may begin on the nodes of the job, which a requeue would give back.

    Not if one is down, about to leave or to be excluded (``against``: for this attempt) and no other can replace it, if
    the job has given some back, if the signal before its end may come between two attempts, or if each step of the job
    would create the same container.
    """
    cluster, names = record.spec.cluster, node_names(environment.get("SLURM_JOB_NODELIST", ""))
    container = cluster.slurm.container
    if exchanges_nodes(cluster, record.sizes):
        usable = [name for name in usable_held_nodes(run, names, attempt.job_id) if name not in against]
        size = chosen_size(record, len(usable), follows=True) if names[0] in usable else None
        grows = read_stop_request(run, attempt.number, "growth") is not None
        enough = size is not None and (size > cluster.nodes or not grows)
    else:
        nodes = shown_nodes(attempt.nodes, _PROMPT_SECONDS)
        enough = (
            not against
            and attempt.nodes == names
            and bool(nodes)
            and not any(is_lost(node, attempt.started) or _LEAVES.search(node.get("State", "")) for node in nodes)
            and exclusion_for(run, record.spec).nodes == last_exclusion(run)
        )
    return (
        enough
        and not (container is not None and str(container.options.get("container-name")).endswith(":create"))
        and _still_runs(environment)
        and not time_is_up(attempt.job_id, cluster, environment, _START_SECONDS)
    )


def was_ended_by_slurm(attempt: AttemptRecord) -> bool:
    """Return whether Slurm ended the job of an attempt for another reason than a lost node, and requeued it.

    A preemption without a grace time, or a requeue by an administrator while the nodes are set up, leaves no record.
    The accounting has the end of each start of a job; without it, the nodes tell.
    """
    command = ["sacct", "-n", "-P", "-X", "-D", "-j", attempt.job_id, "-o", "Start,State"]
    rows: list[tuple[float, str]] = []
    with contextlib.suppress(SchedulerError):
        lines = (line.partition("|") for line in call_slurm(command).stdout.splitlines())
        rows = [(start, state) for text, _, state in lines if (start := moment(text)) is not None]
    # The start is in whole seconds, and before that of the attempt.
    states = [state for start, state in sorted(rows) if start <= attempt.started]
    if states and (cause := job_cause(states[-1])) is not None:
        return cause != "node"
    return lost_nodes(attempt) == frozenset()


def lost_nodes(attempt: AttemptRecord) -> frozenset[str] | None:
    """Return the nodes of an attempt that Slurm reports as down, or booted since; None if it does not answer."""
    nodes = shown_nodes(attempt.nodes)
    return None if not nodes else frozenset(node["NodeName"] for node in nodes if is_lost(node, attempt.started))


def shown_nodes(names: Sequence[str], seconds: float = TIMEOUT_SECONDS) -> list[dict[str, str]]:
    """Return what Slurm says of the nodes; empty if it does not answer within ``seconds``."""
    try:
        command = ["scontrol", "--oneliner", "show", "node", ",".join(names)]
        return list(records(call_slurm(command, seconds=seconds).stdout)) if names else []
    except SchedulerError:
        return []


def is_lost(node: Mapping[str, str], since: float) -> bool:
    """Return whether a node does not respond (*), is down, or has booted ``since``."""
    states = node.get("State", "").split("+")
    down = any(state.startswith("DOWN") or state.endswith("*") or state == "NOT_RESPONDING" for state in states)
    return down or (moment(node.get("BootTime", "")) or 0.0) > since


def watch_reservation(cluster: ClusterSpec, environment: Mapping[str, str]) -> int:
    """Signal the ranks as Slurm does before a time limit, as long before the job's reservation ends; then return.

    Slurm ends a job whose reservation ends as at a time limit, but sends no signal before (seen in 22.05.8).
    Also returns once the batch script has ended.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        end = _end_of_reservation(environment)
        left = math.inf if end is None else end - lead_seconds(cluster) - time.time()
        with contextlib.suppress(SchedulerError):
            if left <= 0:
                call_slurm(["scancel", "--signal=USR1", environment["SLURM_JOB_ID"]])  # to the agents
                return ExitCode.DONE
        time.sleep(min(_POLL_SECONDS, max(left, 1.0)))
    return ExitCode.DONE


def time_is_up(job_id: str, cluster: ClusterSpec, environment: Mapping[str, str], seconds: float = 0.0) -> bool:
    """Return whether the job ends, or would within ``seconds``, at its time limit or the end of its reservation.

    SLURM_JOB_END_TIME exists since Slurm 23.02, and stays as it is when an administrator extends the limit.
    """
    stated = environment.get("SLURM_JOB_END_TIME", "")
    limit = float(stated) if stated.isdigit() else None
    if limit is None or _is_near(limit - seconds, cluster):
        limit = _end_by_limit(job_id) or limit
    ends = (limit, _end_of_reservation(environment))
    return any(end is not None and _is_near(end - seconds, cluster) for end in ends)


def _is_near(end: float, cluster: ClusterSpec) -> bool:
    return time.time() >= end - lead_seconds(cluster) - _EARLY_SECONDS


def _end_of_reservation(environment: Mapping[str, str]) -> float | None:
    """Return the Unix time at which Slurm ends the jobs of the job's reservation; None if never, or if not known."""
    if not (name := environment.get("SLURM_JOB_RESERVATION", "")):
        return None
    try:
        shown = call_slurm(["scontrol", "--oneliner", "show", "reservation", name]).stdout
        overrun = settings(call_slurm(["scontrol", "show", "config"]).stdout).get("ResvOverRun", "0 min").split()[0]
    except SchedulerError:
        return None
    end = next((one.end for one in reservations(shown) if not one.is_flexible), None)
    return end + 60.0 * int(overrun) if end is not None and overrun.isdigit() else None  # UNLIMITED


def _end_by_limit(job_id: str) -> float | None:
    """Return the Unix time of the limit. squeue's own end time is now for a job that is being cancelled."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%S|%l"]
    try:
        answer = call_slurm(command, accept=("Invalid job id",), seconds=_PROMPT_SECONDS)
        start, _, limit = answer.stdout.strip().partition("|")
    except SchedulerError:
        return None
    began, lasts = moment(start), limit_seconds(limit)  # None for N/A and UNLIMITED
    return began + lasts if began is not None and lasts is not None else None


def _changes(run: RunDir, record: RunRecord, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what must change in the requeued job: its excluded nodes, if others than before, and when it may begin."""
    excluded, before = exclusion_for(run, record.spec), last_exclusion(run)
    record_exclusion(run, excluded)
    if excluded.nodes != before:  # else a user may have set them
        yield f"ExcNodeList={exclude_option(record.spec, excluded) or ''}"
    # In a reservation that is about to end, Slurm would start the job again at once.
    if (end := _end_of_reservation(environment)) is not None and _is_near(end, record.spec.cluster):
        yield f"StartTime=now+{max(0, math.ceil(end - time.time())) + 1}"


def own_address(environment: Mapping[str, str], nodes: Sequence[str]) -> str:
    """Return an address of this node at which the other nodes reach it.

    That of the route to one of them, by its name or its NodeAddr: this node's names may resolve on this node only. Else
    the first of its names that resolves; Slurm's node name may differ from the host name.
    """
    own = environment.get("SLURMD_NODENAME", "")
    others = [name for name in nodes if name != own][:_ASKED_NODES]
    if (address := next(filter(None, map(route_address, others)), None)) is not None:
        return address
    addresses = (node["NodeAddr"] for node in shown_nodes(others) if "NodeAddr" in node)
    if (address := next(filter(None, map(route_address, addresses)), None)) is not None:
        return address
    host = socket.gethostname()
    for name in filter(None, (own, host)):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    return host


if __name__ == "__main__":
    sys.exit(main())
