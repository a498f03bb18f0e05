"""PID 1 of a training pod: ``python -m scaletrain_cli.launch.backends.kubernetes.pod_agent``.

Writes the run directory to the volume, waits for the other pods of the gang, runs the node agent, and exits with the
code that decides what Kubernetes does. Pod 0 begins the attempt and decides on a restart; all pods end with its
decision. Why a pod ended is in its termination message. Calls no Kubernetes API: the pod's own data are in the
environment. After a failure for which no node is to blame, the pods begin the next attempt themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import DoNotRequeueError, ExitCode, PreemptedError, ScaletrainError, WrongNodesError
from scaletrain_cli.full_disk import FULL_DISK_ERRORS
from scaletrain_cli.launch.backends.kubernetes.code_store import fetch_code
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.pod_output import PATH, PodEnd, write_termination_message
from scaletrain_cli.launch.node.options import AGENT_SIGNALS, AgentOptions
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.secret_text import secret_values

if TYPE_CHECKING:
    from scaletrain_cli.launch.attempts import AttemptRecord, Decision
    from scaletrain_cli.launch.backends.kubernetes.rendezvous import GangKey, RendezvousServer
    from scaletrain_cli.launch.exit_classification import ExitReason
    from scaletrain_cli.rundir.record import RunRecord

RENDEZVOUS_SECONDS = 1800.0  # pulling a large image takes many minutes
DECISION_SECONDS = 45.0  # for the other nodes to end by themselves, and for pod 0 to decide
DECISION_READ_SECONDS = 15.0  # for the other pods to read the decision from pod 0, without a shared volume
_VOLUME_SECONDS = 60.0  # until other nodes see the files of pod 0: file systems cache that a file is missing
_POLL_SECONDS = 0.5
_MOST_GANGS = 3  # gangs that may fail because of the volume before the job fails
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_BROKEN = (errno.EIO, errno.ESTALE)
logger = logging.getLogger(__name__)
ONLY = "SCALETRAIN_ONLY"  # the variable for a run that measures its nodes and does not train


@dataclass(frozen=True)
class PodOptions:
    """Options from the pod's template. ``gang`` is unique to this gang: a restarted one has another."""

    documents: Path
    runs_root: Path
    workload: str
    gang: str
    node_rank: int
    node_name: str
    pod_name: str
    master_addr: str
    master_port: int
    rendezvous_port: int
    engine: str
    termination_log: Path | None = None  # the file of the termination message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this pod; return the exit code of the container."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AGENT_SIGNALS)
    leave_current_folder()
    options = parse_options(arguments, os.environ)
    set_up_logging(f"pod {options.pod_name} on {options.node_name}")
    try:
        with _volume_in_use(options):
            end = run_pod(options)
    except ScaletrainError as error:
        logger.error("%s", error)
        end = PodEnd(error.exit_code, _reason_of(error))
    if options.termination_log is not None:
        write_termination_message(options.termination_log, end, options.node_name, _secrets(options))
    return end.exit_code


def _secrets(options: PodOptions) -> list[str] | None:
    """Return the values of the secrets in the environment; None if the spec, which names them, cannot be read."""
    from scaletrain_cli.rundir.record import specs_of_documents

    names: set[str] = set()
    try:
        for spec in specs_of_documents(options.documents):
            names |= {*spec.get("secret_env", ()), *spec["cluster"].get("kubernetes", {}).get("secrets", {})}
    except (ScaletrainError, OSError, AttributeError, KeyError, TypeError):
        return None
    return secret_values(os.environ, names)


