"""A corpus with too little to validate on uses some of its training sequences, the same in every attempt and layout."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.data.sources.places import PlaceError, UnavailableError
from scaletrain_cli.engine.data import splits
from scaletrain_cli.engine.data.splits import held_back_of, sequences_held_back, sequences_validated
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker.failures import failure_of
from tests.launch.conftest import make_plan, make_spec


@pytest.fixture
def run() -> tuple[RunDir, RunRecord]:
    spec = make_spec("training.global_batch_size=16")
    made = create_run(spec, make_plan(spec), "r1")
    return made.run, in_layout(made.record, micro=2, data=2)


def in_layout(record: RunRecord, micro: int, data: int) -> RunRecord:
    layout = dataclasses.replace(record.plan.layout, micro_batch_size=micro, data_parallel=data, global_batch_size=16)
    return dataclasses.replace(record, plan=dataclasses.replace(record.plan, layout=layout))


def test_a_large_enough_validation_split_is_not_changed(run: tuple[RunDir, RunRecord]) -> None:
    assert sequences_held_back(*run, 1000, 4) == 0
    assert not [event for event in read_events(run[0]) if event["event"] == "validation-held-back"]


@pytest.mark.parametrize(("train", "expected"), [(1000, 16), (100, 5), (50, 4), (8, 4), (7, -1)])
def test_one_batch_is_held_back_or_less_from_a_small_corpus(
    run: tuple[RunDir, RunRecord], train: int, expected: int
) -> None:
    assert sequences_held_back(*run, train, 0) == expected


def test_later_attempts_hold_back_the_same_in_any_layout(run: tuple[RunDir, RunRecord]) -> None:
    folder, record = run
    assert sequences_held_back(folder, record, 1000, 3) == 16
    for micro, data in ((1, 1), (4, 4), (2, 2)):  # of some of these the split alone would be enough
        assert sequences_held_back(folder, in_layout(record, micro, data), 1000, 3) == 16
    assert len([event for event in read_events(folder) if event["event"] == "validation-held-back"]) == 1


def test_nothing_is_held_back_from_a_run_that_was_trained_on_all_of_it(run: tuple[RunDir, RunRecord]) -> None:
    folder, record = run
    assert sequences_held_back(folder, record, 1000, 4) == 0
    record_event(folder, "checkpoint", step=10)
    assert sequences_held_back(folder, in_layout(record, 4, 4), 1000, 4) == 0  # a part of a round
    assert sequences_held_back(folder, in_layout(record, 4, 4), 1000, 0) == -1
    record_event(folder, "from-scratch")
    assert sequences_held_back(folder, in_layout(record, 4, 4), 1000, 4) == 16


@pytest.mark.parametrize(("train", "validation", "expected"), [(1000, 16, 0), (1000, 15, 16), (50, 0, 2), (7, 2, 0)])
def test_what_is_held_back_of_one_source_of_several_is_the_same_in_every_layout(
    run: tuple[RunDir, RunRecord], train: int, validation: int, expected: int
) -> None:
    folder, record = run
    for micro, data in ((1, 1), (4, 4), (2, 2)):
        fitted = in_layout(record, micro, data)
        found, is_recorded = held_back_of(
            record.spec, fitted.plan.layout, [], train, validation, source="a", begun=False
        )
        assert (found, is_recorded) == (expected, False)
        assert sequences_held_back(folder, fitted, train, validation, source="a") == expected
    record_event(folder, "checkpoint", step=10)
    assert sequences_held_back(folder, in_layout(record, 4, 4), train, validation, source="a") == expected


def test_several_sources_are_validated_on_the_same_sequences_in_every_layout(run: tuple[RunDir, RunRecord]) -> None:
    _, record = run
    layouts = [in_layout(record, micro, data) for micro, data in ((1, 1), (4, 4), (2, 2))]
    wanted = 16 * record.spec.evaluation.batches
    for there, share, expected in ((10**6, 0.3, round(0.3 * wanted)), (10**6, 0.0, 16), (7, 0.3, 7)):
        assert {sequences_validated(each, there, share) for each in layouts} == {expected}
    assert [sequences_validated(each, 21, None) for each in layouts] == [21, 16, 20]
    assert [sequences_validated(each, 3, None) for each in layouts] == [3, 3, 3]


class RankZero:
    """The consensus of one rank."""

    def follow_rank_zero(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnavailableError(Reason("remote.not-found", {"path": "s3://b/x"})), ExitCode.CRASHED),
        (PlaceError(Reason("remote.not-found", {"path": "s3://b/x"})), ExitCode.USAGE),
    ],
)
def test_an_outage_of_a_store_at_the_start_may_be_tried_again(
    run: tuple[RunDir, RunRecord], monkeypatch: pytest.MonkeyPatch, error: ScaletrainError, code: ExitCode
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(splits, "find_datasets", fail)
    with pytest.raises(ScaletrainError, match="s3://b/x does not exist") as raised:
        splits.open_data(*run, SimpleNamespace(rank=0, world_size=1), RankZero())  # type: ignore[arg-type]
    assert raised.value.exit_code == code
    assert failure_of(raised.value, 0).reason == ("crash" if code == ExitCode.CRASHED else "usage")


def test_ranks_never_prepare_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words and others\n" * 200)
    sizes = ("data.tokenizer.vocab_size=300", "model.vocab_size=300")
    given = (f"data.source={text}", *sizes)
    made = create_run(make_spec(*given), make_plan(make_spec(*given)), "here").run
    with pytest.raises(UsageError, match=rf"{text} is not prepared below .*scaletrain resume here"):
        splits._folders(make_spec(*given), made)
    rows = make_spec(f"data.source={tmp_path}/rows.jsonl", "training.objective=sft", *sizes)
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n')
    with pytest.raises(UsageError, match="is not prepared"):
        splits._folders(rows, made)
    pods = make_spec(*given, "cluster.scheduler=kubernetes", "cluster.kubernetes={image: a/b:1, runs: {claim: c}}")
    with pytest.raises(UsageError, match="is not prepared"):
        splits._folders(pods, made)
