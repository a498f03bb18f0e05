"""Times and costs of a run, from its attempts, its ledger and the plan of each revision."""

import dataclasses
import math
from pathlib import Path

import pytest

from scaletrain_cli.diagnosis.case import read_case
from scaletrain_cli.diagnosis.speed import RunFigures, run_figures
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan.result import MeasuredError, Range, Ranges, TrainingStage
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.goodput import CATEGORIES, Ledger, write_ledger
from scaletrain_cli.rundir.journal import append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, add_revision, read_record, read_spec_lines
from scaletrain_cli.ui.status import cost_text, step_text, times_text
from scaletrain_cli.worker.trackers import run_figures as figures_of_trackers
from tests.diagnosis.histories import planned

PRICE = ("cluster.price_per_gpu_hour=3.0",)


@pytest.fixture
def made(tmp_path: Path) -> tuple[RunDir, RunRecord]:
    spec, plan = planned(overrides=PRICE)
    created = create_run(spec, plan, "r", root=tmp_path)
    return created.run, created.record


def attempt(run: RunDir, number: int, started: float, ended: float | None) -> None:
    (run.attempt(number)).mkdir(parents=True)
    write_document(run.attempt(number) / "attempt.json", {"started": started, "ended": ended})


def log(run: RunDir, steps: range, seconds: float, number: int = 1) -> None:
    lines = [{"step": step, "loss": 3.0, "step_seconds": seconds, "data_wait": 0, "attempt": number} for step in steps]
    append_lines(run.metrics, lines)


def figures(made: tuple[RunDir, RunRecord], step: int, *, is_over: bool = False, now: float = 10_000.0) -> RunFigures:
    run, record = made
    return run_figures(run, record, read_case(run, record), step=step, is_over=is_over, now=now)


def test_a_run_that_has_not_begun_costs_nothing_and_has_no_rate(made: tuple[RunDir, RunRecord]) -> None:
    found = figures(made, 0)
    assert (found.eta_seconds, found.cost_so_far_usd, found.cost_to_come_usd) == (None, 0.0, None)
    assert found.measured_step_seconds is None
    assert found.planned_step_seconds == made[1].plan.time.step
    assert (times_text(found), cost_text(found)) == ("", "$0.00 so far")


def test_the_range_of_the_plan_is_beside_the_planned_step(made: tuple[RunDir, RunRecord]) -> None:
    run, record = made
    planned_seconds = record.plan.time.step
    error = MeasuredError(True, "deepspeed", "one node", "hopper")
    ranges = Ranges(error, error, step_seconds=Range(0.8 * planned_seconds, 1.5 * planned_seconds))
    stage = TrainingStage(0, 10, 1, 1, 2 * planned_seconds)
    plan = dataclasses.replace(record.plan, ranges=ranges)
    for stages, times in (((), 1), ((stage,), 2)):
        staged = dataclasses.replace(record, plan=dataclasses.replace(plan, training_stages=stages))
        found = figures((run, staged), 0)
        assert found.planned_step_range is not None
        assert found.planned_step_range.p10 == pytest.approx(times * 0.8 * planned_seconds)
        assert found.to_json()["step_seconds"]["planned_p90"] == pytest.approx(times * 1.5 * planned_seconds)
    measured = dataclasses.replace(
        found, measured_step_seconds=2.0, planned_step_seconds=1.6, planned_step_range=Range(1.28, 2.4)
    )
    assert step_text(measured) == "2 s per step, planned 1.60 s (x1.25; p10 to p90 1.28 s to 2.40 s)"
    unknown = dataclasses.replace(measured, planned_step_range=None)
    assert step_text(unknown) == "2 s per step, planned 1.60 s (x1.25)"
    assert unknown.to_json()["step_seconds"]["planned_p10"] is None


def test_the_time_left_includes_saves_and_evaluations(made: tuple[RunDir, RunRecord]) -> None:
    run, _ = made
    attempt(run, 1, 1000.0, None)
    log(run, range(1, 501), 2.0)
    spent = dict.fromkeys(CATEGORIES, 0.0)
    spent |= {"save": 50.0, "evaluation": 50.0}
    write_ledger(run, Ledger(1, 1000.0, 2000.0, False, 500, spent))
    found = figures(made, 500, now=4600.0)
    assert found.measured_step_seconds == 2.0
    assert found.eta_seconds == pytest.approx(1500 * (2.0 + 0.2))
    assert found.cost_so_far_usd == pytest.approx(2 * 3.0 * 3600 / 3600)  # two GPUs, an hour
    assert found.cost_to_come_usd == pytest.approx(2 * 3.0 * 3300 / 3600)
    assert times_text(found).startswith("55 min left; 2 s per step, planned ")
    assert cost_text(found) == "$6.00 so far, $5.50 to come"


def test_a_run_that_has_ended_has_no_time_left(made: tuple[RunDir, RunRecord]) -> None:
    run, _ = made
    attempt(run, 1, 1000.0, 2800.0)
    log(run, range(1, 101), 2.0)
    ended = figures(made, 100, is_over=True)
    assert (ended.eta_seconds, ended.cost_to_come_usd) == (None, None)
    assert ended.cost_so_far_usd == pytest.approx(3.0)
    finished = figures(made, 2000, is_over=True)
    assert (finished.eta_seconds, finished.cost_to_come_usd) == (0.0, 0.0)


