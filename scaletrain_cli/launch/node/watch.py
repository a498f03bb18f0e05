"""A node's ranks from their start to the end of the last one: signals, failures, hangs, deadlines.

Expects the signals of node_agent.HEARD to be blocked. Passes SIGTERM and SIGUSR1 on with the whole grace period, ends
the rest when a rank fails or hangs, here or on another node. Knows no scheduler.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.full_disk import no_space, say
from scaletrain_cli.launch.logs import end_of
from scaletrain_cli.launch.node.heartbeats import Beat, HangTimeout, hung_rank
from scaletrain_cli.launch.node.options import HEARD, AgentOptions
from scaletrain_cli.launch.node.processes import STOPPED_SECONDS, Standstill, next_signal, process_state, reap
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.launch.node.record import RankRecord, announce_failure, announce_hang, has_failed, is_hung
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, replace_file
from scaletrain_cli.spec import ClusterSpec
from scaletrain_cli.worker.failures import Failure, read_failures, reason_in, write_failure

# How many processes of this node's job the kernel has killed for want of memory so far.


_FIELD = "oom_kill"


def memory_kills(root: Path = Path("/")) -> int | None:
    """The count since the group was made, which only a difference makes meaningful; None where none can be read."""
    for path in _counters(root):
        try:
            fields = dict(line.split()[:2] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        except (OSError, ValueError):
            continue
        if _FIELD in fields:
            return int(fields[_FIELD])
    return None


def _counters(root: Path) -> Iterator[Path]:
    """This process's own group first. In a container its path may be the host's and mean nothing here."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for folder in (path.strip("/"), ""):
            if controllers == "":
                yield root / "sys/fs/cgroup" / folder / "memory.events"
            elif "memory" in controllers.split(","):
                yield root / "sys/fs/cgroup/memory" / folder / "memory.oom_control"
    yield root / "proc/vmstat"


# What a rank that was killed or aborted had no time to say: read by its agent from the kernel and the rank's log.


_ABORTS = ("SIGABRT", "SIGBUS", "SIGSEGV")  # NCCL's watchdog, a library's assertion, memory that went away


class ExitDiagnosis:
    """Of the ranks of one node, from now on: only what the kernel kills later concerns them."""

    def __init__(self) -> None:
        self._kills_before = memory_kills() or 0

    def failure(self, rank: RankRecord, node: str, log: Path) -> Failure | None:
        """What a rank that no agent killed died of; None when nothing more is known than the signal."""
        if rank.signal == "SIGKILL" and (memory_kills() or 0) > self._kills_before:
            why = "killed by the kernel: the host, or the job's share of it, was out of memory"
            return _failure(rank, "host-oom", node, why)
        if rank.signal in _ABORTS and (reason := reason_in(end_of(log))) is not None:
            return _failure(rank, reason, node, f"ended by {rank.signal}; the end of {log.name} says why")
        return None


def _failure(rank: RankRecord, reason: str, node: str, why: str) -> Failure:
    return Failure(rank.rank, reason, f"rank {rank.rank} on {node}: {why}", int(ExitCode.CRASHED), node)


# A node whose ranks have come to a stand: ask each for its stacks, and say who holds the others up.


DUMP_SECONDS = 2.0  # for stacks that a C handler writes to memory
_STACKS_POLL_SECONDS = 0.05
_STATES = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "asleep in the kernel (state D: a disk, network file system or driver)",
    "R": "busy outside Python's reach (state R)",
    "S": "asleep and deaf to signals (state S)",
}


@dataclass(frozen=True)
class RankView:
    """One rank of a node that has come to a stand."""

    rank: int
    beat: Beat
    silent_seconds: float
    dumped: bool
    state: str  # the kernel's letter

    @property
    def place(self) -> str:
        return f"step {self.beat.step} ({self.beat.phase})"


@dataclass(frozen=True)
class HangSuspect:
    """Who holds the others up, if it shows on this node; in words for people."""

    suspect: int | None
    message: str
    sure: bool = True  # a rank that is behind may itself wait for another node


def collect_stacks(gang: LocalRanks, folder: Path) -> list[RankView]:
    """Have each living rank dump its stacks, kept in ``folder``; those that answer do so within DUMP_SECONDS."""
    now, beats, alive = time.monotonic(), gang.listen(), list(gang.alive)
    gang.forward(signal.SIGUSR2)
    deadline = now + DUMP_SECONDS
    while time.monotonic() < deadline and not all(gang.channels[rank.rank].stacks() for rank in alive):
        time.sleep(_STACKS_POLL_SECONDS)
    time.sleep(_STACKS_POLL_SECONDS)  # the last of them may still be writing
    views = []
    for rank in alive:
        stacks, beat = gang.channels[rank.rank].stacks(), beats[rank.rank]
        if stacks:
            _keep(folder / f"{rank.rank:05d}.txt", stacks)
        views.append(RankView(rank.rank, beat, now - beat.heard, bool(stacks), process_state(rank.pid)))
    return views


