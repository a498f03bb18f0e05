"""A node's ranks from their start to the end of the last one: signals, failures, hangs, deadlines.

Expects the signals of node_agent.HEARD to be blocked. Passes SIGTERM and SIGUSR1 on with the whole grace period, ends
the rest when a rank fails or hangs, here or on another node. Knows no scheduler.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.autopsy import Autopsies
from scaletrain_cli.launch.full_disk import no_space, say
from scaletrain_cli.launch.hang import find_suspect, look_into
from scaletrain_cli.launch.heartbeats import Patience, come_to_a_stand
from scaletrain_cli.launch.node_agent import HEARD, AgentOptions
from scaletrain_cli.launch.node_record import RankRecord, announce_failure, announce_hang, has_failed, is_hung
from scaletrain_cli.launch.processes import STOPPED_SECONDS, Standstill, next_signal, reap
from scaletrain_cli.launch.ranks import Gang
from scaletrain_cli.rundir.failures import Failure, read_failures, write_failure
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import ClusterSpec

STRAGGLER_SECONDS = 3.0  # for the other ranks to report failures of their own once one has failed
UNKILLABLE_SECONDS = 30.0  # then a rank hangs in the kernel (driver, dead file system) and waiting on helps nobody
_POLL_SECONDS = 1.0  # SIGCHLD wakes the loop at once; this is for deadlines


@dataclass
class Watch:
    """Waits for signals and for ranks to end, and decides when the rest must go."""

    run: RunDir
    options: AgentOptions
    node: str
    gang: Gang
    cluster: ClusterSpec
    standstill: Standstill = field(default_factory=lambda: Standstill(STOPPED_SECONDS))
    autopsies: Autopsies = field(default_factory=Autopsies, init=False)
    patience: Patience = field(default_factory=Patience, init=False)
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
            stuck = come_to_a_stand(beats, time.monotonic())
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
        views = look_into(self.gang, self.run.attempt(attempt) / "stacks")
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
