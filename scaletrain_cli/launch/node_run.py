"""One node's part of one attempt, from the check of the node to its last process.

Expects the signals of node_agent.HEARD to be blocked. Passes SIGTERM and SIGUSR1 on with the whole grace period, ends
the rest when a rank fails, here or on another node, records every exit code. Knows no scheduler, and of the engine
only its exit codes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.launch.hang import find_suspect, look_into
from scaletrain_cli.launch.heartbeats import Patience, come_to_a_stand
from scaletrain_cli.launch.node_agent import HEARD, AgentOptions
from scaletrain_cli.launch.node_check import problems_of_node, usable_cores
from scaletrain_cli.launch.node_record import (
    NodeRecord,
    RankRecord,
    announce_failure,
    announce_hang,
    has_failed,
    is_hung,
    write_node_record,
)
from scaletrain_cli.launch.processes import adopt_orphans, die_with_parent, kill_descendants, own_identity, reap
from scaletrain_cli.launch.ranks import Gang, NodePlace, rank_command, rank_environment
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.failures import Failure, write_failure
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, swap_folder
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.spec import ClusterSpec

STRAGGLER_SECONDS = 3.0  # for the other ranks to report failures of their own once one has failed
UNKILLABLE_SECONDS = 30.0  # then a rank hangs in the kernel (driver, dead file system) and waiting on helps nobody
_POLL_SECONDS = 1.0  # SIGCHLD wakes the loop at once; this is for deadlines
# What a retry cannot cure, or only elsewhere: such a code of a rank becomes the node's, any other failure becomes 1.
VERDICTS = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.WRONG_NODES, ExitCode.DO_NOT_REQUEUE)


def run_node(options: AgentOptions) -> int:
    """Run the ranks to their end. Raises UsageError for a damaged record, WrongNodesError for an unfit node."""
    if options.parent_pid is not None and not die_with_parent(options.parent_pid, signal.SIGTERM):
        raise ScaletrainError(f"the parent {options.parent_pid} is gone; nobody is left to judge this attempt.")
    adopt_orphans()
    run = RunDir(options.run_folder.absolute())
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
    problems = problems_of_node(record.spec.cluster, os.environ)
    if problems:
        _refuse(run, options.attempt, node, "; ".join(problems))
    gang = Gang()
    try:
        try:
            _start_ranks(gang, run, record, options)
        except (ScaletrainError, OSError) as error:  # nothing to watch; say why, or it would count as a lost node
            verdict = error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED
            failure = Failure(None, "crash", f"{node.node}: {error}", int(verdict), node.node)
            _give_up(run, options.attempt, node, failure)
            raise
        write_node_record(run, options.attempt, replace(node, ranks=tuple(gang.ranks)))
        _Watch(run, options, node.node, gang, record.spec.cluster).run_to_end()
    finally:
        # Before the record says "ended": who reads that may start the next attempt here.
        kill_descendants()
    code = node_exit_code(gang.ranks, gang.first_failure)
    ended = replace(node, ranks=tuple(gang.ranks), ended=time.time(), exit_code=code, first_failure=gang.first_failure)
    write_node_record(run, options.attempt, ended)
    _remove_swap(_swap_folder(record, options))
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
        raise WrongNodesError(f"the run directory {run.path} cannot be written on {node.hostname}: {error}") from error


def _refuse(run: RunDir, attempt: int, node: NodeRecord, problem: str) -> None:
    message = f"{node.node}: {problem}"
    _give_up(run, attempt, node, Failure(None, "wrong-nodes", message, int(ExitCode.WRONG_NODES), node.node))
    raise WrongNodesError(message)


def _give_up(run: RunDir, attempt: int, node: NodeRecord, failure: Failure) -> None:
    write_failure(run, attempt, node.node, failure)
    announce_failure(run, attempt)
    write_node_record(run, attempt, replace(node, ended=time.time(), exit_code=failure.exit_code))


def _swap_folder(record: RunRecord, options: AgentOptions) -> Path:
    return swap_folder(record.run_id, options.attempt, options.node_rank, {**os.environ, **record.spec.env})


def _remove_swap(folder: Path) -> None:
    """Several times the model, and of no use to anyone."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another node of the run may be on this machine
        folder.parent.rmdir()