def test_the_end_of_an_attempt_that_nobody_recorded_is_its_last_sign(made: tuple[RunDir, RunRecord]) -> None:
    run, _ = made
    attempt(run, 1, 1000.0, None)
    write_ledger(run, Ledger(1, 1000.0, 1900.0, False, 10, dict.fromkeys(CATEGORIES, 0.0)))
    assert figures(made, 10, is_over=True).cost_so_far_usd == pytest.approx(2 * 3.0 * 900 / 3600)
    assert figures(made, 10, now=2800.0).cost_so_far_usd == pytest.approx(2 * 3.0 * 1800 / 3600)


def test_only_the_newest_attempt_lasts_until_now(made: tuple[RunDir, RunRecord]) -> None:
    """An attempt whose supervisor was killed has no recorded end, and does not cost what the next ones cost."""
    run, _ = made
    attempt(run, 1, 1000.0, None)
    write_ledger(run, Ledger(1, 1000.0, 1900.0, False, 10, dict.fromkeys(CATEGORIES, 0.0)))
    attempt(run, 2, 8200.0, None)
    assert figures(made, 10, now=10_000.0).cost_so_far_usd == pytest.approx(2 * 3.0 * (900 + 1800) / 3600)


def test_each_attempt_costs_the_gpus_and_the_price_of_its_revision(made: tuple[RunDir, RunRecord]) -> None:
    run, record = made
    spec, plan = planned(overrides=(*PRICE, "cluster.nodes=2", "cluster.price_per_gpu_hour=1.0"))
    record_event(run, "submitted", first_attempt=1, revision=0)
    attempt(run, 1, 0.0, 3600.0)
    revised = add_revision(run, record, spec, plan, ["cluster.nodes=2"])
    record_event(run, "submitted", first_attempt=2, revision=1)
    attempt(run, 2, 7200.0, 10_800.0)
    assert figures((run, revised), 10).cost_so_far_usd == pytest.approx(2 * 3.0 + 4 * 1.0)
    assert read_record(run).revision == 1
    assert read_spec_lines(run)["cluster.nodes"] == "--set"


def test_without_a_price_there_is_no_cost(tmp_path: Path) -> None:
    spec, plan = planned()
    cost = dataclasses.replace(plan.cost, price_per_gpu_hour=None)
    made = create_run(spec, dataclasses.replace(plan, cost=cost), "r", root=tmp_path)
    attempt(made.run, 1, 0.0, 3600.0)
    found = figures((made.run, made.record), 10)
    assert (found.cost_so_far_usd, found.cost_to_come_usd, cost_text(found)) == (None, None, "")


def test_the_first_step_of_an_attempt_does_not_count(made: tuple[RunDir, RunRecord]) -> None:
    run, _ = made
    for number, first in enumerate(range(1, 60, 10), 1):
        log(run, range(first, first + 1), 90.0, number)
        log(run, range(first + 1, first + 10), 1.0, number)
    case = read_case(*made)
    assert figures(made, 60).measured_step_seconds == 1.0
    assert max(case.history.column("step_seconds")) == 90.0
    assert not math.isnan(case.history.column("attempt")[0])


def test_trackers_get_the_figures_of_status(made: tuple[RunDir, RunRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a rollback, a restart with a slow first step, a change of the price, and a save that blocks."""
    run, record = made
    spec, plan = planned(overrides=("cluster.price_per_gpu_hour=1.0",))
    record_event(run, "submitted", first_attempt=1, revision=0)
    attempt(run, 1, 0.0, 3600.0)
    log(run, range(1, 131), 2.0)
    record_event(run, "rolled-back", from_step=130, to_step=100, skip=[1], lost_steps=30, cause="spike", retry=1)
    log(run, range(101, 121), 3.0)
    record = add_revision(run, record, spec, plan, ["cluster.price_per_gpu_hour=1.0"])
    record_event(run, "submitted", first_attempt=2, revision=1)
    attempt(run, 2, 7200.0, None)
    log(run, range(121, 122), 90.0, 2)
    log(run, range(122, 221), 4.0, 2)
    append_lines(run.metrics, [{"step": 220, "validation_loss": 3.0}])
    write_ledger(run, Ledger(2, 7200.0, 9000.0, False, 100, {**dict.fromkeys(CATEGORIES, 0.0), "save": 30.0}))
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    status, tracked = figures((run, record), 220), figures_of_trackers(run, record)
    assert status.measured_step_seconds == 3.0
    assert tracked.remaining_seconds == status.eta_seconds == pytest.approx(1780 * 3.3)
    assert tracked.cost_usd == status.cost_so_far_usd == pytest.approx(2 * 3.0 + 2 * 1.0 * 2800 / 3600)
    assert tracked.cost_to_come_usd == status.cost_to_come_usd
    assert tracked.planned_step_seconds == status.planned_step_seconds


def test_the_lines_of_the_spec_are_kept_with_the_run(made: tuple[RunDir, RunRecord]) -> None:
    lines = read_spec_lines(made[0])
    assert lines["training.optimizer.lr"] == "run.yaml:10"
    assert lines["cluster.price_per_gpu_hour"] == "--set"
