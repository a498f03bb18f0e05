"""training.epochs become steps before a run is planned: counted, estimated, or refused with one clear error."""

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
NOT_PREPARED = {"prepared": False, "seconds": 267e3}
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


def mixture(*shares: str, stages: str = "[]") -> str:
    """Return the setting of text of sources a, b, ... with these shares."""
    sources = ", ".join(
        f"{{name: {name}, path: {name}.txt, {share}}}" for name, share in zip("abc", shares, strict=False)
    )
    return f"data={{sources: [{sources}], stages: {stages}, tokenizer: {{vocab_size: 64}}}}"


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
        (
            (*PODS, "data.source=/d/a.jsonl"),
            {},
            None,
            "cannot see with cluster.scheduler = kubernetes. scaletrain submit counts them.*here set training.steps",
        ),
        (
            (*PODS, "cluster.kubernetes.runs={per_pod: true}"),
            {},
            "auto",
            "cannot see with cluster.scheduler = kubernetes",
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
    answers({"prepared": False, "seconds": 1.0})
    started: list[object] = []
    monkeypatch.setattr("scaletrain_cli.launch.epochs.prepare_data", lambda *given: started.append(given))
    with pytest.raises(InfeasibleError, match="divides over 1 x 3"):
        in_steps(with_epochs(2, "cluster.gpus_per_node=3"), "run.yaml", "auto")
    assert started == []


def test_settings_that_refer_to_steps_are_checked_once_epochs_are_counted() -> None:
    size = {"source": DataSize(40, 40, 320, exact=True)}
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
            in_counted_steps(spec, {"source": size["source"]._replace(exact=False)}, "run.yaml")
        assert not isinstance(unsure.value, SpecError)
        assert "about 20 steps by an estimate" in str(unsure.value.problems[0])


def test_more_steps_than_a_run_may_have_are_refused() -> None:
    with pytest.raises(SpecError) as refused:
        in_counted_steps(with_epochs(1e6), {"source": DataSize(4001, 4001, 1, exact=True)}, "run.yaml")
    assert "1,000,250,000 steps, and a run has at most 1,000,000,000" in str(refused.value.problems[0])


def test_steps_that_are_not_counted_yet_are_an_error_that_names_the_key() -> None:
    with pytest.raises(UsageError, match=r"training\.epochs = 2 is not counted in steps yet"):
        with_epochs(2).total_steps  # noqa: B018
    with pytest.raises(SpecError) as refused:
        make_spec("training.epochs=2")
    assert "exactly one of steps, tokens, samples and epochs must be set" in str(refused.value.problems[0])
    for settings, said in (
        ("code.command=[./train]", "counts data of the built-in engine"),
        (
            mixture("epochs: 1", "epochs: 6.0e+5"),
            "must not be more than 1,000,000 with those of data.sources multiplied",
        ),
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
    ended = scaletrain("submit", file, "--sweep", "training.epochs=1,2.5", "--dry-run", code=0)
    assert "training.epochs=1: 1 epoch of 40 sequences = 10 steps of 4" in ended.err
    assert "training.epochs=2.5: 2.5 epochs of 40 sequences = 25 steps of 4" in ended.err


def test_a_dry_run_estimates_and_prepares_nothing(answers: Answers, tmp_path: Path) -> None:
    answers({"prepared": False, "seconds": 1.0, "datasets": []})
    (tmp_path / "a.txt").write_text("alpha beta gamma\n" * 200)
    submission = prepare_submission(with_epochs(2, f"data.source={tmp_path}/a.txt"), dry_run=True)
    assert submission.epochs is not None
    assert str(submission.epochs).startswith("2 epochs of about ")
    (size,) = size_to_count(with_epochs(2, f"data.source={tmp_path}/a.txt"), "run.yaml", None).values()
    assert not size.exact
    assert submission.spec.total_steps == -(-2 * size.train // 4)


A, B = DataSize(600, 40, 1, exact=True), DataSize(200, 40, 1, exact=True)


@pytest.mark.parametrize(
    ("epochs", "shares", "steps", "passes"),
    [
        (2, ("epochs: 1", "epochs: 1"), 400, "a 2 times, b 2 times"),
        (3, ("epochs: 1", "epochs: 2.5"), 825, "a 3 times, b 7.5 times"),
        (2, ("weight: 1", "weight: 1"), 400, "a 1.33 times, b 4 times"),
        (0.5, ("weight: 3", "weight: 1"), 100, "a 0.5 times, b 0.5 times"),
        (2, ("weight: 1", "weight: 0"), 300, "a 2 times, b 0 times"),
        (2, ("weight: 1", "epochs: 3"), 600, "a 2 times, b 6 times"),
    ],
)
def test_an_epoch_of_several_sources_has_as_many_sequences_as_they_have(
    epochs: float, shares: tuple[str, ...], steps: int, passes: str
) -> None:
    resolved, how = in_counted_steps(with_epochs(epochs, mixture(*shares)), {"a": A, "b": B}, "run.yaml")
    assert resolved.total_steps == steps
    assert str(how).endswith(f"= {steps} steps of 4; the run reads {passes}")
    for source, share in zip(resolved.data.sources, shares, strict=True):
        if "epochs" in share:  # in the whole run
            assert source.epochs == float(share.partition(": ")[2]) * epochs


def test_an_epoch_has_the_sources_of_later_stages_and_none_that_are_held_back() -> None:
    later = with_epochs(1, mixture("weight: 1", "weight: 0", stages="[{start: 0.5, weights: {b: 1}}]"))
    assert in_counted_steps(later, {"a": A, "b": B}, "run.yaml")[0].total_steps == 200
    few = DataSize(200, 3, 1, exact=True)  # 4 sequences, a batch, are held back instead
    resolved, how = in_counted_steps(with_epochs(1, mixture("epochs: 1", "epochs: 1")), {"a": A, "b": few}, "run.yaml")
    assert resolved.total_steps == 199
    assert "1 epoch of 796 sequences = 199 steps of 4; 4 more are held back for validation; the run reads" in str(how)


def test_sources_are_counted_together_and_one_that_cannot_be_read_is_no_part_of_a_guess(
    answers: Answers, tmp_path: Path
) -> None:
    document = prepared(train_tokens=1 + 8 * 40)
    spec = with_epochs(2, mixture("epochs: 1", "epochs: 1"))
    both = [{"source": name, "folder": "d"} for name in "ab"]
    answers({**document, "datasets": both})
    assert in_steps(spec, "run.yaml")[0].total_steps == 40
    answers({**document, "prepared": False, "seconds": 1.0, "datasets": both[:1]})
    with pytest.raises(UsageError, match="cannot be counted in steps"):
        in_steps(spec, "run.yaml", None)


@pytest.mark.parametrize(
    ("packing", "epochs"),
    [("best_fit", "epochs 312 over 24 sequences of 8 tokens with 44 rows"), ("none", "epochs 312 over 24 sequences")],
)
def test_a_plan_of_steps_counts_rows_that_are_prepared(
    answers: Answers, tmp_path: Path, packing: str, epochs: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 9)
    rows = {"train_rows": 24, "validation_rows": 2, "rows_read": 48, "rows_too_long": 4, "packing": packing}
    answers(prepared(train_tokens=190, validation_tokens=9, **rows))
    file = tmp_path / "run.yaml"
    file.write_text(SPEC)
    settings = (
        *("training.objective=sft", "training.steps=1872", "training.schedule.warmup_steps=0"),
        *(f"data.source={tmp_path}/rows.jsonl", f"data.packing={packing}"),
    )
    ended = scaletrain("plan", file, *(f"--set={setting}" for setting in settings), code=0)
    assert f"{epochs}:" in " ".join(ended.out.split())
