"""A series file returns what was added, keeps its size, and loses one segment where it is damaged."""

from __future__ import annotations

import array
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrain_cli.telemetry import series as module
from scaletrain_cli.telemetry.segments import find_segments
from scaletrain_cli.telemetry.series import LARGEST_FILE, Series, SeriesWriter, read_series

START = 1_700_000_000.0
VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)
ADDED = st.lists(
    st.tuples(
        st.sampled_from(["rank 0", "rank 1", "gpu 0", 'layer ä\n"x']),
        st.integers(0, 10**6),
        st.dictionaries(st.sampled_from(["a", "b_seconds", "ü"]), VALUES, max_size=3),
        st.booleans(),
    ),
    max_size=40,
)


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


def assert_raw(found: Series, rows: list[tuple[float, int, dict[str, float]]]) -> None:
    """Check that the series has exactly these rows, each as it was added."""
    assert list(found.times) == [time for time, _, _ in rows]
    assert list(found.steps) == [step for _, step, _ in rows]
    assert list(found.counts) == [1] * len(rows)
    for columns in (found.mean, found.lowest, found.highest):
        assert columns.keys() == {name for _, _, values in rows for name in values if not math.isnan(values[name])}
        for name, column in columns.items():
            expected = [values.get(name, math.nan) for _, _, values in rows]
            assert all(map(same, column, expected)), (name, list(column), expected)


