"""The agent's loop over its local ranks: signals, ends of ranks, hangs, and failures of other nodes.

The failure of a rank that could not report one is diagnosed from the kernel's counters and the end of its log.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.available_memory import control_groups, text_of
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.full_disk import no_space
from scaletrain_cli.launch.attempts import read_attempt
from scaletrain_cli.launch.logs import end_of
from scaletrain_cli.launch.node.heartbeats import LastBeat, PauseClock, furthest_behind, hung_rank
from scaletrain_cli.launch.node.idle import IdleWatch
from scaletrain_cli.launch.node.observer import MirrorProcess, Observer
from scaletrain_cli.launch.node.options import AGENT_SIGNALS, AgentOptions
from scaletrain_cli.launch.node.processes import (
    STOPPED_SECONDS,
    StoppedProcesses,
    descendants,
    next_signal,
    process_state,
    reap,
    tcp_addresses,
)
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.launch.node.record import RankRecord, announce, is_announced, read_node_records
from scaletrain_cli.launch.node.telemetry import NodeTelemetry
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import DamagedError
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, replace_file
from scaletrain_cli.spec import ClusterSpec
from scaletrain_cli.worker.failures import Failure, read_failures, reason_in, write_failure
from scaletrain_cli.worker.position import RankView

OTHER_FAILURES_SECONDS = 3.0  # for the other ranks to report failures of their own once one has failed
UNKILLABLE_SECONDS = 30.0  # after SIGKILL; then a rank hangs in the kernel (driver, dead file system)
DUMP_SECONDS = 10.0  # at most, for the ranks to write their stacks and positions; on an idle machine 0.3 seconds
OTHER_VIEWS_SECONDS = 15.0  # for the agents of the other nodes to record where their ranks hang
_POLL_SECONDS = 1.0  # between checks of deadlines; SIGCHLD wakes the loop at once
SUSPENSION_SECONDS = 60.0  # of the agent itself: then the whole job was stopped, and the time is recorded
_STACKS_POLL_SECONDS = 0.05
_OTHERS_POLL_SECONDS = 0.5  # each lists a folder of a shared file system
_RECORD_SECONDS = 2.0  # of the grace period, to record the end of the node
_PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SIGNAL_DELAY_SECONDS = 1.0  # between two processes of a job that a scheduler signals
# The second is the exit code of a shell whose child the signal has ended.
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
_BY_SIGKILL = (-signal.SIGKILL, 128 + signal.SIGKILL)
# Exit codes of a program of code.command that keep their meaning after a preemption signal.
_PASSED_ON = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.INFEASIBLE,
    ExitCode.SCHEDULER,
    ExitCode.WRONG_NODES,
    ExitCode.PREEMPTED,
    ExitCode.DO_NOT_REQUEUE,
)
_OOM_FIELD = "oom_kill"
_OOM_FILES = {2: "memory.events", 1: "memory.oom_control"}  # by the version of control groups
_ABORTS = ("SIGABRT", "SIGBUS", "SIGSEGV")  # NCCL's watchdog, a library's assertion, memory that went away
logger = logging.getLogger(__name__)


def memory_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this node's job the kernel has killed for lack of memory; None if unknown.

    The count starts with the memory cgroup, so only a difference means anything.
    """
    # This process's own cgroup first. In a container its path may be the host's and mean nothing here.
    counters = [folder / _OOM_FILES[version] for folder, _, version in control_groups(root, "memory")]
    for path in (*counters, root / "proc/vmstat"):
        try:
            fields = dict(line.split()[:2] for line in text_of(path).splitlines() if line.strip())
        except ValueError:
            continue
        if _OOM_FIELD in fields:
            return int(fields[_OOM_FIELD])
    return None


def observed_failure(
    reason: str, cause: Reason, node: str, *, rank: int | None = None, exit_code: int = ExitCode.CRASHED
) -> Failure:
    """Return what the agent of ``node`` observed, with its English text as the message."""
    return Failure(rank, reason, f"{node}: {cause}", int(exit_code), node, **cause.to_document())


class ExitDiagnosis:
    """Diagnoses why a rank of this node was killed or aborted. Counts OOM kills from its creation on."""

    def __init__(self) -> None:
        self._kills_before = memory_kills() or 0

    def failure(self, rank: RankRecord, node: str, log: Path) -> Failure | None:
        """Return the failure of a rank that the agent did not kill; None where only the signal is known."""
        if rank.exit_code in _BY_SIGKILL and (memory_kills() or 0) > self._kills_before:
            cause = Reason("node.killed-for-memory", {"rank": rank.rank})
            return observed_failure("host-oom", cause, node, rank=rank.rank)
        if rank.signal in _ABORTS and (reason := reason_in(end_of(log))) is not None:
            cause = Reason("node.aborted", {"rank": rank.rank, "signal": rank.signal, "log": log.name})
            return observed_failure(reason, cause, node, rank=rank.rank)
        return None