def _start_ranks(gang: Gang, run: RunDir, record: RunRecord, options: AgentOptions) -> None:
    # Relative paths in the spec mean the same whoever starts the attempt, and from where.
    if os.path.isdir(record.working_folder):
        os.chdir(record.working_folder)
    for folder in _swap_folder(record, options).parent.glob("attempt-*"):
        if not folder.name.startswith(f"attempt-{options.attempt:04d}-"):
            _remove_swap(folder)  # of an attempt whose agent was killed, or is taken for lost
    place = NodePlace(options.attempt, options.node_rank, options.master_addr, options.master_port)
    secrets = read_document(run.secrets) or {}
    missing = set(record.spec.secret_env) - secrets.keys()
    if missing:
        raise UsageError(f"{run.secrets} does not hold {', '.join(sorted(missing))}, which secret_env names.")
    cores = usable_cores()
    per_node = record.spec.cluster.gpus_per_node
    for local_rank in range(per_node):
        rank = options.node_rank * per_node + local_rank
        environment = rank_environment(record.spec, place, local_rank, base=os.environ, secrets=secrets, cores=cores)
        log = run.attempt(options.attempt) / "logs" / f"{options.node_name}-{rank:05d}.log"
        gang.start(rank, rank_command(options.engine, run.path), environment, log)


@dataclass
class _Watch:
    """Waits for signals and for ranks to end, and decides when the rest must go."""

    run: RunDir
    options: AgentOptions
    node: str
    gang: Gang
    cluster: ClusterSpec
    patience: Patience = field(default_factory=Patience, init=False)
    deadline: float = field(default=float("inf"), init=False)  # monotonic: SIGKILL for whoever is left
    killed: bool = field(default=False, init=False)
    told_to_leave: bool = field(default=False, init=False)
    ending: bool = field(default=False, init=False)  # a rank has failed, here or elsewhere

    def run_to_end(self) -> None:
        """Return when every rank has ended and is recorded, or cannot be ended."""
        while self.gang.alive:
            timeout = min(_POLL_SECONDS, max(0.0, self.deadline - time.monotonic()))
            heard = signal.sigtimedwait(HEARD, timeout)
            if heard is not None and heard.si_signo not in (signal.SIGCHLD, signal.SIGHUP):
                self._pass_on(heard.si_signo)
            for pid, exit_code in reap():
                self._note_end(pid, exit_code)
            if not self.told_to_leave and self.run.stop_file.exists():
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
        stuck = None if self.told_to_leave else come_to_a_stand(beats, time.monotonic())
        if stuck is not None or is_hung(self.run, self.options.attempt):
            self._end_the_hang(stuck)
        elif has_failed(self.run, self.options.attempt):
            self._end_the_rest("another node failed")

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
        if rank is None or self.gang.first_failure is None or self.ending or self.killed:
            return
        self._end_the_rest(f"rank {rank.rank} ended with {rank.signal or f'exit code {exit_code}'}")
        # Else the other nodes would wait in a collective for this one until their watchdog ends them.
        with self._tolerating_a_bad_disk("the other nodes could not be told"):
            announce_failure(self.run, self.options.attempt)

    def _end_the_rest(self, why: str) -> None:
        self.ending = True
        self.deadline = min(self.deadline, time.monotonic() + STRAGGLER_SECONDS)
        self._say(f"{why}; ending the others")

    def _say(self, message: str) -> None:
        print(
            f"node agent {self.options.node_rank} on {self.options.node_name}: {message}", file=sys.stderr, flush=True
        )
