"""training.epochs become steps before a run is planned: counted, estimated, or refused with one clear error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.api import prepare_submission
from scaletrain_cli.errors import InfeasibleError, SpecError, UsageError
from scaletrain_cli.launch import preparation
from scaletrain_cli.launch.epochs import in_counted_steps, in_steps, provisional, size_to_count
from scaletrain_cli.launch.preparation import PreparedData
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan.data_size import DataSize, data_size
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec, override_spec
from tests.cli.command_line import scaletrain
from tests.launch.conftest import SPEC, make_plan, make_spec

SLURM = ("cluster.scheduler=slurm",)
PODS = ("cluster.scheduler=kubernetes",)
IMAGES = ("model={family: resnet, hidden_sizes: [64], depths: [1]}", "data={source: /shards}")
NOT_PREPARED = {"prepared": False, "bytes": 400_000_000_000, "seconds": 267e3}
Answers = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def no_preparation() -> None:
    """Replace the fixture of this folder: these tests ask how data are prepared."""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A function that says what the engine answers about the data of a spec."""

    def answer(found: dict[str, Any]) -> None:
        monkeypatch.setattr(preparation, "run_engine_command", lambda *_, **__: found)

    return answer


def with_epochs(epochs: float, *settings: str) -> RunSpec:
    return make_spec("training.steps=null", f"training.epochs={epochs}", *settings)


def prepared(**document: Any) -> dict[str, Any]:
    """Return the engine's answer for one prepared dataset with this dataset.json below the runs root."""
    folder = runs_root() / "datasets" / "d"
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps({"validation_tokens": 999, "validation_samples": 99, **document}))
    return {"prepared": True, "bytes": 0, "datasets": [{"source": "source", "folder": "d"}]}