@given(added=ADDED, newest=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_a_file_returns_the_rows_that_were_added(
    added: list[tuple[str, int, dict[str, float], bool]], newest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("series") / "x.series"
    writer = SeriesWriter(path)
    rows: dict[str, list[tuple[float, int, dict[str, float]]]] = {}
    for number, (subject, step, values, flushes) in enumerate(added):
        time = START + number / 8
        writer.add(subject, time, step, values)
        rows.setdefault(subject, []).append((time, step, values))
        if flushes:
            writer.flush()
    writer.close()
    if not added:
        assert not path.exists()
        return
    whole = read_series(path)
    assert whole.keys() == rows.keys()
    for subject, expected in rows.items():
        assert_raw(whole[subject], expected)
    for subject, found in read_series(path, newest=newest).items():
        assert list(found.times) == list(whole[subject].times)[-newest:]
        for name, column in found.mean.items():
            assert all(map(same, column, list(whole[subject].mean[name])[-newest:]))


def filled(path: Path, rows: int, largest: int, *, every: int = 20, subjects: int = 1) -> SeriesWriter:
    """Write ``rows`` rows per subject whose column ``row`` is the row's number, flushed at intervals."""
    writer, noise = SeriesWriter(path, largest_bytes=largest), random.Random(0)
    for row in range(rows):
        for subject in range(subjects):
            writer.add(f"rank {subject}", START + row, row, {"row": row, "noise": noise.random()})
        if row % every == 0:
            writer.flush()
            assert path.stat().st_size <= largest
    writer.close()
    assert path.stat().st_size <= largest
    return writer


def assert_complete(found: Series, rows: int) -> None:
    """Check that each added row is in exactly one row of the series, the older ones in coarser rows."""
    counts = list(found.counts)
    assert sum(counts) == rows
    assert counts == sorted(counts, reverse=True)
    first = 0
    for number, count in enumerate(counts):
        last = first + count - 1
        assert (found.lowest["row"][number], found.highest["row"][number]) == (first, last)
        assert found.mean["row"][number] == pytest.approx((first + last) / 2)
        assert found.steps[number] == last
        assert found.times[number] == START + last
        assert 0 <= found.lowest["noise"][number] <= found.mean["noise"][number] <= found.highest["noise"][number] <= 1
        first += count


def test_a_full_file_keeps_its_size_and_all_of_its_history(tmp_path: Path) -> None:
    path = tmp_path / "x.series"
    filled(path, 12_345, 20_000, subjects=2)
    for found in read_series(path).values():
        assert_complete(found, 12_345)
        assert {1, 10, 100} <= set(found.counts)


@pytest.mark.long
def test_a_million_rows_fit_into_the_stated_size(tmp_path: Path) -> None:
    path = tmp_path / "x.series"
    filled(path, 1_000_000, LARGEST_FILE, every=1000)
    found = read_series(path)["rank 0"]
    assert_complete(found, 1_000_000)
    assert list(found.counts).count(1) > 10_000


def test_a_torn_tail_loses_the_last_segment_only(tmp_path: Path) -> None:
    path, torn = tmp_path / "x.series", tmp_path / "torn.series"
    filled(path, 45, LARGEST_FILE, every=30, subjects=2)
    data = path.read_bytes()
    ends = [0, *(segment.end for segment in find_segments(data))]
    assert len(ends) >= 4
    whole = {end: read_bytes(torn, data[:end]) for end in ends}
    assert len(whole[ends[-1]]["rank 1"].times) == 45
    for length in range(len(data)):
        found = read_bytes(torn, data[:length])
        assert found == whole[max(end for end in ends if end <= length)]


def read_bytes(path: Path, data: bytes) -> dict[str, Series]:
    path.write_bytes(data)
    return read_series(path)


def test_a_damaged_byte_loses_one_segment_only(tmp_path: Path) -> None:
    path, damaged = tmp_path / "x.series", tmp_path / "damaged.series"
    filled(path, 41, LARGEST_FILE, every=4)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        found = read_bytes(damaged, data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        assert sum(found["rank 0"].counts) >= 41 - 4
        assert list(found["rank 0"].times) == sorted(set(found["rank 0"].times))


def test_detail_of_a_damaged_segment_is_replaced_by_coarser_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.series"
    filled(path, 400, LARGEST_FILE, every=10)
    data = path.read_bytes()
    second = [segment for segment in find_segments(data) if segment.tier == 0][1]
    found = read_bytes(path, data[: second.start] + bytes(second.end - second.start) + data[second.end :])["rank 0"]
    assert sum(found.counts) == 400
    assert sorted(set(found.counts)) == [1, 10]


@given(content=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_content_is_read_without_an_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "x.series"
    path.write_bytes(content + b"STs\x02" + content)
    assert read_series(path) == {}
    assert read_series(path, newest=3) == {}


def test_rows_of_several_values_have_weight(tmp_path: Path) -> None:
    path = tmp_path / "x.series"
    writer = SeriesWriter(path, largest_bytes=2000)
    for row in range(1500):
        writer.add("rank 0", START + row, row, {"a": row % 2}, count=1 + 2 * (row % 2), lowest={"a": -1})
        if row % 5 == 0:
            writer.flush()
    writer.close()
    found = read_series(path)["rank 0"]
    assert sum(found.counts) == 3000
    coarse = [number for number, count in enumerate(found.counts) if count >= 20]
    assert coarse
    assert {found.mean["a"][number] for number in coarse} == {0.75}
    assert set(found.lowest["a"]) == {-1.0}


def test_a_restarted_writer_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.series"
    for part in range(3):
        writer = SeriesWriter(path)
        for row in range(25):
            writer.add("rank 0", START + 100 * part + row, row, {"a": part})
        writer.close()
    found = read_series(path)["rank 0"]
    assert list(found.mean["a"]) == [0.0] * 25 + [1.0] * 25 + [2.0] * 25


def test_values_beyond_float32_and_infinite_ones_are_kept_as_far_as_they_can(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "x.series")
    values = {"big": 1e300, "small": -1e300, "infinite": math.inf, "negative": -math.inf, "absent": math.nan}
    for row in range(10):
        writer.add("rank 0", START, row, values)
    for time in (math.nan, math.inf, 1e300):
        writer.add("rank 0", time, 1, values)
    writer.close()
    found = read_series(tmp_path / "x.series")["rank 0"]
    largest = array.array("f", [3.4028234663852886e38])[0]
    assert {name: column[0] for name, column in found.mean.items()} == {
        "big": largest,
        "small": -largest,
        "infinite": math.inf,
        "negative": -math.inf,
    }
    assert len(found.times) == 10


def test_a_folder_that_cannot_be_written_loses_rows_and_no_more(tmp_path: Path) -> None:
    blocked = tmp_path / "telemetry"
    blocked.write_text("a file where the folder should be")
    writer = SeriesWriter(blocked / "x.series")
    writer.add("rank 0", START, 1, {"a": 1})
    writer.flush()
    blocked.unlink()
    writer.add("rank 0", START + 1, 2, {"a": 2})
    writer.close()
    assert list(read_series(blocked / "x.series")["rank 0"].mean["a"]) == [2.0]


def test_a_full_disk_leaves_whole_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.series"
    writer, write = SeriesWriter(path), module.os.write
    writer.add("rank 0", START, 1, {"a": 1})
    writer.flush()
    monkeypatch.setattr(module.os, "write", lambda file, data: write(file, data[:10]))
    writer.add("rank 0", START + 1, 2, {"a": 2})
    writer.flush()
    monkeypatch.undo()
    size = path.stat().st_size
    writer.add("rank 0", START + 2, 3, {"a": 3})
    writer.close()
    assert list(read_series(path)["rank 0"].mean["a"]) == [1.0, 3.0]
    assert len(list(find_segments(path.read_bytes()[:size]))) == 1


def test_the_newest_rows_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.series"
    filled(path, 30_000, LARGEST_FILE, every=100)
    opened, sizes = module.open_to_read, []

    class Counting:
        def __init__(self, file: object) -> None:
            self.file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def read(self, size: int) -> bytes:
            sizes.append(size)
            return self.file.read(size)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(module, "open_to_read", lambda path: Counting(opened(path)))
    found = read_series(path, newest=50)["rank 0"]
    assert list(found.steps) == list(range(29_950, 30_000))
    assert sum(sizes) < path.stat().st_size / 4


def test_subjects_beyond_the_limit_are_ignored(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "x.series")
    for number in range(module.MOST_SUBJECTS + 5):
        writer.add(f"layer {number}", START, 1, {f"column {column}": 1.0 for column in range(2)})
    writer.add("layer 0", START, 1, {f"column {column}": 1.0 for column in range(100)})
    writer.close()
    found = read_series(tmp_path / "x.series")
    assert len(found) == module.MOST_SUBJECTS
    assert len(found["layer 0"].mean) == module.MOST_COLUMNS
