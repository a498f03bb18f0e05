"""Sequences of several shards and several sources against one plain array of their tokens."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from scaletrain_cli.data import token_files
from scaletrain_cli.data.chunk_hashes import HashedFile
from scaletrain_cli.data.token_files import NumberFiles, Split
from scaletrain_cli.engine.data.sources import JoinedSequences, SourceSequences

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
    assert [joined.source_of(index) for index in order] == [named[index][0] for index in order]
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
