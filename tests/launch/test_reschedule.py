"""A resume with another length or schedule: what it shows and records, and what it refuses."""

from pathlib import Path

import pytest

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.launch.replan import Resize, WasNow, new_schedule, replan
from scaletrain_cli.launch.resume import inspect_resume, resume
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec.training import learning_rate
from scaletrain_cli.ui.submission import schedule_lines
from tests.launch.conftest import MadeRun, make_spec
from tests.launch.test_resizing import Refusing, ended_run
from tests.launch.test_resume import Cluster, attempt, commit

WSD = ("training.schedule.name=wsd", "training.schedule.cooldown_steps=5")


def finished_run(*overrides: str, step: int = 20) -> MadeRun:
    """Return a run of 20 steps that has finished after ``step``."""
    made = ended_run(*overrides)
    commit(made, step)
    submit_run(made.run, made.record, Cluster())
    for name in ("resumed", *(["stopped-early"] if step < 20 else []), "finished"):
        record_event(made.run, name, step=step)
    attempt(made, 0, "done")
    return made


def refusals(made: MadeRun, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        replan(made.run, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_finished_run_continues_with_more_steps_and_records_the_change() -> None:
    made, cluster = finished_run("training.schedule.name=constant"), Cluster()
    resize = replan(made.run, ["training.steps=30"])
    report = resume(made.run, resize=resize, scheduler=cluster).report
    assert (report.checkpoint.step, read_record(made.run).spec.total_steps) == (20, 30)
    (event,) = made.events("schedule-changed")
    assert (event["step"], event["revision"], event["same_past"]) == (20, 1, True)
    assert event["changes"] == {"training.steps": {"was": 20, "now": 30}}
    assert event["total_steps"] == {"was": 20, "now": 30}
    assert event["learning_rate"]["was"] is None, "the run had ended"
    cluster.state = "queued"
    assert run_status(made.run, cluster).state == "queued"
    attempt(made, 0, "done")
    assert run_status(made.run, cluster).state == "finished"
    cluster.state = "ended"
    with pytest.raises(UsageError, match="has finished"):
        resume(made.run, scheduler=cluster)


def test_a_finished_run_whose_steps_stay_is_not_resumed_with_another_layout() -> None:
    made = finished_run()
    with pytest.raises(UsageError, match="has finished") as caught:
        resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=1"]), scheduler=Cluster())
    assert "--set training.steps=" in str(caught.value)


def test_more_steps_that_the_scheduler_rejects_leave_no_trace() -> None:
    made = finished_run()
    before = made.run.events.read_bytes()
    with pytest.raises(SchedulerError):
        resume(made.run, resize=replan(made.run, ["training.steps=30"]), scheduler=Refusing())
    assert (made.run.events.read_bytes(), read_record(made.run).revision) == (before, 0)
    assert inspect_resume(made.run, Cluster()).finished


def test_more_steps_whose_submission_was_interrupted_are_trained_by_the_next_resume() -> None:
    class Killed(Cluster):
        def submit(self, *_: object) -> str:
            raise KeyboardInterrupt

    made, cluster = finished_run(), Cluster()
    with pytest.raises(KeyboardInterrupt):
        resume(made.run, resize=replan(made.run, ["training.steps=30"]), scheduler=Killed())
    assert not inspect_resume(made.run, cluster).finished
    resume(made.run, scheduler=cluster)
    assert (read_record(made.run).spec.total_steps, cluster.submitted) == (30, 1)


def test_a_cosine_schedule_says_that_its_past_depends_on_the_length() -> None:
    made = ended_run()
    resize = replan(made.run, ["training.steps=40"])
    schedule = resize.schedule
    assert schedule.learning_rate == WasNow(
        learning_rate(11, 20, made.record.spec.training), learning_rate(11, 40, made.record.spec.training)
    )
    assert not schedule.same_past
    first, second = schedule_lines(schedule)
    assert first == "learning rate of step 11 was 0.0001265, now 0.0002474"
    assert second.startswith("the learning rates up to step 10 differ from those")


@pytest.mark.parametrize(
    ("before", "after", "step", "same"),
    [
        ((), ("training.steps=40",), 10, False),
        (("training.schedule.name=constant",), ("training.steps=40",), 20, True),
        (("training.schedule.name=constant",), (*WSD, "training.steps=25"), 20, True),
        (WSD, ("training.steps=40",), 15, True),
        (WSD, ("training.steps=40",), 16, False),  # in the cool-down of the shorter run
        (("training.schedule.name=linear",), ("training.schedule.min_lr=1e-5",), 3, False),
        (("training.schedule.name=linear",), ("training.schedule.min_lr=1e-5",), 0, True),
    ],
)
def test_the_past_is_that_of_the_new_schedule_if_its_learning_rates_are(
    before: tuple[str, ...], after: tuple[str, ...], step: int, same: bool
) -> None:
    one_step = ("training.optimizer.lr=3e-4", *before)
    assert new_schedule(make_spec(*one_step), make_spec(*one_step, *after), step).same_past is same


@pytest.mark.parametrize("steps", ["training.steps=10", "training.steps=4"])
def test_steps_that_are_trained_already_are_refused(steps: str) -> None:
    (problem,) = refusals(ended_run(), steps)
    assert "and the run has trained 10. Set more than 10;" in problem


def test_a_length_in_tokens_counts_as_steps() -> None:
    made = ended_run()
    given = ["training.steps=null", "training.tokens=960"]  # 32 in each step
    assert replan(made.run, given).spec.total_steps == 30
    (problem,) = refusals(made, "training.steps=null", "training.tokens=64")
    assert problem.startswith("--set training.tokens = 64: gives 2 steps, and the run has trained 10")


MIXED = "data.sources=[{name: a, path: python-stdlib, weight: 1}, {name: b, path: python-stdlib, %s}]"


def test_a_stage_that_begins_at_a_share_of_the_steps_must_be_given_as_a_step(tmp_path: Path) -> None:
    mixed = ("data.source=null", MIXED % "weight: 1", "data.stages=[{start: 0.75, weights: {b: 1}}]")
    made = ended_run(*mixed)
    (problem,) = refusals(made, "training.steps=40")
    assert "the stage would begin at step 31 instead of 16. Give the step: --set data.stages.0.start=16" in problem
    kept = replan(made.run, ["training.steps=40", "data.stages.0.start=16"])
    assert [stage.start for stage in kept.spec.data.stages] == [16]


def test_a_share_by_epochs_must_be_given_as_a_weight() -> None:
    made = ended_run("data.source=null", MIXED % "epochs: 1")
    (problem,) = refusals(made, "training.steps=40")
    assert "--set data.sources.1.epochs=null --set data.sources.1.weight=" in problem
    changed = replan(made.run, ["training.steps=40", "data.sources.1.epochs=null", "data.sources.1.weight=0.2"])
    assert changed.spec.total_steps == 40


def test_the_mean_of_the_last_quarter_must_not_have_begun() -> None:
    averaged = "training.averaging.name=checkpoints"
    assert replan(ended_run(averaged, name="earlier").run, ["training.steps=40"]).schedule is not None
    (problem,) = refusals(finished_run(averaged), "training.steps=40")
    assert "begins at step 16. Branch from a checkpoint before step 16" in problem


def patience(made: MadeRun, *more: str) -> Resize:
    return replan(made.run, ["training.steps=40", *more])


def test_a_run_that_stopped_early_needs_more_patience_to_continue() -> None:
    made, cluster = finished_run("training.early_stopping.patience=2", "evaluation.every=5", step=15), Cluster()
    for more in ((), ("training.early_stopping.patience=1",)):
        with pytest.raises(UsageError, match=r"stopped early.*patience=0"):
            resume(made.run, resize=patience(made, *more), scheduler=cluster)
    resume(made.run, resize=patience(made, "training.early_stopping.patience=3"), scheduler=cluster)
    assert (cluster.submitted, read_record(made.run).spec.training.early_stopping.patience) == (1, 3)


def test_before_the_first_step_nothing_of_the_past_can_change() -> None:
    made = ended_run("data.source=null", MIXED % "epochs: 1")
    for path in (*made.run.checkpoints.iterdir(), made.run.events):
        path.rename(made.run.path / f"moved-{path.name}")
    append_line(made.run.events, {"time": 0.0, "event": "submitted"})
    assert replan(made.run, ["training.steps=4"]).spec.total_steps == 4


def test_the_learning_rate_of_a_run_whose_checkpoints_are_not_visible_is_not_known() -> None:
    schedule = new_schedule(make_spec(), make_spec("training.steps=40"), None)
    assert (schedule.total_steps, schedule.learning_rate, schedule.same_past) == (WasNow(20, 40), None, None)
    assert schedule_lines(schedule) == []
    event = {"event": "schedule-changed", "changes": {"training.steps": {"was": 20, "now": 40}}, **schedule.to_json()}
    assert event_sentence(event) == "training.steps was 20, now 40"
