"""Idle runs: what counts as doing nothing, the announcement at half of the time, and the end with the state saved."""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from scaletrain_cli.errors import ExitCode, SpecError
from scaletrain_cli.launch.attempts import Decision, begin_attempt, read_attempts, read_stop_request, request_stop
from scaletrain_cli.launch.backends.kubernetes.pod_agent import exit_code_for
from scaletrain_cli.launch.backends.kubernetes.pod_output import (
    PodEnd,
    read_termination_message,
    termination_text,
)
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.node.heartbeats import LastBeat
from scaletrain_cli.launch.node.idle import GpuUse, IdleWatch, ProcessUse, Window, idle_seconds_of_others
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.launch.restart import conclude_attempt, conclude_run
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.status import idle_notice, run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.notify.notices import Receiver, notice_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import append_line, read_events
from scaletrain_cli.spec.notify import NotifySpec
from tests.launch.conftest import LOCAL, MadeRun, MakeRun, StartAgent, make_spec
from tests.launch.node.test_gpu_health import FAKE
from tests.waiting import wait_until

NOTHING = Window(60.0, {}, cpu_seconds=0.3, size=1e5)
STEP = LastBeat(7, "step", 30.0, received=0.0)


class NoProcesses(ProcessUse):
    """Processes that use what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_seconds, self.size = 0.0, 0.0

    def take(self, without: Any = ()) -> tuple[float, float]:
        return self.cpu_seconds, self.size


@dataclass
class Node:
    """The watch of one node, whose clock the test moves."""

    made: MadeRun
    node_rank: int = 0
    now: float = 0.0
    processes: NoProcesses = field(default_factory=NoProcesses)

    def __post_init__(self) -> None:
        if self.node_rank == 0:
            begin_attempt(self.made.run, self.made.record.spec, scheduler="test", job_id="1", nodes=())
        self.gpus = GpuUse()
        place = (f"node-{self.node_rank:04d}-n{self.node_rank}", self.node_rank, self.made.record.spec.cluster, 1.0)
        self.watch = IdleWatch(self.made.run, 1, *place, self.gpus, self.processes, clock=lambda: self.now)

    def passes(self, seconds: float, beat: LastBeat | None = STEP, share: float | None = None) -> Reason | None:
        """Let the time pass; ``share``: the use of each GPU. Return the request that the agent acts on."""
        found = None
        for _ in range(round(seconds)):
            self.now += 1.0
            if share is not None:
                for index in range(self.made.record.spec.cluster.gpus_per_node):
                    self.gpus.add(index, {"utilization": share})
            found = self.watch.check({} if beat is None else {0: beat}) or found
        return found

    def names(self) -> list[str]:
        return [event["event"] for event in read_events(self.made.run) if event["event"].startswith("idle")]


def test_a_node_is_idle_below_a_small_use_of_its_gpus() -> None:
    assert not NOTHING.is_active(0)
    assert not Window(60.0, {0: 0.01, 1: 0.0}, 0.0, 0.0).is_active(2)
    assert Window(60.0, {0: 0.0, 1: 0.03}, 0.0, 0.0).is_active(2)


def test_a_gpu_whose_use_is_not_known_counts_as_active() -> None:
    assert Window(60.0, {0: 0.0}, 0.0, 0.0).is_active(2)


def test_processes_count_where_cpus_train_or_a_rank_announces_a_long_phase() -> None:
    busy = {"cpu_seconds": 30.0, "size": 0.0}
    reads = {"cpu_seconds": 0.1, "size": 1e9}
    for use in (busy, reads):
        assert Window(60.0, {}, **use).is_active(0)
        assert not Window(60.0, {0: 0.0}, **use).is_active(1), "a notebook beside an unused GPU"
        assert Window(60.0, {0: 0.0}, **use, announced=True).is_active(1), "loading, preparing, saving"
    assert not Window(60.0, {0: 0.0}, 0.0, 0.0, announced=True).is_active(1), "an announced phase that does nothing"


def test_progress_counts_whatever_the_devices_do() -> None:
    assert Window(60.0, {0: 0.0}, 0.0, 0.0, progressed=True).is_active(1)


def test_a_run_is_announced_at_half_of_the_time_and_ended_after_all_of_it(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    assert node.passes(9 * 60) is None
    assert node.names() == []
    assert node.passes(3 * 60) is None
    assert node.names() == ["idle"]
    why = node.passes(9 * 60)
    assert (why.code, why.params) == ("launch.ended-idle", {"seconds": 1200, "what": "processes"})
    assert node.names() == ["idle"], "announced once"


def test_heartbeats_and_steps_of_any_program_are_progress(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    for step in range(40):
        assert node.passes(60, LastBeat(step, "step", 30.0, received=node.now)) is None
    for step in range(40):
        append_line(node.made.run.metrics, {"step": step, "loss": 1.0})
        assert node.passes(60, None) is None
    assert node.names() == []
    assert node.passes(21 * 60, None) is not None


def test_a_run_that_works_again_after_the_announcement_is_not_ended(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    node.passes(15 * 60)
    node.processes.cpu_seconds = 60.0
    node.passes(60)
    node.processes.cpu_seconds = 0.0
    assert node.passes(9 * 60) is None
    assert node.names() == ["idle", "idle-over"]
    assert node.passes(12 * 60) is not None
    assert node.names() == ["idle", "idle-over", "idle"]


def test_a_long_phase_is_idle_only_if_nothing_moves_in_it(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=20m"))
    data = LastBeat(0, "data", 24 * 3600.0, received=0.0)
    node.processes.cpu_seconds = 60.0
    assert node.passes(60 * 60, data, share=0.0) is None
    assert node.passes(22 * 60, STEP, share=0.0) is not None, "a step is no announced phase"
    other = Node(make_run("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=20m"))
    assert other.passes(22 * 60, data, share=0.0) is not None, "its processes wait for something that never comes"


def test_a_first_step_that_compiles_on_the_cpu_is_not_idle_within_its_limit(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=20m"))
    compiles = LastBeat(1, "step", 3000.0, received=0.0)
    node.processes.cpu_seconds = 60.0
    assert node.passes(45 * 60, compiles, share=0.0) is None
    assert node.names() == []
    assert node.passes(30 * 60, compiles, share=0.0) is not None, "after its limit it is none"


def test_a_pause_of_the_agent_does_not_hide_what_came_before_it(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    node.passes(15 * 60)
    node.passes(30, LastBeat(8, "step", 30.0, received=node.now))
    node.now += 20.0
    assert node.passes(9 * 60, LastBeat(8, "step", 30.0, received=15 * 60.0)) is None
    assert node.names() == ["idle", "idle-over"]


def test_a_request_that_cannot_be_read_ends_neither_the_agent_nor_the_conclusion(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    (node.made.run.attempt(1) / "idle.json").mkdir()
    assert node.passes(1) is None
    assert read_stop_request(node.made.run, 1, "idle") is None


def test_a_gpu_in_use_keeps_a_debugging_session(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=20m"))
    silent = LastBeat(0, "start", float("inf"), received=0.0)
    node.processes.cpu_seconds = 60.0
    for _ in range(6):
        assert node.passes(9 * 60, silent, share=0.0) is None
        node.passes(60, silent, share=0.3)
    why = node.passes(22 * 60, silent, share=0.0)
    assert why.params["what"] == "GPUs"


def test_a_driver_that_reports_no_use_is_recorded_and_ends_nothing(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=20m"))
    assert node.passes(60 * 60) is None
    assert node.names() == ["idle-unmeasured"]


def test_time_for_which_the_agent_itself_was_stopped_is_not_idle(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    node.passes(8 * 60)
    node.now += 3600.0
    assert node.passes(60) is None
    assert node.names() == []


def test_all_nodes_must_be_idle_and_each_gets_the_request(make_run: MakeRun) -> None:
    # A local run has one node; the agents know the number of nodes from their record.
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.idle_timeout=20m")
    first, second = Node(made), Node(made, node_rank=1)
    for _ in range(25):
        second.processes.cpu_seconds = 60.0
        assert second.passes(60) is None
        assert first.passes(60) is None
    assert first.names() == []
    second.processes.cpu_seconds = 0.0
    for _ in range(13):
        second.passes(60)
        assert first.passes(60) is None
    assert first.names() == ["idle"]
    second.processes.cpu_seconds = 60.0
    second.passes(60)
    first.passes(60)
    assert idle_seconds_of_others(made.run, 1, 1) == [0.0]
    assert first.names() == ["idle", "idle-over"]
    second.processes.cpu_seconds = 0.0
    ended = [(second.passes(60), first.passes(60)) for _ in range(22)]
    assert ended[-1] == (read_stop_request(made.run, 1, "idle"),) * 2
    assert ended[-1][0] is not None


def test_a_node_without_a_record_counts_as_active(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=3", "cluster.idle_timeout=20m")
    first, second = Node(made), Node(made, node_rank=1)
    for _ in range(40):
        second.passes(60)
        assert first.passes(60) is None
    assert sorted(idle_seconds_of_others(made.run, 1, 2))[0] == 0.0
    assert first.names() == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("cluster.idle_timeout=5s",), "must be at least 10 s, or null"),
        (("cluster.idle_timeout=30s", "telemetry.interval=10s"), "must be at least 100 s with telemetry.interval"),
        (("cluster.idle_timeout=soon",), "must be a duration"),
    ],
)
def test_a_time_in_which_nothing_can_be_measured_is_refused(settings: tuple[str, ...], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        make_spec(*settings)
    (found,) = error.value.problems
    assert found.key == "cluster.idle_timeout"
    assert problem in found.message
    assert make_spec().cluster.idle_timeout is None
    assert make_spec("cluster.idle_timeout=30m").cluster.idle_timeout == 1800.0


# ---- the end ---------------------------------------------------------------------------------------------------------


def end_of_rank(made: MadeRun, exit_code: int, *, killed: bool = False) -> None:
    begin_attempt(made.run, made.record.spec, scheduler="test", job_id="1", nodes=("here",))
    rank = RankRecord(0, 1, 0.0).end(exit_code, 1.0, killed_by_agent=killed)
    failed = None if exit_code in (0, 75) else 0
    code = exit_code if exit_code in (0, 75) else 1
    node = NodeRecord("node-0000-here", "here", 0, 1, 1, 0.0, (rank,), ended=1.0, exit_code=code, first_failure=failed)
    write_node_record(made.run, 1, node)


@pytest.mark.parametrize(("exit_code", "killed"), [(75, False), (-15, False), (-9, True), (1, False)])
def test_an_idle_run_ends_with_75_and_is_not_requeued(make_run: MakeRun, exit_code: int, killed: bool) -> None:
    made = make_run("cluster.gpus_per_node=1")
    end_of_rank(made, exit_code, killed=killed)
    asked = Reason("launch.ended-idle", {"seconds": 1800, "what": "GPUs"})
    request_stop(made.run, 1, "idle", asked)
    decision = conclude_attempt(made.run, made.record, 1, first_attempt=1, time_is_up=lambda: True)
    assert (decision.requeue, decision.exit_code, decision.code) == (False, 75, "launch.stop-idle")
    ended = read_attempts(made.run)[-1]
    assert (ended.reason, ended.exit_code) == ("idle", 75)
    assert ended.why.contains("launch.ended-idle")


def test_a_finished_run_stays_finished_and_a_preemption_a_preemption(make_run: MakeRun) -> None:
    made = make_run("cluster.gpus_per_node=1")
    end_of_rank(made, 0)
    request_stop(made.run, 1, "idle", Reason("launch.ended-idle", {"seconds": 1800, "what": "GPUs"}))
    assert conclude_attempt(made.run, made.record, 1, first_attempt=1).code == "launch.stop-done"
    other = make_run("cluster.gpus_per_node=1", run_id="other")
    end_of_rank(other, 75)
    assert conclude_attempt(other.run, other.record, 1, first_attempt=1).requeue


def test_kubernetes_restarts_no_idle_gang_and_shows_its_end_without_its_volume(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=kubernetes")
    stop = Decision.because(False, ExitCode.PREEMPTED, Reason("launch.stop-idle"))
    assert exit_code_for(stop, "idle") == ExitCode.DO_NOT_REQUEUE
    asked = Reason("launch.ended-idle", {"seconds": 1800, "what": "GPUs"})
    params = {"attempt": 1, "exit_code": 75, "end": asked, "decision": stop.reason}
    message = termination_text(PodEnd(93, Reason("launch.attempt-ended-decided", params), 1), "n1")
    said = read_termination_message(message)
    why = Reason("kubernetes.pod-ended", {"pod": "p", "node": "n1", "exit_code": 93, "cause": said.end.reason})
    job = Job.because("jobset/x", "ended", why, exit_code=93)
    assert run_status(made.run, job=job).state == "ended-idle"
    crashed = Job.because("jobset/x", "ended", Reason("kubernetes.failed"), exit_code=93)
    assert run_status(made.run, job=crashed).state == "failed"


def test_secrets_of_an_idle_run_are_removed(make_run: MakeRun) -> None:
    made = make_run("cluster.gpus_per_node=1")
    end_of_rank(made, 75)
    request_stop(made.run, 1, "idle", Reason("launch.ended-idle", {"seconds": 1800, "what": "GPUs"}))
    made.run.secrets.write_text("{}")
    conclude_run(made.run, conclude_attempt(made.run, made.record, 1, first_attempt=1))
    assert not made.run.secrets.exists()


def test_the_announcement_and_the_end_are_sent_by_default_and_a_preemption_is_not() -> None:
    receiver = Receiver()
    idle = {"event": "idle", "time": 1.0, "attempt": 1, "measured": "GPUs", "seconds": 900, "ends_in_seconds": 900}
    stop = Reason("launch.stop-idle")
    events = [
        idle | {"timeout": 1800.0},
        {"event": "stopped", "time": 2.0, "exit_code": 75, "why": str(stop), **stop.to_document()},
        {"event": "stopped", "time": 3.0, "exit_code": 75, "why": "preempted", "code": "launch.job-stopped"},
    ]
    for place, event in enumerate(events):
        notice = notice_of(event, place)
        assert notice is not None
        receiver.take(notice, NotifySpec(webhook="URL"))
    sent = [(each.notice.kind, each.notice.severity) for each in receiver.pending]
    assert sent == [("idle", "warning")] * 2
    assert "in 15 min" in receiver.pending[0].notice.text


def test_the_status_shows_the_announcement_until_the_run_works_again(make_run: MakeRun) -> None:
    node = Node(make_run("cluster.idle_timeout=20m"))
    node.passes(13 * 60)
    found = idle_notice(node.made.run, time.time() + 60)
    assert found.params["seconds"] == pytest.approx(11 * 60, abs=61)
    assert found.params["left"] == pytest.approx(9 * 60, abs=61)
    node.processes.cpu_seconds = 60.0
    node.passes(60)
    assert idle_notice(node.made.run, time.time()) is None


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_local_run_that_waits_is_announced_saved_ended_and_resumable(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run("cluster.idle_timeout=10s", steps=20, stay={"1:*": 6}, silence=600, save_seconds=600)
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: made.events("idle"), "it is announced")
    status = run_status(made.run, LOCAL)
    assert (status.state, status.idle is not None) == ("running", True)
    assert [finding.code for finding in explain(made.run).findings] == ["launch.idle"]
    (made.run.path / "save").touch()  # until now the ranks could not end
    ended = wait_for_end(made.run, LOCAL, math.inf, lambda _: None)
    assert ended.state == "ended-idle"
    assert ended.last_checkpoint_step == 6
    assert [(event["exit_code"], event["reason"]) for event in made.events("attempt-ended")] == [(75, "idle")]
    assert not made.events("attempt-ended")[0]["requeue"]
    assert made.events("stopped")[0]["code"] == "launch.stop-idle"
    found = explain(made.run).findings
    assert [finding.code for finding in found] == ["launch.exit-idle"]
    assert f"scaletrain resume {made.run.run_id} continues it" in found[0].actions
    resume(made.run, scheduler=LOCAL)
    assert wait_for_end(made.run, LOCAL, math.inf, lambda _: None).state == "finished"
    assert read_attempts(made.run)[-1].checkpoint_at_start == 6


@pytest.mark.process
def test_a_program_that_is_asked_to_end_has_not_finished(make_run: MakeRun, start_agent: StartAgent) -> None:
    server = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(100_000)"
    made = make_run("cluster.idle_timeout=10s", f"code.command={json.dumps([sys.executable, '-c', server])}")
    agent = start_agent(made)
    assert agent.wait() == ExitCode.PREEMPTED
    assert read_stop_request(made.run, 1, "idle") is not None


@pytest.mark.process
def test_unused_gpus_without_heartbeats_end_a_program(make_run: MakeRun, start_agent: StartAgent) -> None:
    spin = "import time\nwhile True: time.sleep(0.0005)"  # a busy process beside GPUs that do nothing
    search = os.pathsep.join([str(FAKE), os.environ["PYTHONPATH"]])
    found = {"PYTHONPATH": search, "FAKE_NVML": json.dumps({"gpus": [{"busy": 0}] * 2}), "CUDA_VISIBLE_DEVICES": "0,1"}
    made = make_run(
        *("cluster.gpu=h100-sxm-80gb", "cluster.idle_timeout=10s", "telemetry.enabled=false", "guard.preflight=never"),
        f"code.command={json.dumps([sys.executable, '-c', spin])}",
    )
    agent = start_agent(made, found)
    assert agent.wait() == ExitCode.PREEMPTED
    why = read_stop_request(made.run, 1, "idle")
    assert why.params["what"] == "GPUs"
    assert not list((made.run.attempt(1) / "telemetry").glob("*"))
