"""`scaletrain plan --calibrate RUN`: the measured step time of a run corrects later plans on this machine."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.diagnosis.rehearsal import Item, Rehearsal
from scaletrain_cli.launch.calibration import calibration_folder, keep_measurement, measure_rehearsal
from scaletrain_cli.launch.short_jobs import RehearsalResult
from scaletrain_cli.launch.submit import CreatedRun, create_run, plan_for_engine
from scaletrain_cli.plan import make_plan
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.journal import append_line
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import load_spec
from tests.cli.command_line import SMALL, scaletrain


def run_with_steps(run_id: str, seconds: list[float]) -> CreatedRun:
    """Return a run whose first attempt has measured these step times, after five slow ones of an earlier attempt."""
    spec = load_spec(SMALL)
    made = create_run(spec, make_plan(spec), run_id)
    for step, each in enumerate([9.0] * 5 + seconds, start=1):
        attempt = 1 if step <= 5 else 2
        line = {"step": step, "loss": 5.0, "step_seconds": each, "attempt": attempt, "time": 1.7e9 + step}
        append_line(made.run.metrics, line)
    return made


def planned_step(*options: str) -> float:
    return float(scaletrain("plan", SMALL, "--json", *options).data["time"]["step"])


def test_a_measured_run_calibrates_later_plans_until_its_file_is_deleted() -> None:
    before = planned_step()
    run_with_steps("r1", [7.0, 7.0, 7.0, *(0.5 + 0.001 * number for number in range(41))])
    done = scaletrain("plan", SMALL, "--calibrate", "r1")
    assert "r1: 520 ms per step" in done.err
    assert "measured: 504 ms to 536 ms (p10 to p90), 1 run of this layout" in " ".join(done.out.split())
    found = scaletrain("plan", SMALL, "--json").data
    assert found["time"]["step"] == pytest.approx(0.52)
    assert found["calibration"]["runs"] == 1
    assert found["calibration"]["same_workload"] is True
    assert planned_step("--uncalibrated") == before
    other = scaletrain("plan", SMALL, "--json", "--set", "training.micro_batch_size=4").data
    assert other["calibration"]["same_workload"] is False
    compared = scaletrain("plan", SMALL, "--vary", "training.micro_batch_size=8,4", "--json").data
    assert compared["runs"][0]["plan"]["time"]["step"] == pytest.approx(0.52)

    unlike = scaletrain("plan", SMALL, "--calibrate", "r1", "--set", "training.precision=bf16", "--json")
    assert unlike.data["calibration"] is None
    assert "this plan is not corrected" in unlike.err
    assert "not corrected" not in done.err

    (path,) = calibration_folder().iterdir()
    stored = json.loads(path.read_text())
    assert (stored["source"], stored["steps"], stored["seconds"]) == ("r1", 41, pytest.approx(0.52))
    path.unlink()
    assert planned_step() == before


def test_a_submitted_run_records_the_calibrated_plan() -> None:
    run_with_steps("r1", [0.5] * 40)
    scaletrain("plan", SMALL, "--calibrate", "r1")
    plan = plan_for_engine(load_spec(SMALL), SMALL)
    made = create_run(load_spec(SMALL), plan, "r2")
    assert read_record(made.run).plan.time.step == pytest.approx(0.5)
    assert read_record(made.run).plan.calibration == plan.calibration
    assert plan.calibration is not None


def test_a_run_with_few_steps_is_refused_and_nothing_is_kept() -> None:
    run_with_steps("short", [0.5] * 10)
    done = scaletrain("plan", SMALL, "--calibrate", "short", code=2)
    assert "short has 7 measured steps after the first ones of its latest attempt" in done.err
    assert not calibration_folder().exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "scaletrain.measurement/v1"}', '{"schema": "other"}'])
def test_files_of_another_form_are_left_out(text: str) -> None:
    before = planned_step()
    calibration_folder().mkdir(parents=True)
    (calibration_folder() / "a.json").write_text(text)
    assert planned_step() == before


def test_a_folder_that_cannot_be_written_is_named() -> None:
    run_with_steps("r1", [0.5] * 40)
    calibration_folder().parent.mkdir(parents=True)
    Path(calibration_folder()).write_text("a file")
    done = scaletrain("plan", SMALL, "--calibrate", "r1", code=2)
    assert f"{calibration_folder()}/r1.json" in done.err


def rehearsed(*verdicts: str, step_seconds: float | None = 0.5) -> RehearsalResult:
    """Return the end of a rehearsal of the small spec with these verdicts, its step time kept."""
    spec = load_spec(SMALL)
    made = create_run(spec, make_plan(spec), "rehearsal-small", root=runs_root() / "rehearsals-1")
    items = tuple(Item(f"item-{n}", v, recorded("found")) for n, v in enumerate(verdicts))  # type: ignore[arg-type]
    step = {"step_seconds": step_seconds, "spread_seconds": 0.01, "steps": 30}
    found = Rehearsal(made.run.run_id, 1.7e9, items, {"step": step, "versions": {"torch": "2.13.0"}})
    measured = measure_rehearsal(made.run, found)
    return RehearsalResult(made.run, found, True, 1.0, None if measured is None else keep_measurement(measured))


def test_the_step_time_of_a_rehearsal_calibrates_plans() -> None:
    assert rehearsed("passed").kept is not None
    found = scaletrain("plan", SMALL, "--json").data
    assert found["time"]["step"] == pytest.approx(0.5)
    low, high = (found["calibration"][name] / found["calibration"]["factor"] for name in ("low", "high"))
    assert (low, high) == pytest.approx((1 - 0.0256, 1 + 0.0256), abs=1e-3)
    assert rehearsed("passed", step_seconds=None).kept is None


@pytest.mark.usefixtures("stand_in_engine", "forked_jobs")
@pytest.mark.parametrize(("verdict", "code"), [("passed", 0), ("failed", 3)])
def test_a_run_is_submitted_only_if_rehearsed(verdict: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.cli.rehearse.rehearse", lambda *_, **__: rehearsed("passed", verdict))
    done = scaletrain("submit", SMALL, "--rehearse", "--yes", "--json", "--run-id", "r1", code=code)
    if code:
        assert "the rehearsal failed (item-1;" in done.err
        assert not RunDir(runs_root() / "r1").path.exists()
        return
    assert done.data["rehearsal"]["passed"] is True
    assert read_record(RunDir(runs_root() / "r1")).plan.time.step == pytest.approx(0.5)
    scaletrain("status", "r1", "--wait")


@pytest.mark.parametrize("other", ["--dry-run", "--sweep=training.optimizer.lr=1e-3,1e-4"])
def test_what_cannot_be_rehearsed_is_refused(other: str) -> None:
    assert "--rehearse" in scaletrain("submit", SMALL, "--rehearse", "--yes", other, code=2).err
    assert not runs_root().exists()
