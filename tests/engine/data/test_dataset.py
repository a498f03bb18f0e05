import dataclasses
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from scaletrain_cli.data import token_files
from scaletrain_cli.data.chunk_hashes import CHUNK_BYTES, CheckedFile, CorruptDataError, HashedFile
from scaletrain_cli.data.sources.places import UnavailableError
from scaletrain_cli.data.sources.stores import PlaceError
from scaletrain_cli.data.token_files import NumberFiles, Split
from scaletrain_cli.engine.data import splits
from scaletrain_cli.engine.data.dataset import JoinedSequences, SourceSequences, open_source_dataset
from scaletrain_cli.engine.data.splits import held_back_of, sequences_held_back, sequences_validated
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.worker.failures import failure_of
from tests.engine.alone import Alone
from tests.launch.conftest import make_plan, make_spec
from tests.prepared_text import prepared_text


def edit(folder: Path, name: str, value: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def test_only_the_chunks_that_are_read_are_compared_and_each_once(tmp_path: Path) -> None:
    size = 5 * CHUNK_BYTES + 77
    content = np.frombuffer(random.Random(1).randbytes(size), dtype=np.uint8).copy()
    with HashedFile(tmp_path / "data") as file:
        for start in range(0, size, 99_991):
            file.write(content[start : start + 99_991].tobytes())
        file.finish()
    assert (tmp_path / "data").read_bytes() == content.tobytes()
    assert len((tmp_path / "data.blake2b").read_bytes()) == 6 * 16
    checked = CheckedFile(tmp_path / "data", content)
    for share in range(3):
        checked.check_share(share, 3)
    checked = CheckedFile(tmp_path / "data", content)
    checked.check(CHUNK_BYTES, 2 * CHUNK_BYTES)
    content[CHUNK_BYTES] ^= 1
    content[5 * CHUNK_BYTES] ^= 1
    checked.check(CHUNK_BYTES, 3 * CHUNK_BYTES - 1)  # the second chunk was compared before
    with pytest.raises(CorruptDataError, match=r"chunk 5 \(bytes 655360 to 655437\)"):
        checked.check(4 * CHUNK_BYTES, size)
    with pytest.raises(CorruptDataError, match="chunk 1 "):
        CheckedFile(tmp_path / "data", content).check(CHUNK_BYTES - 1, CHUNK_BYTES + 1)


def test_values_of_dataset_json_that_were_edited_are_found_in_shards_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "one two {number}"}}\n' for number in range(300)))
    data = {"source": str(tmp_path / "a.jsonl"), "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    folder = prepared_text(DataSpec.model_validate(data), tmp_path / "runs")
    info, train, _ = open_source_dataset(folder, 16)
    assert (info.documents, len(train) > 10, len(info.seal)) == (300, True, 64)
    edit(folder, "fingerprint", "0" * 64)
    with pytest.raises(CorruptDataError, match=r"dataset\.json") as caught:
        open_source_dataset(folder, 16)
    assert caught.value.exit_code == 93


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
def test_a_small_corpus_holds_back_one_batch_or_less(run: tuple[RunDir, RunRecord], train: int, expected: int) -> None:
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
        splits.open_data(*run, SimpleNamespace(rank=0, world_size=1), Alone())  # type: ignore[arg-type]
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


LENGTH = 16


def split(folder: Path, seed: int, sizes: tuple[int, ...]) -> tuple[Split, npt.NDArray[np.int64], list[int]]:
    """Return a split with shards of these sizes, all of its tokens, and the places of those that end documents."""
    draw = np.random.default_rng(seed)
    tokens: list[npt.NDArray[np.uint16]] = []
    ends: list[npt.NDArray[np.int64]] = []
    for number, size in enumerate(sizes):
        tokens.append(draw.integers(1, 60_000, size).astype(np.uint16))
        ends.append(np.flatnonzero(draw.random(size) < 0.1).astype(np.int64))
        for name, values in (("tokens", tokens[-1]), ("ends", ends[-1])):
            with HashedFile(folder / f"{seed}-{number}.{name}") as file:
                file.write(values.tobytes())
                file.finish()
    files = [
        NumberFiles([folder / f"{seed}-{n}.{name}" for n in range(len(sizes))], [len(part) for part in parts], dtype)
        for name, parts, dtype in (("tokens", tokens, "uint16"), ("ends", ends, "int64"))
    ]
    starts = np.cumsum([0, *sizes])
    places = [int(start + place) for start, part in zip(starts, ends, strict=False) for place in part]
    return Split(*files), np.concatenate(tokens).astype(np.int64), places


SIZES = (100, 0, 7, 333, 1, 64, 16, 200)


def test_sequences_and_document_ends_cross_the_boundaries_of_shards(tmp_path: Path) -> None:
    found, tokens, ends = split(tmp_path, 1, SIZES)
    whole = SourceSequences(found, LENGTH)
    assert len(whole) == (len(tokens) - 1) // LENGTH
    for sequences, first in ((whole, 0), (whole.part(3, 20), 3), (whole.part(3, 20).part(2, 5), 5)):
        order = random.Random(0).sample(range(len(sequences)), len(sequences))
        starts = [(first + index) * LENGTH for index in order]
        assert sequences.rows(order).tolist() == [tokens[start : start + LENGTH + 1].tolist() for start in starts]
        for index, start in zip(order, starts, strict=True):
            expected = [end - start for end in ends if start <= end < start + LENGTH]
            assert sequences.document_ends_within(index, index + 1).tolist() == expected
    everything = whole.document_ends_within(0, len(whole))
    assert everything.tolist() == [end for end in ends if end < len(whole) * LENGTH]


def test_several_sources_are_one_behind_the_other(tmp_path: Path) -> None:
    parts = [split(tmp_path, seed, SIZES[seed:]) for seed in (2, 3, 4)]
    sources = [SourceSequences(found, LENGTH) for found, _, _ in parts]
    joined = JoinedSequences((sources[0], sources[1].part(4, 6), sources[2]))
    assert len(joined) == len(sources[0]) + 6 + len(sources[2])
    named = [(0, n) for n in range(len(sources[0]))] + [(1, 4 + n) for n in range(6)]
    named += [(2, n) for n in range(len(sources[2]))]
    order = random.Random(1).sample(range(len(joined)), len(joined))
    assert [joined.located(index)[0] for index in order] == [named[index][0] for index in order]
    rows = joined.rows(order)
    for index, row in zip(order, rows, strict=True):
        source, place = named[index]
        assert row.tolist() == parts[source][1][place * LENGTH : (place + 1) * LENGTH + 1].tolist()
        ends = sources[source].document_ends_within(place, place + 1)
        assert joined.document_ends_within(index, index + 1).tolist() == ends.tolist()
        assert joined.document_ends_in(np.array([index])) == len(ends)
    all_ends = sum(len(joined.document_ends_within(index, index + 1)) for index in order)
    assert joined.document_ends_in(np.array(order)) == all_ends > 0


def test_threads_read_at_the_same_time_through_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_MOST_OPEN_FILES", 2)
    parts = [split(tmp_path, seed, SIZES) for seed in (5, 6)]
    joined = JoinedSequences(tuple(SourceSequences(found, LENGTH) for found, _, _ in parts))
    orders = [random.Random(seed).choices(range(len(joined)), k=400) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        read = list(threads.map(joined.rows, orders))
    tokens = np.concatenate([found[: len(joined) // 2 * LENGTH + 1] for _, found, _ in parts])
    for order, rows in zip(orders, read, strict=True):
        half = len(joined) // 2
        starts = [index * LENGTH if index < half else (index - half) * LENGTH + half * LENGTH + 1 for index in order]
        assert rows.tolist() == [tokens[start : start + LENGTH + 1].tolist() for start in starts]
    assert len(token_files.OPEN_FILES._open) <= 2


def test_sources_are_read_in_another_process_through_files_of_its_own(tmp_path: Path) -> None:
    found, _, _ = split(tmp_path, 7, SIZES)
    sequences = SourceSequences(found, LENGTH)
    before = sequences.rows([1, 2])
    assert (pickle.loads(pickle.dumps(sequences)).rows([1, 2]) == before).all()
