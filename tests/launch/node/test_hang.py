"""Hung ranks: found by their heartbeats, their stacks written, the suspect named, the attempt ended."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.attempts import attempt_outcome, begin_attempt
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.node import processes
from scaletrain_cli.launch.node.heartbeats import Channel, LastBeat, hung_rank
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.launch.node.record import NodeRecord, read_node_records, write_node_record
from scaletrain_cli.launch.node.watch import StartWatch, Watch
from scaletrain_cli.launch.restart import conclude_attempt
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.worker.failures import read_failures
from scaletrain_cli.worker.heartbeat import LONG_SECONDS, Heartbeat, collective_seconds
from tests.launch.conftest import LOCAL, MakeRun, StartAgent, is_running, signalled_at_its_start
from tests.launch.test_resume import Cluster
from tests.waiting import wait_until


class Line:
    """Both ends of one heartbeat, with a clock that the test sets."""

    def __init__(self, several_nodes: bool = False) -> None:
        self.now = 0.0
        reads, self.writes = os.pipe2(os.O_NONBLOCK)
        self.file = os.fdopen(reads, "r")
        self.heart = Heartbeat(self.writes, several_nodes=several_nodes, clock=lambda: self.now)

    def allowed(self) -> float:
        """Return the time limit in the latest beat, in seconds."""
        return float(json.loads(self.file.readlines()[-1])["allowed"])

    def steps(self, count: int, seconds: float, first: int = 1) -> float:
        for step in range(first, first + count):
            self.heart.beat(step, "step")
            self.now += seconds
            self.heart.wait_for_ranks()
        self.heart.beat(first + count, "step")
        return self.allowed()

    def close(self) -> None:
        self.file.close()
        os.close(self.writes)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def test_the_first_steps_may_take_long_and_then_five_times_the_median(line: Line) -> None:
    assert line.steps(2, 20.0) == LONG_SECONDS  # two of them are timed
    assert line.steps(3, 20.0, first=3) == 100.0


def test_fast_steps_may_take_30_seconds_unless_guard_hang_is_set(line: Line) -> None:
    assert line.steps(10, 0.1) == 30.0
    line.heart.hang_seconds = 2.5
    assert line.steps(1, 0.1, first=11) == 2.5
    line.heart.beat(12, "save")
    assert line.allowed() == LONG_SECONDS  # the user's limit is for steps; a save takes what it takes


def test_a_rank_that_has_its_batch_keeps_the_time_limit_of_its_step(line: Line) -> None:
    line.heart.beat(1, "step", 77.0)
    line.heart.has_batch()
    kept = [json.loads(beat) for beat in line.file]
    assert [(beat["step"], beat["phase"], beat["part"], beat["allowed"]) for beat in kept] == [
        (1, "step", 0, 77.0),
        (1, "step", 1, 77.0),
    ]
    assert line.steps(10, 0.1) == 30.0, "only whole steps enter the median"


def test_a_step_after_a_save_on_several_nodes_may_wait_for_the_slowest_disk() -> None:
    for several_nodes, allowed in ((False, 30.0), (True, LONG_SECONDS)):
        line = Line(several_nodes)
        line.steps(5, 1.0)
        line.heart.beat(6, "save")
        line.heart.wait_for_ranks()
        assert line.allowed() == LONG_SECONDS
        line.now += 500.0
        line.heart.beat(7, "step")
        assert line.allowed() == allowed
        assert line.steps(1, 1.0, first=8) == 30.0  # the save did not enter the median
        line.close()


def test_the_timeout_of_collectives_exceeds_every_time_limit_in_training() -> None:
    assert collective_seconds(None) > LONG_SECONDS
    assert collective_seconds(7200.0) > 7200.0


def test_a_pipe_that_no_agent_reads_never_blocks_a_rank(line: Line) -> None:
    for step in range(10_000):
        line.heart.beat(step, "step")
    kept = [json.loads(beat)["step"] for beat in line.file]
    assert kept == list(range(len(kept)))  # the pipe was full then; later beats are lost
    assert 0 < len(kept) < 10_000


def test_without_an_agent_a_heartbeat_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Heartbeat(None).beat(1, "step")
    assert capfd.readouterr() == ("", "")


def test_child_processes_of_a_rank_do_not_inherit_its_descriptors() -> None:
    channel = Channel()
    program = (
        "import os, subprocess\n"
        "from scaletrain_cli.worker.heartbeat import Heartbeat\n"
        "Heartbeat.from_environment(os.environ).beat(7, 'step', 5.0)\n"
        "fd = int(os.environ['SCALETRAIN_HEARTBEAT_FD'])\n"
        "raise SystemExit(os.get_inheritable(fd))\n"
    )
    with channel.inherited() as variables:
        descriptors = [int(number) for number in variables.values()]
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | variables, pass_fds=descriptors)
    channel.listen()
    assert done.returncode == 0
    assert (channel.beat.step, channel.beat.phase, channel.beat.allowed_seconds) == (7, "step", 5.0)
    channel.close()


def test_ranks_that_wait_for_one_that_may_be_slow_are_not_hung() -> None:
    saving, waiting = LastBeat(10, "save", 1800.0, received=0.0), LastBeat(11, "step", 30.0, received=1.0)
    assert hung_rank({0: waiting, 1: saving}, now=100.0) is None
    assert hung_rank({0: waiting, 1: saving}, now=2000.0) == 1
    assert hung_rank({0: waiting, 1: LastBeat(10, "step", 30.0, received=0.0)}, now=100.0) == 1
    assert hung_rank({}, now=100.0) is None


def test_a_rank_that_was_rolled_back_first_is_ahead_of_those_that_still_are(line: Line) -> None:
    line.heart.beat(20, "rollback")
    line.heart.beat(11, "step")
    turns = [json.loads(text)["turn"] for text in line.file.readlines()]
    assert turns == [0, 1]
    rolled_back, restoring = (
        LastBeat(11, "step", 30.0, received=0.0, turn=1),
        LastBeat(20, "rollback", 1800.0, received=0.0),
    )
    assert hung_rank({0: rolled_back, 1: restoring}, now=100.0) is None


def test_time_in_which_the_agent_was_stopped_does_not_count_as_silence() -> None:
    channel = Channel()
    before = channel.beat.received
    channel.extend(3600.0)
    assert channel.beat.received == before + 3600.0


def test_a_stopped_rank_is_reported_with_its_stacks_and_killed(make_run: MakeRun, start_agent: StartAgent) -> None:
    # In the first steps, so that no earlier one can take longer than the limit on a busy machine.
    made = make_run(hang={"1:0": 2, "1:1": 1}, stopped=[1], steps=100, silence=3.0)
    agent = start_agent(made)
    assert agent.wait() == 1
    (failure,) = read_failures(made.run, 1)
    assert (failure.rank, failure.reason, failure.node) == (None, "hang", agent.node.node)
    assert [(view.rank, view.responded) for view in failure.ranks] == [(0, True), (1, False)]
    assert (failure.ranks[1].step, failure.ranks[1].state) == (1, "T")
    (stacks,) = (made.run.attempt(1) / "stacks").iterdir()
    assert stacks.name == "00000.txt"
    assert "fake_engine.py" in stacks.read_text()
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.exit_code, outcome.reason, outcome.against) == (1, "hang", (agent.node.name,))
    assert f"rank 1 on {agent.node.node} in step 1 does not respond: stopped by a signal (state T)" in outcome.message
    assert outcome.message.endswith("Stacks: attempts/0001/stacks")
    conclude_attempt(made.run, made.record, 1, first_attempt=1)
    (event,) = made.events("hang")
    assert (event["attempt"], event["rank"], event["node"]) == (1, 1, agent.node.node)
    assert event["message"] == outcome.message


def test_the_node_with_a_suspect_is_the_cause_and_none_that_waited(make_run: MakeRun, start_agent: StartAgent) -> None:
    everywhere = {f"1:{rank}": 1 for rank in range(4)}
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", hang=everywhere, stopped=[3], steps=99, silence=10.0)
    agents = [start_agent(made, node_rank=0), start_agent(made, node_rank=1)]
    assert [agent.wait() for agent in agents] == [1, 1]
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.reason, outcome.against) == ("hang", (agents[1].node.name,))
    assert f"rank 3 on {agents[1].node.node} in step 1 does not respond" in outcome.message
    # No agent has ended its ranks before the other one knew where its own were.
    assert [[view.rank for view in failure.ranks] for failure in read_failures(made.run, 1)] == [[0, 1], [2, 3]]
    assert all(view.position for failure in read_failures(made.run, 1) for view in failure.ranks if view.responded)


def test_a_hang_after_a_signal_is_left_to_the_grace_period(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.grace_seconds=3600", hang={"1:1": 1}, deaf=[0, 1], steps=10**7, silence=0.001)
    agent = signalled_at_its_start(start_agent, made)
    wait_until(lambda: "hanging" in made.log(1, 1), "rank 1 hangs")
    for number in (2, 3):  # the agent has looked at the ranks between them
        agent.process.send_signal(signal.SIGUSR1)
        wait_until(lambda number=number: len(made.events("signal")) == number, "the signal is passed on")
    assert made.events("hang") == []
    assert read_failures(made.run, 1) == []
    os.kill(agent.node.ranks[1].pid, signal.SIGKILL)
    assert agent.wait() == 1


def test_a_rank_that_is_stopped_before_its_first_beat_is_found(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("guard.hang=2s", start_seconds=600)
    agent = start_agent(made)
    started = lambda: [rank for node in read_node_records(made.run, 1) for rank in node.ranks]  # noqa: E731
    wait_until(lambda: len(started()) == 2, "the ranks are started")
    os.kill(agent.node.ranks[1].pid, signal.SIGSTOP)
    assert agent.wait() == 1
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert outcome.reason == "hang"
    assert "in step 0 does not respond: stopped by a signal (state T) (phase: start)" in outcome.message


def test_a_start_that_takes_long_says_which_ranks_and_nodes_it_waits_for(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpu=h100-sxm-80gb")
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
    write_node_record(made.run, 1, NodeRecord("node-0000-n0", "n0", 0, 1, 1, 0.0))
    options: Any = SimpleNamespace(node_rank=0, attempt=1)
    watch, cluster = StartWatch(made.run, options, "node-0000-n0", 2), Cluster()
    cluster.state = "running"
    imports, connect = LastBeat(0, "imports", 900.0, 0.0), LastBeat(0, "connect", 1500.0, 5.0)

    def said() -> list[tuple[str, list[int], int]]:
        found = [event["params"] for event in made.events("start-waits")]
        return [(params["phase"], params["ranks"], params["seconds"]) for params in found]

    for now in (59.0, 60.0, 61.0, 119.0, 120.0):
        watch.look({0: connect, 1: imports}, now)
    assert said() == [("imports", [1], 60), ("imports", [1], 120)]
    assert "1 of 2 node agents have started, without n1;" in str(run_status(made.run, cluster).starting)
    write_node_record(made.run, 1, NodeRecord("node-0001-n1", "n1", 1, 1, 1, 0.0))
    for now in (130.0, 189.0, 190.0):
        watch.look({0: connect, 1: LastBeat(0, "connect", 1500.0, 130.0)}, now)
    assert said()[2:] == [("connect", [0, 1], 125)], "of the rank that waits longest"
    said_last = event_sentence(made.events("start-waits")[-1])
    assert said_last.startswith("no step yet; on node-0000-n0 in the phase connect for 2 min 5 s: rank 0, 1; ended as")
    options.node_rank = 1
    other = StartWatch(made.run, options, "node-0001-n1", 2)
    other.look({2: LastBeat(0, "connect", 1500.0, 0.0)}, 100.0)
    assert len(said()) == 3, "it waits for another node, which says why"
    record_event(made.run, "started", step=0)
    watch.look({0: LastBeat(1, "step", 30.0, 0.0)}, 1e6)
    watch.look({0: LastBeat(9, "set-up", 30.0, 0.0)}, 1e6)  # of a later stage
    assert (len(said()), run_status(made.run, cluster).starting) == (3, None)


def test_records_of_other_nodes_that_cannot_be_read_do_not_end_the_agent(make_run: MakeRun) -> None:
    made = make_run()
    options: Any = SimpleNamespace(node_rank=0, attempt=1)
    watch = Watch(made.run, options, "n", LocalRanks(), made.record.spec.cluster)
    watch.start = StartWatch(made.run, options, "n", 1)
    watch.local_ranks = cast(
        "Any", SimpleNamespace(listen=lambda *_: {0: LastBeat(0, "imports", 900.0, -1e6)}, alive=[])
    )
    (made.run.attempt(1) / "nodes" / "node-0001-n1.json").mkdir(parents=True)
    watch.preempted = True  # then only the start is looked at
    watch._check_progress()


def test_a_node_agent_that_is_stopped_is_killed_and_the_run_continues(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run("guard.hang=2s", "restarts.node=1", stay={"1:*": 1})
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: "up" in made.log(1, 0), "the ranks are up")
    (node,) = read_node_records(made.run, 1)
    os.kill(node.agent_pid, signal.SIGSTOP)
    assert wait_for_end(made.run, LOCAL, math.inf, lambda status: None).state == "finished"
    assert len(made.run.attempts()) == 2
    assert "is stopped (state T)" in (made.run.path / "supervisor.log").read_text()
    assert not any(is_running(rank.pid) for rank in node.ranks)


def test_the_first_node_records_for_how_long_all_processes_were_stopped(make_run: MakeRun) -> None:
    made = make_run()
    for node_rank, seconds in ((0, 3600.0), (0, 0.0), (1, 3600.0)):
        options: Any = SimpleNamespace(node_rank=node_rank, attempt=1)
        watch = Watch(made.run, options, "n", LocalRanks(), made.record.spec.cluster)
        watch.pauses = cast("Any", SimpleNamespace(lost_seconds=lambda seconds=seconds: seconds))
        watch._check_progress()
    assert [event["seconds"] for event in made.events("suspended")] == [3600.0]


def test_stops_that_end_in_time_and_those_of_a_debugger_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    states = {1: "T", 2: "t", 3: "S"}
    monkeypatch.setattr(processes, "process_state", lambda pid: states[pid])
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watched = processes.StoppedProcesses(5.0)

    def found(at: float, state: str) -> int | None:
        clock[0], states[1] = at, state
        return watched.longest(states)

    assert [found(at, "T") for at in (1.0, 2.0, 3.0)] == [None] * 3
    assert [found(at, "S") for at in (4.0, 5.0)] == [None] * 2
    assert [found(at, "T") for at in (6.0, 8.0, 10.0, 11.0)] == [None, None, None, 1]
    assert found(60.0, "T") is None, "this process was stopped itself meanwhile"


def test_the_limits_of_set_up_and_first_steps_follow_from_the_size_of_the_run(line: Line) -> None:
    def limits(**given: Any) -> tuple[float, float]:
        sizes = {"hang_seconds": None, "step_seconds": 1.0, "bytes_per_node": 0.0, "compiled": False}
        line.heart.allow(**{**sizes, **given})
        line.heart.beat(0, "set-up")
        set_up = line.allowed()
        line.heart.beat(1, "step")
        return set_up, line.allowed()

    assert limits() == (600.0, 320.0)
    assert limits(step_seconds=30.0) == (600.0, 900.0)
    assert limits(bytes_per_node=1e11) == (2600.0, 320.0)
    assert limits(compiled=True) == (600.0, 1220.0)
    assert limits(hang_seconds=120.0) == (600.0, 120.0), "the user's own limit holds from the first step on"
    assert limits(hang_seconds=5.0) == (600.0, 120.0)
    assert limits(hang_seconds=120.0, compiled=True) == (600.0, 1020.0)
    line.heart.beat(1, "save")
    assert line.allowed() == LONG_SECONDS
    assert collective_seconds(line.heart.longest_seconds) > max(line.heart.longest_seconds, LONG_SECONDS)


def test_lines_that_are_no_beats_are_ignored() -> None:
    channel = Channel()
    with channel.inherited() as variables:
        writes = os.dup(int(variables["SCALETRAIN_HEARTBEAT_FD"]))
    beats = [b"", b"{", b"[]", b"null", b'{"step": "x"}', b'{"step": 1e999, "turn": 0, "phase": "", "allowed": 1}']
    beats += [b"[" * 5000, b'{"step": 1, "turn": 0, "phase": "step", "allowed": NaN}', b"\xff\xfe"]
    for beat in beats:
        os.write(writes, beat + b"\n")
        channel.listen()
    assert channel.beat.phase == "start"
    os.write(writes, b'{"step": 3, "turn": 0, "phase": "step", "allowed": 2}\n')
    channel.listen()
    assert (channel.beat.step, channel.beat.allowed_seconds) == (3, 2.0)
    os.close(writes)
    channel.close()
