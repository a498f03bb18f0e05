"""Sweeps: runs named after their values, limited in number, submitted completely or not at all."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.backends.slurm.backend import SlurmBackend
from scaletrain_cli.launch.backends.slurm.script import job_script
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.launch.sweep import Point, point_ids, submit_sweep
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.paths import RunDir, list_runs, read_sweep_place, runs_root
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.spec.source import variants
from scaletrain_cli.ui.tables import show_cluster
from tests.cli.command_line import SMALL, scaletrain
from tests.launch.backends.slurm.test_script import Recorded
from tests.launch.conftest import ENGINE, MakeRun, make_plan, make_spec
from tests.launch.test_submit import CountingScheduler
from tests.waiting import wait_until


class Queue(CountingScheduler):
    """A back end that accepts jobs up to a limit; a cancelled job is removed."""

    def __init__(self, room: int = 100, refusal: SchedulerError | None = None) -> None:
        super().__init__()
        self.room, self.refusal = room, refusal or SchedulerError("the queue is full.")
        self.jobs: dict[str, str] = {}
        self.cancelled: list[str] = []

    def submit(self, run: RunDir, record: RunRecord) -> str:
        if len(self.jobs) >= self.room:
            raise self.refusal
        self.jobs[run.run_id] = f"job-{len(self.jobs) + 1}"
        return self.jobs[run.run_id]

    def job(self, run: RunDir, record: RunRecord) -> Job:
        return Job(self.jobs.get(run.run_id, ""), "queued" if run.run_id in self.jobs else "ended")

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        self.cancelled.append(run.run_id)
        del self.jobs[run.run_id]


def points(backend: Backend, *seeds: int) -> list[Point]:
    overrides = [(f"training.seed={seed}",) for seed in seeds]
    specs = [make_spec(*one) for one in overrides]
    names = point_ids("s", overrides)
    return [
        Point(spec, make_plan(spec), backend, run_id=name, overrides=one)
        for name, one, spec in zip(names, overrides, specs, strict=True)
    ]


def test_every_combination_is_a_run_named_after_its_values() -> None:
    found = variants(["training.optimizer.lr=1e-4,3e-4", "training.seed=1,2"], "--sweep")
    assert point_ids("s", found) == ["s-lr-1e-4_seed-1", "s-lr-1e-4_seed-2", "s-lr-3e-4_seed-1", "s-lr-3e-4_seed-2"]


@given(st.lists(st.tuples(st.text(max_size=40).map(lambda text: f"a.b={text}")), min_size=2, max_size=5, unique=True))
def test_any_values_make_names_that_are_unique_and_safe(found: list[tuple[str, ...]]) -> None:
    names = point_ids("s", found)
    assert len(set(names)) == len(found)
    assert all(len(name) <= 100 and set(name) <= set("-._") | set(map(chr, range(48, 123))) for name in names)


def test_a_limit_makes_chains_of_runs() -> None:
    queue = Queue()
    done = submit_sweep("s", points(queue, 1, 2, 3, 4, 5), cap=2)
    places = [read_sweep_place(one.run) for one in done]
    assert [place and place.after for place in places] == [None, None, "s-seed-1", "s-seed-2", "s-seed-3"]
    assert [(place.number, place.points, place.sweep) for place in places if place][::4] == [(1, 5, "s"), (5, 5, "s")]
    assert list(queue.jobs) == [one.run.run_id for one in done]


def test_a_partly_rejected_sweep_leaves_nothing_and_can_be_submitted_again() -> None:
    queue = Queue(room=2)
    with pytest.raises(SchedulerError, match=r"s-seed-3 \(training\.seed=3\) could not be submitted") as caught:
        submit_sweep("s", points(queue, 1, 2, 3, 4), cap=4)
    why = {"run": "s-seed-3", "overrides": ["training.seed=3"], "cause": recorded("the queue is full")}
    assert caught.value.reason == Reason("launch.sweep-not-submitted", why)
    assert queue.jobs == {}
    assert queue.cancelled == ["s-seed-2", "s-seed-1"]  # the last first: none may start because of it
    assert list(runs_root().iterdir()) == []
    queue.room = 100
    assert all(one.created for one in submit_sweep("s", points(queue, 1, 2, 3, 4), cap=4))


def test_a_run_without_an_answer_is_kept_because_its_job_may_exist() -> None:
    queue = Queue(room=1, refusal=SchedulerSilentError("no answer."))
    with pytest.raises(SchedulerSilentError, match="Check it with `scaletrain status s-seed-2`"):
        submit_sweep("s", points(queue, 1, 2), cap=2)
    assert [run.run_id for run in list_runs()] == ["s-seed-2"]


def test_a_submitted_run_that_cannot_be_cancelled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(room=1)

    def refuse(run: RunDir, record: RunRecord) -> None:
        raise SchedulerError("no.")

    monkeypatch.setattr(queue, "cancel", refuse)
    with pytest.raises(SchedulerError, match="could not be cancelled again: s-seed-1"):
        submit_sweep("s", points(queue, 1, 2), cap=2)


def test_the_same_sweep_under_the_same_id_is_submitted_once() -> None:
    queue = Queue()
    submit_sweep("s", points(queue, 1, 2), cap=2)
    again = submit_sweep("s", points(queue, 1, 2), cap=2)
    assert [one.created for one in again] == [False, False]
    assert len(queue.jobs) == 2


def test_a_run_of_an_earlier_submission_is_not_cancelled() -> None:
    queue = Queue()
    submit_sweep("s", points(queue, 1), cap=1)
    queue.room = 1
    with pytest.raises(SchedulerError):
        submit_sweep("s", points(queue, 1, 2), cap=2)
    assert list(queue.jobs) == ["s-seed-1"]
    assert [run.run_id for run in list_runs()] == ["s-seed-1"]


def test_a_point_that_lost_its_place_in_a_crash_gets_it_from_the_next_submission() -> None:
    first, second = points(Queue(), 1, 2)
    create_run(second.spec, second.plan, second.run_id)
    done = submit_sweep("s", [first, second], cap=1)
    place = read_sweep_place(done[1].run)
    assert (place.number, place.after) == (2, first.run_id)


def test_a_run_with_the_name_of_a_point_that_is_being_submitted_is_not_changed() -> None:
    (mine,) = points(Queue(), 1)
    other = make_spec("training.seed=7")
    theirs = create_run(other, make_plan(other), mine.run_id).run
    with pytest.raises(UsageError, match=r"exists with another spec.*training\.seed was 7, now 1"):
        submit_sweep("s", [mine], cap=1)
    assert theirs.record.exists()


def test_on_this_machine_one_runs_at_a_time_and_gpus_are_not_shared() -> None:
    local, slurm = make_spec().cluster, make_spec("cluster.scheduler=slurm").cluster
    here, there = LocalBackend(), SlurmBackend()
    assert (here.max_concurrent(local, None, 4), here.max_concurrent(local, 3, 4)) == (1, 3)
    assert (there.max_concurrent(slurm, None, 4), there.max_concurrent(slurm, 9, 4)) == (4, 4)
    with pytest.raises(UsageError, match="would share them"):
        here.max_concurrent(make_spec("cluster.gpu=h100-sxm-80gb").cluster, 2, 4)


def test_a_back_end_that_starts_all_runs_at_once_refuses_a_limit() -> None:
    cluster = make_spec().cluster
    assert Queue().max_concurrent(cluster, None, 3) == Queue().max_concurrent(cluster, 3, 3) == 3
    with pytest.raises(UsageError, match="--max-concurrent 2 is not implemented for this machine"):
        Queue().max_concurrent(cluster, 2, 3)


def test_a_cluster_view_without_data_shows_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    show_cluster(Queue().cluster_view(make_spec().cluster))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["this machine  local", "this machine reports nothing about its nodes"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(tmp_path)
    monkeypatch.setenv("PATH", f"{recorded.bin}:{os.environ['PATH']}")
    return recorded


def calls_of(recorded: Recorded, program: str) -> list[list[str]]:
    return [arguments for name, arguments, _ in recorded.calls if name == program and "--test-only" not in arguments]


def test_on_slurm_the_limit_is_a_chain_of_dependencies(slurm: Recorded) -> None:
    sweep = ("--sweep", "training.optimizer.lr=1e-3,2e-3,3e-3", "--max-concurrent", "2")
    ended = scaletrain("submit", SMALL, "--yes", "--json", "--run-id", "s", "--set", "cluster.scheduler=slurm", *sweep)
    assert ended.code == 0, ended.err
    assert [run["run_id"] for run in ended.data["runs"]] == ["s-lr-1e-3", "s-lr-2e-3", "s-lr-3e-3"]
    waits = [[word for word in call if word.startswith("--dependency")] for call in calls_of(slurm, "sbatch")]
    assert waits == [[], [], ["--dependency=afterany:4711"]]
    assert read_record(RunDir(runs_root() / "s-lr-3e-3")).spec.training.optimizer.lr == 3e-3


def test_a_sweep_of_one_value_is_a_single_submission(slurm: Recorded) -> None:
    on_slurm = ("--yes", "--set", "cluster.scheduler=slurm")
    scaletrain("submit", SMALL, *on_slurm, "--run-id", "plain", "--set", "training.seed=7")
    ended = scaletrain("submit", SMALL, *on_slurm, "--run-id", "swept", "--sweep", "training.seed=7")
    assert (ended.code, ended.out) == (0, "swept\n")
    plain, swept = (read_record(RunDir(runs_root() / name)) for name in ("plain", "swept"))
    assert (swept.spec, swept.plan) == (plain.spec, plain.plan)
    scripts = [job_script(one.spec, "r", Path("/r")) for one in (plain, swept)]
    assert scripts[0] == scripts[1]
    first, second = calls_of(slurm, "sbatch")
    assert [word for word in first if "comment" not in word] == [word for word in second if "comment" not in word]
    assert read_sweep_place(RunDir(runs_root() / "swept")) is None


def test_one_infeasible_point_keeps_the_whole_sweep_from_the_queue(slurm: Recorded) -> None:
    for sweep, code, said in (
        ("training.optimizer.lr=1e-3,fast", 2, "--sweep training.optimizer.lr"),
        ("cluster.scheduler=slurm,local", 2, "all runs of a sweep use one scheduler"),
        ("training.optimizer.state_dtype=fp32,bf16", 3, "training.optimizer.state_dtype=bf16: "),
    ):
        ended = scaletrain("submit", SMALL, "--yes", "--set", "cluster.scheduler=slurm", "--sweep", sweep)
        assert (ended.code, said in ended.err) == (code, True), ended.err
    assert not runs_root().exists()
    assert not (slurm.bin.parent / "record").exists()


def test_a_dry_run_of_a_sweep_prints_every_script(slurm: Recorded) -> None:
    options = ("--dry-run", "--run-id", "s", "--set", "cluster.scheduler=slurm")
    ended = scaletrain("submit", SMALL, *options, "--sweep", "training.seed=1,2")
    assert ended.out.count("#!/bin/bash") == 2
    assert "# s-seed-2: training.seed=2" in ended.out
    assert not runs_root().exists()


def test_the_list_shows_which_points_of_a_sweep_runs_are(make_run: MakeRun) -> None:
    submit_sweep("s", points(Queue(), 1, 2), cap=2)
    make_run(run_id="single")
    rows = {row.split()[0]: row for row in scaletrain("list").out.splitlines()}
    assert rows["run"].endswith("of sweep")
    assert (rows["s-seed-2"].endswith("2 of 2"), rows["single"].endswith("of 2")) == (True, False)
    listed = {row["run_id"]: row["sweep"] for row in scaletrain("list", "--json").data["runs"]}
    assert (listed["s-seed-1"]["sweep"], listed["single"]) == ("s", None)


def test_a_limit_without_a_sweep_is_an_error() -> None:
    assert scaletrain("submit", SMALL, "--max-concurrent", "2").code == 2


def test_on_this_machine_a_run_waits_for_the_one_before_it(forked_jobs: None) -> None:
    scheduler = LocalBackend(engine=ENGINE)
    fake = json.dumps({"stay": {"1:*": 1}})
    specs = [make_spec(f"training.seed={seed}").model_copy(update={"env": {"FAKE": fake}}) for seed in (1, 2)]
    both = [
        Point(spec, make_plan(spec), scheduler, run_id=f"s-{index}", overrides=("x=1",))
        for index, spec in enumerate(specs)
    ]
    first, second = submit_sweep("s", both, cap=1)
    waiting = scheduler.job(second.run, read_record(second.run))
    assert (waiting.state, waiting.detail) == ("queued", "waits for s-0, the run before it in its sweep")
    for one in (first, second):
        record = read_record(one.run)
        (one.run.path / "go").touch()
        wait_until(lambda run=one.run, record=record: scheduler.job(run, record).state == "ended", "it has ended")

    (before,), (after,) = (read_attempts(one.run) for one in (first, second))
    assert before.ended <= after.started


def test_a_waiting_run_of_a_sweep_that_fails_on_this_machine_is_removed_once_its_supervisor_has_ended(
    forked_jobs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = LocalBackend(engine=ENGINE)
    three = [
        replace(point, spec=point.spec.model_copy(update={"env": {"FAKE": "{}"}}))
        for point in points(scheduler, 1, 2, 3)
    ]
    start = LocalBackend.submit

    def submit(self: LocalBackend, run: RunDir, record: RunRecord) -> str:
        if run.run_id == "s-seed-3":
            raise SchedulerError("no memory for a process.")
        return start(self, run, record)

    monkeypatch.setattr(LocalBackend, "submit", submit)
    with pytest.raises(SchedulerError, match="none is submitted: no memory"):
        submit_sweep("s", three, cap=1)
    assert [run.run_id for run in list_runs()] == ["s-seed-1"], "it has begun"
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    assert [one.created for one in submit_sweep("s", three, cap=1)] == [False, True, True]