def collect_views(local_ranks: LocalRanks, folder: Path) -> tuple[RankView, ...]:
    """Have each living rank write its stacks and its position, and keep them in ``folder``. Takes DUMP_SECONDS at most.

    Which rank causes the hang is found at the end of the attempt, from the ranks of all nodes (launch/hang.py).
    """
    now, beats, alive = time.monotonic(), local_ranks.listen(), list(local_ranks.alive)
    channels = local_ranks.channels
    local_ranks.forward(signal.SIGUSR2)
    while time.monotonic() < now + DUMP_SECONDS and not all(
        channels[rank.rank].position() or process_state(rank.pid) in "Tt" for rank in alive
    ):
        time.sleep(_STACKS_POLL_SECONDS)
    views = []
    for rank in alive:
        channel, stacks, beat = channels[rank.rank], channels[rank.rank].stacks(), beats[rank.rank]
        if stacks:
            path = folder / f"{rank.rank:05d}.txt"
            with contextlib.suppress(OSError):  # the file system may be full, or the cause of the hang
                make_folder(path.parent)
                replace_file(path, stacks)
        silent, state = round(now - beat.received, 3), process_state(rank.pid)
        where = (beat.turn, beat.step, beat.phase, beat.part, silent, state)
        views.append(RankView(rank.rank, *where, bool(stacks), channel.position()))
    return tuple(views)


@contextlib.contextmanager
def _logging_disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, DamagedError) as error:
        logger.warning("%s: %s", what, error)


NOTICE_SECONDS = 60.0  # of a phase; after it whenever the time has doubled
_ALONE = ("start", "imports")  # phases in which a rank waits for no other one
_PHASES = (*_ALONE, "connect", "preflight", "data", "set-up", "restore")


@dataclass
class StartWatch:
    """Records the event ``start-waits`` while no rank of this node has begun a step and a phase takes long.

    Agents of other nodes than the first are silent about phases in which ranks wait for each other.
    """

    run: RunDir
    options: AgentOptions
    node: str
    nodes: int
    _phase: str = field(default="", init=False)
    _due: float = field(default=NOTICE_SECONDS, init=False)

    def look(self, beats: Mapping[int, LastBeat], now: float) -> None:
        """Record what the start waits for, if it is due. ``now``: monotonic seconds. Raises OSError."""
        behind = beats[furthest_behind(beats)]
        if self._due == float("inf") or behind.phase not in _PHASES:
            self._due = float("inf")  # it trains
            return
        if behind.phase != self._phase:
            self._phase, self._due = behind.phase, NOTICE_SECONDS
        seconds, is_first = now - behind.received, self.options.node_rank == 0
        if seconds < self._due or not (is_first or behind.phase in _ALONE):
            return
        self._due = 2 * seconds
        attempt = self.options.attempt
        params = {
            "node": self.node,
            "ranks": [rank for rank, beat in beats.items() if beat.phase == behind.phase],
            "phase": behind.phase,
            "seconds": round(seconds),
            "limit": round(behind.allowed_seconds),
        }
        why = Reason("node.start-waits", params)
        joined = {node.name for node in read_node_records(self.run, attempt)}
        if is_first and len(joined) < self.nodes:
            began = read_attempt(self.run, attempt)
            absent = [name for name in (began.nodes if began is not None else ()) if name not in joined]
            counts = {"joined": len(joined), "of": self.nodes, "absent": absent or ["not named by the scheduler"]}
            why = Reason("node.start-waits-for-nodes", {**params, **counts})
        record_event(self.run, "start-waits", attempt=attempt, text=str(why), **why.to_document())