def find_suspect(views: Sequence[RankView], several_nodes: bool) -> HangSuspect:
    """Pure: a rank that did not answer, else the one that is behind the others, else nobody here."""
    silent = [view for view in views if not view.dumped]
    if silent:
        worst = max(silent, key=lambda view: (view.state in "TtD", view.silent_seconds))
        others = f", as {len(silent) - 1} more" if len(silent) > 1 else ""
        why = _STATES.get(worst.state, f"state {worst.state}")
        told = f"rank {worst.rank} did not answer{others}: {why}, since {worst.place}"
        return HangSuspect(worst.rank, told, sure=worst.state != "D")  # a network file system is not the node's fault
    behind = min(views, key=lambda view: view.beat.progress)
    ahead = [view for view in views if (view.beat.step, view.beat.phase) != (behind.beat.step, behind.beat.phase)]
    if ahead:
        furthest = max(ahead, key=lambda view: view.beat.progress)
        return HangSuspect(
            behind.rank,
            f"rank {behind.rank} is behind: in {behind.place} while rank {furthest.rank} is in {furthest.place}",
            sure=False,
        )
    if several_nodes:
        return HangSuspect(None, f"all ranks wait in {behind.place}, for another node")
    return HangSuspect(None, f"no rank stands out: all answered from {behind.place}")


def _keep(path: Path, stacks: bytes) -> None:
    with contextlib.suppress(OSError):  # the file system may be what hangs or is full; the verdict does without
        make_folder(path.parent)
        replace_file(path, stacks)


STRAGGLER_SECONDS = 3.0  # for the other ranks to report failures of their own once one has failed
UNKILLABLE_SECONDS = 30.0  # then a rank hangs in the kernel (driver, dead file system) and waiting on helps nobody
_POLL_SECONDS = 1.0  # SIGCHLD wakes the loop at once; this is for deadlines