@pytest.mark.parametrize(
    ("epochs", "tokens", "steps", "text"),
    [
        (3, 1 + 8 * 1234, 926, "3 epochs of 1,234 sequences = 926 steps of 4"),
        (0.1, 1 + 8 * 40, 1, "0.1 epochs of 40 sequences = 1 step of 4"),
        (1, 1 + 8 * 8, 2, "1 epoch of 8 sequences = 2 steps of 4"),
        (1, 1 + 8 * 9, 3, "1 epoch of 9 sequences = 3 steps of 4"),
        (0.001, 100, 1, "0.001 epochs of 12 sequences = 1 step of 4"),
    ],
)
@pytest.mark.parametrize("prepare", ["auto", None])
def test_epochs_of_prepared_text_are_rounded_up_to_whole_steps(
    answers: Answers, epochs: float, tokens: int, steps: int, text: str, prepare: Any
) -> None:
    answers(prepared(train_tokens=tokens))
    resolved, how = in_steps(with_epochs(epochs), "run.yaml", prepare)
    assert (resolved.total_steps, resolved.training.steps, resolved.training.epochs) == (steps, steps, None)
    assert str(how) == text
    assert resolved == make_spec(f"training.steps={steps}")
    known = data_size(resolved)
    assert known is not None
    assert (known.train, known.exact) == ((tokens - 1) // 8, True)


def test_epochs_of_images_are_counted_in_their_index(answers: Answers) -> None:
    answers(prepared(train_samples=1000))
    resolved, how = in_steps(with_epochs(2, *IMAGES), "run.yaml", "auto")
    assert resolved.total_steps == 500
    assert str(how) == "2 epochs of 1,000 images = 500 steps of 4"


@pytest.mark.parametrize(
    ("settings", "answer", "prepare", "said"),
    [
        (SLURM, NOT_PREPARED, "auto", r"prepared by a job of 38 tasks.*Run scaletrain data prepare run\.yaml first"),
        (SLURM, NOT_PREPARED, "job", "as --prepare job asks for.*or set training.steps"),
        (PODS, {}, "auto", "this machine cannot see with cluster.scheduler = kubernetes. Set training.steps"),
        (
            (*PODS, "data.source=/d/a.jsonl"),
            {},
            None,
            "this machine cannot see with cluster.scheduler = kubernetes. Set training.steps",
        ),
        (("data.source=/rows.parquet",), NOT_PREPARED, None, "their size cannot be estimated on this machine. Run"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused_with_what_to_do(
    answers: Answers, settings: tuple[str, ...], answer: dict[str, Any], prepare: Any, said: str
) -> None:
    answers(answer)
    with pytest.raises(UsageError) as refused:
        in_steps(with_epochs(2, *settings), "run.yaml", prepare)
    (problem,) = refused.value.problems
    assert problem.key == "training.epochs"
    assert problem.given == "2"
    assert re.search(said, str(problem))


def test_nothing_is_prepared_for_a_run_that_does_not_fit(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    answers({"prepared": False, "bytes": 1, "seconds": 1.0})
    started: list[object] = []
    monkeypatch.setattr("scaletrain_cli.launch.epochs.prepare_data", lambda *given: started.append(given))
    with pytest.raises(InfeasibleError, match="divides over 1 x 3"):
        in_steps(with_epochs(2, "cluster.gpus_per_node=3"), "run.yaml", "auto")
    assert started == []


def test_settings_that_refer_to_steps_are_checked_once_epochs_are_counted() -> None:
    size = DataSize(40, 40, 320, exact=True)
    for setting, key in (
        ("training.schedule.warmup_steps=21", "training.schedule.warmup_steps"),
        ("training.schedule={name: wsd, warmup_steps: 11, cooldown_steps: 10}", "training.schedule.cooldown_steps"),
        ('training.trainable=[{match: "*", start_step: 21}]', "training.trainable.0.start_step"),
    ):
        spec = with_epochs(2, setting)
        with pytest.raises(SpecError, match=r"run\.yaml: training\.epochs = 2 gives 20 steps") as refused:
            in_counted_steps(spec, size, "run.yaml")
        assert [problem.key for problem in refused.value.problems] == [key]
        longer = override_spec(spec, ["training.epochs=2.1"], file="f")
        assert in_counted_steps(longer, size, "run.yaml")[0].total_steps == 21
        assert provisional(spec).total_steps >= 21
        with pytest.raises(UsageError, match="cannot be counted in steps") as unsure:
            in_counted_steps(spec, size._replace(exact=False), "run.yaml")
        assert not isinstance(unsure.value, SpecError)
        assert "about 20 steps by an estimate" in str(unsure.value.problems[0])


def test_more_steps_than_a_run_may_have_are_refused() -> None:
    with pytest.raises(SpecError) as refused:
        in_counted_steps(with_epochs(1e6), DataSize(4001, 4001, 1, exact=True), "run.yaml")
    assert "1,000,250,000 steps, and a run has at most 1,000,000,000" in str(refused.value.problems[0])


def test_steps_that_are_not_counted_yet_are_an_error_that_names_the_key() -> None:
    with pytest.raises(UsageError, match=r"training\.epochs = 2 is not counted in steps yet"):
        with_epochs(2).total_steps  # noqa: B018
    with pytest.raises(SpecError) as refused:
        make_spec("training.epochs=2")
    assert "exactly one of steps, tokens, samples and epochs must be set" in str(refused.value.problems[0])
    both = "[{name: a, path: a.jsonl, weight: 1}, {name: b, path: b.jsonl, weight: 1}]"
    for settings, said in (
        ("code.command=[./train]", "counts data of the built-in engine"),
        (f"data={{sources: {both}, tokenizer: {{vocab_size: 64}}}}", "with several data.sources"),
    ):
        with pytest.raises(SpecError) as refused:
            with_epochs(2, settings)
        assert [problem.key for problem in refused.value.problems] == ["training.epochs"]
        assert said in str(refused.value.problems[0])


def test_a_run_records_steps_and_once_how_its_epochs_were_counted(answers: Answers) -> None:
    answers(prepared(train_tokens=1 + 8 * 40))
    submission = prepare_submission(with_epochs(2), run_id="r1")
    assert str(submission.epochs) == "2 epochs of 40 sequences = 20 steps of 4"
    made = create_run(submission.spec, make_plan(submission.spec), "r1")
    for _ in range(2):
        PreparedData(epochs=submission.epochs).record(made.run)
    (event,) = [event for event in read_events(made.run) if event["event"] == "epochs-counted"]
    assert event["params"]["samples"] == 40
    assert event["text"] == str(submission.epochs)
    recorded = read_record(made.run).spec.training
    assert (recorded.steps, recorded.epochs) == (20, None)


def test_the_points_of_a_sweep_have_steps_of_their_own(answers: Answers, tmp_path: Path) -> None:
    answers(prepared(train_tokens=1 + 8 * 40))
    file = tmp_path / "run.yaml"
    file.write_text(SPEC.replace("steps: 20", "epochs: 1"))
    ended = scaletrain("submit", file, "--sweep", "training.epochs=1,2.5", "--dry-run")
    assert ended.code == 0
    assert "training.epochs=1: 1 epoch of 40 sequences = 10 steps of 4" in ended.err
    assert "training.epochs=2.5: 2.5 epochs of 40 sequences = 25 steps of 4" in ended.err


def test_a_dry_run_estimates_and_prepares_nothing(answers: Answers, tmp_path: Path) -> None:
    answers({"prepared": False, "bytes": 1, "seconds": 1.0, "datasets": []})
    (tmp_path / "a.txt").write_text("alpha beta gamma\n" * 200)
    submission = prepare_submission(with_epochs(2, f"data.source={tmp_path}/a.txt"), dry_run=True)
    assert submission.epochs is not None
    assert str(submission.epochs).startswith("2 epochs of about ")
    size = size_to_count(with_epochs(2, f"data.source={tmp_path}/a.txt"), "run.yaml", None)
    assert not size.exact
    assert submission.spec.total_steps == -(-2 * size.train // 4)