@dataclass
class Watch:
    """Waits for signals and for ranks to end, and decides when the remaining ranks must end.

    At ``deadline`` (monotonic) the remaining ranks get SIGKILL. ``disk_full`` is set where a rank ended
    because of a full disk. ``ending``: a rank has failed, here or on another node. ``observer``: diagnoses the run;
    ``mirror``: copies its checkpoints; ``telemetry``: measures this node; ``idle``: ends a run that does nothing.
    """

    run: RunDir
    options: AgentOptions
    node: str
    local_ranks: LocalRanks
    cluster: ClusterSpec
    stopped: StoppedProcesses = field(default_factory=lambda: StoppedProcesses(STOPPED_SECONDS))
    diagnosis: ExitDiagnosis = field(default_factory=ExitDiagnosis, init=False)
    pauses: PauseClock = field(default_factory=PauseClock, init=False)
    deadline: float = field(default=float("inf"), init=False)
    killed: bool = field(default=False, init=False)
    preempted: bool = field(default=False, init=False)
    disk_full: Failure | None = field(default=None, init=False)
    ending: bool = field(default=False, init=False)
    observer: Observer | None = field(default=None, init=False)
    mirror: MirrorProcess | None = field(default=None, init=False)
    telemetry: NodeTelemetry | None = field(default=None, init=False)
    idle: IdleWatch | None = field(default=None, init=False)
    start: StartWatch | None = field(default=None, init=False)  # none for programs that may send no beats
    ended_idle: bool = field(default=False, init=False)
    own_pids: tuple[int, ...] = field(default=(), init=False)  # of further processes that are no ranks

    def run_to_end(self) -> None:
        """Run until every rank has ended and is recorded, or cannot be killed."""
        while self.local_ranks.alive:
            timeout = min(_POLL_SECONDS, max(0.0, self.deadline - time.monotonic()))
            signum = next_signal(AGENT_SIGNALS, timeout)
            if signum is not None and signum not in (signal.SIGCHLD, signal.SIGHUP):
                self._forward(signum)
            for pid, exit_code in reap():
                self._note_end(pid, exit_code)
            if not self.preempted and self.run.is_cancelled:
                self._forward(signal.SIGTERM)  # cancelled before the agent could receive a signal
            if not self.ending and not self.killed:
                self._check_progress()
                if self.observer is not None:
                    self.observer.start_if_due()
                if self.mirror is not None:
                    self.mirror.start_if_due()
                self._end_if_idle()
            if time.monotonic() >= self.deadline:
                if self.killed:
                    logger.error("%d ranks cannot be killed; this node needs attention", len(self.local_ranks.alive))
                    self.local_ranks.record_unkillable()
                    return
                self.local_ranks.kill()
                self.killed, self.deadline = True, time.monotonic() + UNKILLABLE_SECONDS
        if self.local_ranks.foreign and self.preempted:
            # Processes that a program has left when the signal ended it, such as the child of a shell.
            own = self._pids_without_ranks()
            while time.monotonic() < self.deadline and descendants(own):
                for _ in reap():
                    pass
                time.sleep(_STACKS_POLL_SECONDS)

    def _pids_without_ranks(self) -> list[int]:
        """Return the processes of the agent that are no ranks."""
        own = [child.pid for child in (self.observer, self.mirror) if child is not None and child.pid is not None]
        return [*own, *self.own_pids, *(() if self.telemetry is None else self.telemetry.pids)]

    def _end_if_idle(self) -> None:
        """Signal the ranks to save and exit if the run has done nothing for the time that it may."""
        if self.idle is None or self.preempted or not (beats := self.local_ranks.listen()):
            return
        why = self.idle.check(beats, self._pids_without_ranks())
        if why is not None:
            logger.warning("%s; its ranks save and exit", why)
            self.ended_idle = True
            self._forward(signal.SIGTERM)

    def seconds_for_mirror(self) -> float:
        """Return what is left of the grace period, without the time to record the end; infinite without a signal."""
        return self.deadline - time.monotonic() - _RECORD_SECONDS if self.preempted else float("inf")

    def _check_progress(self) -> None:
        """End the local ranks if they hang, or if another node has failed or reports a hang."""
        stopped = self.pauses.lost_seconds()
        if stopped > SUSPENSION_SECONDS and self.options.node_rank == 0:
            with _logging_disk_errors("a suspension could not be recorded"):
                record_event(self.run, "suspended", attempt=self.options.attempt, seconds=round(stopped, 1))
        beats = self.local_ranks.listen(stopped)
        if not beats:
            return
        # A rank that a signal has stopped makes no progress, even within its announced time limit. After the first
        # signal to the run only the end of the grace period counts.
        stopped_pid = self.stopped.longest([rank.pid for rank in self.local_ranks.alive])
        hangs = stopped_pid is not None or hung_rank(beats, time.monotonic()) is not None
        if (hangs and not self.preempted) or is_announced(self.run, self.options.attempt, "hung"):
            self._end_hung_ranks()
        elif is_announced(self.run, self.options.attempt, "failed"):
            self._end_remaining("another node failed")
        elif self.start is not None:
            with _logging_disk_errors("what the start waits for could not be recorded"):
                self.start.look(beats, time.monotonic())

    def _end_hung_ranks(self) -> None:
        """Record where all ranks are, and kill them: in a hung collective no rank can save a checkpoint."""
        attempt = self.options.attempt
        with _logging_disk_errors("the hang could not be announced"):
            announce(self.run, attempt, "hung")  # first, so that other nodes collect the stacks of the same moment
        views = collect_views(self.local_ranks, self.run.attempt(attempt) / "stacks")
        silent = max((view.silent_seconds for view in views), default=0.0)
        params = {"silent_seconds": round(silent), "stacks": f"attempts/{attempt:04d}/stacks"}
        failure = observed_failure("hang", Reason("node.hung", params), self.node)
        logger.error("%s; ending all ranks", failure.message)
        with _logging_disk_errors("the hang could not be recorded"):
            addresses, stalled = tcp_addresses()
            failure = dataclasses.replace(failure, ranks=views, addresses=addresses, stalled=stalled)
            write_failure(self.run, attempt, self.node, failure)
            # The end of these ranks breaks the connections of the others, which then are no longer where they hung.
            until = time.monotonic() + OTHER_VIEWS_SECONDS
            names = {f"{node.node}.json" for node in read_node_records(self.run, attempt)}
            failures = self.run.attempt(attempt) / "failures"
            while not names <= {*os.listdir(failures)} and time.monotonic() < until:
                time.sleep(_OTHERS_POLL_SECONDS)
        self.local_ranks.kill()
        self.killed, self.deadline = True, time.monotonic() + UNKILLABLE_SECONDS
        with _logging_disk_errors("the hang could not be announced"):
            announce(self.run, attempt, "failed")

    def _forward(self, signum: int) -> None:
        """Pass a signal on to the ranks; the grace period begins with the first one."""
        self.preempted = True
        signum = signal.SIGTERM if signum == signal.SIGINT else signum
        self.local_ranks.forward(signum)
        if not self.killed:
            # A repeated signal does not extend the grace period.
            self.deadline = min(self.deadline, time.monotonic() + self.cluster.grace_seconds)
        name = signal.Signals(signum).name
        logger.info("forwarded %s to %d ranks", name, len(self.local_ranks.alive))
        # Recorded last, and failures are tolerated: a full disk must not shorten the ranks' grace period.
        with _logging_disk_errors("the signal could not be recorded"):
            record_event(self.run, "signal", signal=name, attempt=self.options.attempt, node=self.options.node_name)

    def _note_end(self, pid: int, exit_code: int) -> None:
        if self.local_ranks.foreign and any(rank.pid == pid for rank in self.local_ranks.alive):
            exit_code = self._meaning(exit_code)
        rank = self.local_ranks.ended(pid, exit_code)
        if rank is not None and not rank.killed_by_agent:
            log = self.run.attempt(self.options.attempt) / "logs" / f"{self.options.node_name}-{rank.rank:05d}.log"
            failure = self.diagnosis.failure(rank, self.node, log)
            if failure is not None:
                with _logging_disk_errors("the cause could not be recorded"):
                    write_failure(self.run, self.options.attempt, f"{self.node}-rank-{rank.rank:05d}", failure)
        if rank is not None and rank.rank == self.local_ranks.first_failure and rank.signal is None:
            # The rank could not record the cause: its failure record needs disk space, too.
            attempt = self.options.attempt
            error = no_space(self.run.attempt(attempt))
            if error and all(failure.rank != rank.rank for failure in read_failures(self.run, attempt)):
                cause = Reason("node.disk-full", {"rank": rank.rank, "folder": str(self.run.path), "error": error})
                code = ExitCode.DO_NOT_REQUEUE
                self.disk_full = observed_failure("disk-full", cause, self.node, rank=rank.rank, exit_code=code)
                logger.error("%s", self.disk_full.message)
        if rank is None or self.local_ranks.first_failure is None or self.ending or self.killed:
            return
        self._end_remaining(f"rank {rank.rank} ended with {rank.signal or f'exit code {exit_code}'}")
        # Otherwise the other nodes would wait in a collective until their watchdog ends them.
        with _logging_disk_errors("the failure could not be announced to the other nodes"):
            announce(self.run, self.options.attempt, "failed")

    def _meaning(self, exit_code: int) -> int:
        """Return 75 for a program that a preemption ended, whatever its exit code, unless a retry cannot help.

        Programs without a handler die by the signal, and launchers such as torchrun do not pass on their ranks' codes.
        """
        # A scheduler signals all processes of a job: the program may have ended before the agent got its signal.
        may_follow = exit_code in _BY_SIGTERM and not self.preempted
        if may_follow and (signum := next_signal(_PREEMPTION_SIGNALS, _SIGNAL_DELAY_SECONDS)) is not None:
            self._forward(signum)
        if self.ended_idle and exit_code == ExitCode.DONE:  # a server that was asked to end has not finished the run
            return int(ExitCode.PREEMPTED)
        if not self.preempted or self.killed or exit_code in _PASSED_ON:
            return exit_code
        logger.info("a program ended with code %d after the preemption signal: it counts as preempted", exit_code)
        return int(ExitCode.PREEMPTED)

    def _end_remaining(self, why: str) -> None:
        self.ending = True
        self.deadline = min(self.deadline, time.monotonic() + OTHER_FAILURES_SECONDS)
        logger.warning("%s; ending the other ranks", why)