@dataclass
class Watch:
    """Waits for signals and for ranks to end, and decides when the rest must go."""

    run: RunDir
    options: AgentOptions
    node: str
    gang: LocalRanks
    cluster: ClusterSpec
    standstill: Standstill = field(default_factory=lambda: Standstill(STOPPED_SECONDS))
    autopsies: ExitDiagnosis = field(default_factory=ExitDiagnosis, init=False)
    patience: HangTimeout = field(default_factory=HangTimeout, init=False)
    deadline: float = field(default=float("inf"), init=False)  # monotonic: SIGKILL for whoever is left
    killed: bool = field(default=False, init=False)
    told_to_leave: bool = field(default=False, init=False)
    full: Failure | None = field(default=None, init=False)  # the disk is, and a rank ended of it
    ending: bool = field(default=False, init=False)  # a rank has failed, here or elsewhere

    def run_to_end(self) -> None:
        """Return when every rank has ended and is recorded, or cannot be ended."""
        while self.gang.alive:
            timeout = min(_POLL_SECONDS, max(0.0, self.deadline - time.monotonic()))
            heard = next_signal(HEARD, timeout)
            if heard is not None and heard not in (signal.SIGCHLD, signal.SIGHUP):
                self._pass_on(heard)
            for pid, exit_code in reap():
                self._note_end(pid, exit_code)
            if not self.told_to_leave and self.run.is_told_to_stop:
                self._pass_on(signal.SIGTERM)  # cancelled before there was an agent to signal
            if not self.ending and not self.killed:
                self._look_at_the_others()
            if time.monotonic() >= self.deadline:
                if self.killed:
                    self._say(f"{len(self.gang.alive)} ranks cannot be killed; this node needs attention")
                    self.gang.give_up()
                    return
                self.gang.kill()
                self.killed, self.deadline = True, time.monotonic() + UNKILLABLE_SECONDS

    def _look_at_the_others(self) -> None:
        """Have the ranks here come to a stand, or has another node failed or hung?"""
        beats = self.gang.listen(self.patience.lost_seconds())
        if not beats:
            return
        # From the first signal on the end of the grace period is what counts.
        stuck = None if self.told_to_leave else self._stopped()
        if stuck is None and not self.told_to_leave:
            stuck = hung_rank(beats, time.monotonic())
        if stuck is not None or is_hung(self.run, self.options.attempt):
            self._end_the_hang(stuck)
        elif has_failed(self.run, self.options.attempt):
            self._end_the_rest("another node failed")

    def _stopped(self) -> int | None:
        """Return a rank that a signal has stopped: it makes no progress, whatever silence it asked for."""
        pid = self.standstill.found([rank.pid for rank in self.gang.alive])
        return next((rank.rank for rank in self.gang.alive if rank.pid == pid), None)

    def _end_the_hang(self, stuck: int | None) -> None:
        """Say who holds the others up, and kill: ranks in a dead collective cannot save anything."""
        attempt = self.options.attempt
        with self._tolerating_a_bad_disk("the hang could not be announced"):
            announce_hang(self.run, attempt)  # first of all: ranks elsewhere are at the same point now
        views = collect_stacks(self.gang, self.run.attempt(attempt) / "stacks")
        finding = find_suspect(views, self.cluster.nodes > 1)
        silent = max((view.silent_seconds for view in views), default=0.0)
        what = "another node reports a hang" if stuck is None else f"no progress for {silent:.0f} s"
        message = f"{self.node}: {what}: {finding.message}. Stacks: attempts/{attempt:04d}/stacks"
        self._say(f"{message}; ending all ranks")
        self.gang.first_failure = finding.suspect
        self.gang.kill()
        self.killed, self.deadline = True, time.monotonic() + UNKILLABLE_SECONDS
        with self._tolerating_a_bad_disk("the hang could not be recorded"):
            failure = Failure(finding.suspect, "hang", message, int(ExitCode.CRASHED), self.node, finding.sure)
            write_failure(self.run, attempt, self.node, failure)
            record_event(
                self.run, "hang", attempt=attempt, node=self.options.node_name, rank=finding.suspect, message=message
            )
            announce_failure(self.run, attempt)

    @contextlib.contextmanager
    def _tolerating_a_bad_disk(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._say(f"{what}: {error}")

    def _pass_on(self, signum: int) -> None:
        self.told_to_leave = True
        signum = signal.SIGTERM if signum == signal.SIGINT else signum
        self.gang.forward(signum)
        if not self.killed:
            # From the first signal on: a scheduler that repeats itself does not grant more time.
            self.deadline = min(self.deadline, time.monotonic() + self.cluster.grace_seconds)
        name = signal.Signals(signum).name
        self._say(f"passed {name} on to {len(self.gang.alive)} ranks")
        # A full disk must not cost the ranks the grace in which they save what they can.
        with self._tolerating_a_bad_disk("the signal could not be recorded"):
            record_event(self.run, "signal", signal=name, attempt=self.options.attempt, node=self.options.node_name)

    def _note_end(self, pid: int, exit_code: int) -> None:
        rank = self.gang.ended(pid, exit_code)
        if rank is not None and rank.signal is not None and not rank.killed_by_agent:
            self._examine(rank)
        if rank is not None and rank.rank == self.gang.first_failure and rank.signal is None:
            self._look_for_space(rank)
        if rank is None or self.gang.first_failure is None or self.ending or self.killed:
            return
        self._end_the_rest(f"rank {rank.rank} ended with {rank.signal or f'exit code {exit_code}'}")
        # Else the other nodes would wait in a collective for this one until their watchdog ends them.
        with self._tolerating_a_bad_disk("the other nodes could not be told"):
            announce_failure(self.run, self.options.attempt)

    def _examine(self, rank: RankRecord) -> None:
        log = self.run.attempt(self.options.attempt) / "logs" / f"{self.options.node_name}-{rank.rank:05d}.log"
        failure = self.autopsies.failure(rank, self.node, log)
        if failure is not None:
            with self._tolerating_a_bad_disk("the evidence could not be kept"):
                write_failure(self.run, self.options.attempt, f"{self.node}-rank-{rank.rank:05d}", failure)

    def _look_for_space(self, rank: RankRecord) -> None:
        """Name a full disk as the cause where the rank could not: its own failure file needs space, too."""
        attempt = self.options.attempt
        words = no_space(self.run.attempt(attempt))
        if words and all(failure.rank != rank.rank for failure in read_failures(self.run, attempt)):
            message = f"rank {rank.rank} on {self.node}: {self.run.path}: {words}"
            self.full = Failure(rank.rank, "disk-full", message, int(ExitCode.DO_NOT_REQUEUE), self.node)
            self._say(message)

    def _end_the_rest(self, why: str) -> None:
        self.ending = True
        self.deadline = min(self.deadline, time.monotonic() + STRAGGLER_SECONDS)
        self._say(f"{why}; ending the others")

    def _say(self, message: str) -> None:
        say(f"node agent {self.options.node_rank} on {self.options.node_name}: {message}")