def parse_options(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> PodOptions:
    """Return the options: paths from the arguments, values that differ between pods from the environment."""
    parser = argparse.ArgumentParser(prog="pod_agent", description="Run the ranks of one pod.")
    parser.add_argument("--documents", type=Path, required=True, help="folder with run.json")
    parser.add_argument("--runs-root", type=Path, required=True)
    parser.add_argument("--termination-log", type=Path, default=Path(PATH), help="file of the termination message")
    parser.add_argument("--engine", default="scaletrain_cli.engine", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        port = int(environment["MASTER_PORT"])
        return PodOptions(
            documents=given.documents,
            runs_root=given.runs_root,
            workload=environment["SCALETRAIN_WORKLOAD"],
            gang=f"{environment['SCALETRAIN_WORKLOAD']}/{environment.get('SCALETRAIN_GANG', '')}",
            node_rank=int(environment["SCALETRAIN_NODE_RANK"]),
            node_name=environment["SCALETRAIN_NODE_NAME"],
            pod_name=environment["SCALETRAIN_POD"],
            master_addr=environment["MASTER_ADDR"],
            master_port=port,
            rendezvous_port=port + 1,
            engine=given.engine,
            termination_log=given.termination_log,
        )
    except (KeyError, ValueError) as error:
        parser.error(f"missing or invalid in the pod's environment: {error}")


def run_pod(options: PodOptions) -> PodEnd:
    """Run from the rendezvous to the decision to end. Raises ScaletrainError if no attempt could begin."""
    with contextlib.ExitStack() as until_end:
        started = _begin(options, until_end) if options.node_rank == 0 else _join(options, until_end)
        while not isinstance(started, PodEnd):
            started = _run_attempt(options, *started)
        return started


def _run_attempt(options: PodOptions, run: RunDir, number: int) -> tuple[RunDir, int] | PodEnd:
    """Run an attempt; return the next one if it begins in these pods, else the end of the pod."""
    from scaletrain_cli.launch.backends.kubernetes.pod_output import PodOutput, attempt_start_line
    from scaletrain_cli.launch.node.attempt import run_node
    from scaletrain_cli.rundir.record import read_record

    # The submitter's lock is in a shared run directory; without one, the submitter reads the pods' output.
    shared = (run.path / "submit.lock").exists()
    print(attempt_start_line(number, shared=shared), flush=True)
    directory = "the submitter's run directory" if shared else "a run directory of the pods' own"
    logger.info("attempt %d begins in %s", number, directory)
    agent = AgentOptions(
        run_folder=run.path,
        attempt=number,
        node_rank=options.node_rank,
        node_name=options.node_name,
        master_addr=options.master_addr,
        master_port=options.master_port,
        parent_pid=None,
        engine=options.engine,
    )
    why = None
    try:
        record = read_record(run)
        first, count = options.node_rank * record.spec.cluster.gpus_per_node, record.spec.cluster.gpus_per_node
        names = [f"{options.node_name}-{rank:05d}.log" for rank in range(first, first + count)]
        with PodOutput([run.attempt(number) / "logs" / name for name in names]):
            code = run_node(agent)
    except Exception as failure:  # pod 0 must decide on every failure
        of_volume = isinstance(failure, OSError) and failure.errno in (*FULL_DISK_ERRORS, *_FORBIDDEN, *_BROKEN)
        error = volume_error(options, failure) if isinstance(failure, OSError) and of_volume else failure
        code, why = error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED, _reason_of(error)
        logger.error("%s", error)
    if options.node_rank != 0:
        return _await_decision(run, number, code, why)
    record = read_record(run)
    end = _decide_on_restart(options, run, record, number, code)
    is_left = not shared and not record.spec.cluster.kubernetes.runs.per_pod
    if isinstance(end, PodEnd) and end.exit_code == 0 and is_left and record.spec.env.get(ONLY) == "preflight":
        shutil.rmtree(run.path, ignore_errors=True)  # the submitting machine does not mount this volume
    return end


def _begin(options: PodOptions, until_end: contextlib.ExitStack) -> tuple[RunDir, int] | PodEnd:
    """Return, in pod 0, the run and its new attempt once all pods have joined; else the end of all pods.

    Pods without a shared volume read and write this run directory until ``until_end`` is closed.
    """
    from scaletrain_cli.launch.attempts import begin_attempt
    from scaletrain_cli.launch.backends.kubernetes.rendezvous import RendezvousServer
    from scaletrain_cli.launch.backends.kubernetes.run_server import RunServer
    from scaletrain_cli.launch.restart import conclude_abandoned, conclude_run, why_not_begin
    from scaletrain_cli.launch.resume_elsewhere import complete_from_mirror, return_from_mirror, set_older_aside
    from scaletrain_cli.rundir.record import checkpoint_folder, place_documents
    from scaletrain_cli.worker.checkpoint_commit import newest_attempt

    with _volume_in_use(options):
        if (older := set_older_aside(options.documents, options.runs_root)) is not None:
            logger.info("the run directory of an earlier owner is kept as %s", older)
        run, record = place_documents(options.documents, options.runs_root)
        fetch_code(run, record)
        if record.spec.keeps_run_in_mirror:
            is_received = return_from_mirror(run, record, options.documents)
        else:
            is_received = complete_from_mirror(run, record)
        if is_received:
            logger.info("the history and the checkpoint of the run are here from its mirror")
    prepare_own_data(run, record)
    others = range(1, record.spec.cluster.nodes)
    run_server = None
    if others and record.spec.cluster.kubernetes.runs.per_pod:
        run_server = until_end.enter_context(RunServer(run, *_place_of_files(options)))
    server = RendezvousServer(options.rendezvous_port, _gang_key(options), len(others))
    try:
        said = server.gather(RENDEZVOUS_SECONDS, _is_terminating)
        with _volume_in_use(options):
            conclude_abandoned(run, record)  # an attempt of an earlier gang whose pod 0 was lost
            if (refusal := why_not_begin(run, record, options.workload)) is not None:
                logger.error("%s", refusal.why)
                conclude_run(run, refusal)
                return _broadcast_end(server, exit_code_for(refusal), refusal.reason)
            nodes = (options.node_name, *(str(answer["node"]) for answer in said.values()))
            after = 0
            if record.spec.cluster.kubernetes.runs.per_pod:  # earlier attempts were recorded on other volumes
                after = newest_attempt(checkpoint_folder(run, record.spec))
            number = begin_attempt(
                run,
                record.spec,
                scheduler="kubernetes",
                job_id=options.workload,
                nodes=nodes,
                after=after,
                lost_nodes_free=not options.workload.startswith("volcano/"),  # which counts each restart
            )
        if run_server is not None:
            until_end.callback(run_server.wait_for_readers, "attempt.json", others, DECISION_READ_SECONDS)
        server.broadcast({"attempt": number, "run_id": run.run_id})
        return run, number
    except ScaletrainError as error:
        _broadcast_end(server, error.exit_code, _reason_of(error))
        raise
    finally:
        server.close()


def _broadcast_end(server: RendezvousServer, code: int, why: Reason) -> PodEnd:
    """Send all pods the end of the gang before its attempt began, and return it."""
    server.broadcast({"exit_code": code, "why": str(why), "reason": why.to_document()})
    return PodEnd(code, why)


def _gang_key(options: PodOptions) -> GangKey:
    """Return the key of this gang's messages, made from the run's documents, which all its pods mount."""
    from scaletrain_cli.launch.backends.kubernetes.rendezvous import GangKey

    return GangKey(options.gang, hashlib.sha256((options.documents / "run.json").read_bytes()).digest())


def _place_of_files(options: PodOptions) -> tuple[int, bytes]:
    """Return the port at which pod 0 serves its run directory to pods without a shared volume, and the key for it."""
    key = _gang_key(options)
    return options.rendezvous_port + 1, hashlib.sha256(key.key + key.gang.encode()).digest()


def _join(options: PodOptions, until_end: contextlib.ExitStack) -> tuple[RunDir, int] | PodEnd:
    """Return, in the other pods, the run and its new attempt as pod 0 sends them, or the end of all pods.

    Pods without a shared volume have a run directory of their own, whose records are those of pod 0 until
    ``until_end`` is closed.
    """
    from scaletrain_cli.launch.backends.kubernetes.rendezvous import RendezvousError, join
    from scaletrain_cli.launch.backends.kubernetes.run_sync import RunSync
    from scaletrain_cli.rundir.record import place_documents, specs_of_documents
    from scaletrain_cli.worker.remote_run import PAUSES, VARIABLE, RemoteRun, address_of

    (*_, newest) = specs_of_documents(options.documents)
    is_own = bool(newest["cluster"]["kubernetes"]["runs"]["per_pod"])
    if is_own:
        with _volume_in_use(options):
            own_run, record = place_documents(options.documents, options.runs_root)
            fetch_code(own_run, record)
        prepare_own_data(own_run, record)
    said = {"node": options.node_name, "pod": options.pod_name}
    place = (options.master_addr, options.rendezvous_port, _gang_key(options), options.node_rank)
    answer = join(*place, said, RENDEZVOUS_SECONDS, _is_terminating)
    if "exit_code" in answer:
        logger.error("%s", answer["why"])
        return PodEnd(int(answer["exit_code"]), reason_from(answer["reason"]))
    run = RunDir(options.runs_root / str(answer["run_id"]))
    if is_own:
        port, key = _place_of_files(options)
        try:
            remote = RemoteRun(run, address_of(options.master_addr, port), port, options.node_rank, key)
            os.environ[VARIABLE] = remote.for_environment()  # for the ranks
            until_end.enter_context(RunSync(remote, int(answer["attempt"])))
        except OSError as error:
            address, seconds = f"{options.master_addr}:{port}", sum(PAUSES)
            params = {"address": address, "seconds": seconds, "said": str(error)}
            raise RendezvousError(reason("rendezvous-timeout", **params)) from error
    if not _has_begun(run, int(answer["attempt"])):
        folder = str(run.attempt(answer["attempt"]))
        raise WrongNodesError(reason("volume-not-shared", folder=folder, node=options.node_name))
    return run, int(answer["attempt"])


def _has_begun(run: RunDir, number: int) -> bool:
    """Return whether pod 0 begins an attempt within the time that the volume may take to show its record."""
    deadline = time.monotonic() + _VOLUME_SECONDS
    while not (begun := (run.attempt(number) / "attempt.json").is_file()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return begun


def _decide_on_restart(
    options: PodOptions, run: RunDir, record: RunRecord, number: int, code: int
) -> tuple[RunDir, int] | PodEnd:
    """Conclude the attempt in pod 0, once the other nodes have ended or after a timeout, and begin one that follows."""
    from scaletrain_cli.launch.attempts import begin_attempt, read_attempt, signaled_nodes
    from scaletrain_cli.launch.backends.kubernetes.pod_output import attempt_end_line
    from scaletrain_cli.launch.node.record import read_node_records
    from scaletrain_cli.launch.restart import conclude_attempt, conclude_run, first_attempt_of_job

    deadline = time.monotonic() + DECISION_SECONDS - 15

    def all_ended() -> bool:
        nodes = read_node_records(run, number)
        return len(nodes) == record.spec.cluster.nodes and all(node.ended is not None for node in nodes)

    def pods_stay() -> bool:
        """None was signaled, which a pod is once, and none has given up the wait for this decision."""
        ends = [node.ended or 0.0 for node in read_node_records(run, number)]
        return all_ended() and not signaled_nodes(run, number) and time.time() - min(ends) < DECISION_SECONDS - 15

    while time.monotonic() < deadline and not all_ended():
        time.sleep(_POLL_SECONDS)
    if number < max(run.attempts(), default=number):
        logger.warning("another attempt already follows attempt %d; the run has not ended", number)
        return PodEnd(code, reason("pod-superseded", attempt=number), number)
    decision = conclude_attempt(
        run,
        record,
        number,
        first_attempt=first_attempt_of_job(run, options.workload, number),
        launcher_exit_code=code,
        keeps_nodes=lambda against: not against and pods_stay() and not _is_terminating(),
    )
    ended = read_attempt(run, number)
    if not decision.requeue:
        conclude_run(run, decision)
    logger.info("attempt %d ended: %s", number, decision.why)
    ended_for, free = (ended.reason, ended.free_of_charge) if ended is not None else (None, False)
    code = exit_code_for(decision, ended_for, free=free)
    print(attempt_end_line(number, code, requeue=decision.requeue, reason=decision.reason), flush=True)
    if decision.in_place and ended is not None:
        return run, begin_attempt(
            run,
            record.spec,
            scheduler=ended.scheduler,
            job_id=ended.job_id,
            nodes=ended.nodes,
            lost_nodes_free=ended.lost_nodes_free,
        )
    return PodEnd(code, decision.reason, number, requeue=decision.requeue) if ended is None else _end_of(ended, code)


def _end_of(attempt: AttemptRecord, code: int) -> PodEnd:
    requeue = None if attempt.decision is None else attempt.decision.requeue
    return PodEnd(code, attempt.end, attempt.number, attempt.last_step, attempt.last_checkpoint_step, requeue)


def _await_decision(run: RunDir, number: int, code: int, why: Reason | None = None) -> tuple[RunDir, int] | PodEnd:
    """Wait for pod 0's decision on the attempt and return it; the end with this pod's own code if pod 0 makes none.

    ``why``: why this pod's agent failed, if it did. If pod 0 was lost with its node, a crash here is a consequence of
    that and is not charged to the run.
    """
    from scaletrain_cli.launch.attempts import read_attempt
    from scaletrain_cli.launch.node.record import read_node_records

    deadline = time.monotonic() + DECISION_SECONDS
    while True:
        attempt = read_attempt(run, number)
        if attempt is not None and attempt.decision is not None:
            if attempt.decision.in_place and _has_begun(run, number + 1):
                return run, number + 1
            return _end_of(attempt, exit_code_for(attempt.decision, attempt.reason, free=attempt.free_of_charge))
        if not run.path.is_dir():  # pod 0 has deleted the directory of a preflight
            return PodEnd(code, why or reason("pod-measured"), number)
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    first = [node for node in read_node_records(run, number) if node.node_rank == 0]
    lost = not first or first[0].ended is None
    code = ExitCode.PREEMPTED if lost and code == ExitCode.CRASHED else code
    return PodEnd(code, why or reason("pod-without-decision", exit_code=int(code)), number)


def exit_code_for(decision: Decision, exit_reason: ExitReason | None = None, *, free: bool = False) -> int:
    """Return the container's exit code for a decision; the policies of Kubernetes see nothing else."""
    from scaletrain_cli.launch.restart import is_preemption

    code = decision.exit_code
    if code == ExitCode.DONE or code in (ExitCode.USAGE, ExitCode.INFEASIBLE):
        return code
    if not decision.requeue:
        return ExitCode.DO_NOT_REQUEUE  # for every cause: 1 and 75 would restart it
    if free or (exit_reason is not None and is_preemption(exit_reason)):
        return ExitCode.PREEMPTED  # also if its state could not be saved in time: not charged to the run
    return code if code in (ExitCode.PREEMPTED, ExitCode.WRONG_NODES) else ExitCode.CRASHED


@contextlib.contextmanager
def _volume_in_use(options: PodOptions) -> Iterator[None]:
    """Turn an error of the volume into one that names the cause; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in (*FULL_DISK_ERRORS, *_FORBIDDEN, *_BROKEN):
            raise  # not about the volume, such as a socket error
        raise volume_error(options, error) from error


def volume_error(options: PodOptions, error: OSError) -> ScaletrainError:
    """Return the error for a failure of the volume.

    Its exit code is 5, as the volume may work on another node; 93 if it is full, and from the third gang on that began
    no attempt: others were restarted for reasons of their own.
    """
    from scaletrain_cli.launch.attempts import read_attempts

    said = error.strerror or str(error)
    if error.errno in FULL_DISK_ERRORS:
        return DoNotRequeueError(reason("volume-full", said=said))
    restarts, begun = options.gang.rpartition("/")[2], 0
    with contextlib.suppress(OSError, ScaletrainError, ValueError, KeyError):
        begun = sum(attempt.job_id == options.workload for attempt in read_attempts(_run_of(options)))
    again = restarts.isdigit() and int(restarts) + 1 - begun >= _MOST_GANGS
    kind = DoNotRequeueError if again else WrongNodesError
    if error.errno not in _FORBIDDEN:
        return kind(reason("volume-broken", folder=str(options.runs_root), said=str(error)))
    folder, groups = _unwritable_folder(options), ", ".join(map(str, sorted(os.getgroups()))) or "none"
    pods = {"uid": os.geteuid(), "gid": os.getegid(), "groups": groups}
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return kind(reason("volume-write-failed", folder=str(error.filename or folder), said=said, **pods))
    try:
        status, flags = folder.stat(), os.statvfs(folder).f_flag
    except OSError:
        return kind(reason("volume-write-failed", folder=str(folder), said=str(error), **pods))
    if flags & os.ST_RDONLY:
        return kind(reason("volume-read-only", folder=str(folder)))
    owner = {"owner": status.st_uid, "group": status.st_gid, "mode": f"{stat.S_IMODE(status.st_mode):04o}"}
    return kind(reason("volume-of-other-user", folder=str(folder), **pods, **owner))


def _unwritable_folder(options: PodOptions) -> Path:
    """Return the first folder of the run that this process cannot write to, or the volume itself if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        run = _run_of(options).path
        for folder in (run, *(run / name for name in ("attempts", "checkpoints", "code", "revisions"))):
            if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                return folder
    return options.runs_root


def _run_of(options: PodOptions) -> RunDir:
    """Return the run's directory on the volume. Raises OSError, or ValueError or KeyError for damaged documents."""
    return RunDir(options.runs_root / str(json.loads((options.documents / "run.json").read_bytes())["run_id"]))


def _is_terminating() -> bool:
    """Return whether SIGTERM or SIGINT is pending. Both are blocked."""
    return bool(signal.sigpending() & {signal.SIGTERM, signal.SIGINT})


def _reason_of(error: Exception) -> Reason:
    return (error.reason if isinstance(error, ScaletrainError) else None) or recorded(str(error).rstrip("."))


def prepare_own_data(run: RunDir, record: RunRecord) -> None:
    """Prepare the data on the volume of this pod, which no other pod could do.

    Raises the error of the preparation, and PreemptedError once the pod is terminated.
    """
    from scaletrain_cli.launch import preparation

    spec = record.spec
    if spec.cluster.kubernetes.runs.per_pod and preparation.reads_prepared_data(spec):
        logger.info("preparing the data on the volume of this pod")
        with _ended_by_termination():
            preparation.prepare_here(spec, run.path.parent, known=record.hub)


@contextlib.contextmanager
def _ended_by_termination() -> Iterator[None]:
    """End the block with PreemptedError at SIGTERM or SIGINT, which are blocked before and after it."""
    terminated = False

    def end(*_: object) -> None:
        nonlocal terminated
        if not terminated:  # a second signal must not interrupt the end
            terminated = True
            raise PreemptedError(reason("preparation-interrupted"))

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers.keys())
        yield
    except Exception as error:
        if terminated and not isinstance(error, PreemptedError):
            raise PreemptedError(reason("preparation-interrupted")) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if terminated:  # and the block has ended in spite of it
        raise PreemptedError(reason("preparation-interrupted"))


if __name__ == "__main__":
    sys.exit(main())
