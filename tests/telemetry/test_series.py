"""A series file returns what was added, keeps its size, and loses one line where it is damaged."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import operator
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrain_cli.telemetry import series as module
from scaletrain_cli.telemetry.series import LARGEST_FILE, Series, SeriesWriter, read_series
from tests.counting import bytes_read_by

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
    return found == float(f"{expected:.7g}") or (math.isnan(found) and math.isnan(expected))


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
    path = tmp_path_factory.mktemp("series") / "x.jsonl.gz"
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


def filled(path: Path, rows: int, largest: int, *, every: int = 20, subjects: int = 1) -> None:
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


def assert_complete(found: Series, rows: int) -> None:
    """Check that each added row is in exactly one row of the series, the older ones in coarser rows."""
    counts = list(found.counts)
    assert sum(counts) == rows
    assert sum(later > before for before, later in itertools.pairwise(counts)) <= len(counts) / 10
    first = 0
    for number, count in enumerate(counts):
        last = first + count - 1
        assert (found.lowest["row"][number], found.highest["row"][number]) == (first, last)
        assert found.mean["row"][number] == pytest.approx((first + last) / 2, rel=1e-5)
        assert found.steps[number] == last
        assert found.times[number] == START + last
        assert 0 <= found.lowest["noise"][number] <= found.mean["noise"][number] <= found.highest["noise"][number] <= 1
        first += count


def test_a_full_file_keeps_its_size_and_all_of_its_history(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 12_345, 20_000, subjects=2)
    for found in read_series(path).values():
        assert_complete(found, 12_345)
        assert min(found.counts) == 1
        assert max(found.counts) >= 100


@pytest.mark.long
def test_a_million_rows_fit_into_the_stated_size(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 1_000_000, LARGEST_FILE, every=1000)
    found = read_series(path)["rank 0"]
    assert_complete(found, 1_000_000)
    assert list(found.counts).count(1) > 10_000


def test_a_torn_tail_loses_the_last_line_only(tmp_path: Path) -> None:
    path, torn = tmp_path / "x.jsonl.gz", tmp_path / "torn.jsonl.gz"
    ends = [0]
    for row in range(4):
        writer = SeriesWriter(path)
        for subject in range(2):
            writer.add(f"rank {subject}", START + row, row, {"row": row})
        writer.close()
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    whole = {end: read_bytes(torn, data[:end]) for end in ends}
    assert list(whole[ends[-1]]["rank 1"].steps) == [0, 1, 2, 3]
    for length in range(len(data)):
        found = read_bytes(torn, data[:length])
        assert found == whole[max(end for end in ends if end <= length)]


def test_rows_after_a_torn_tail_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 2, LARGEST_FILE, every=1)
    path.write_bytes(path.read_bytes()[:-5])
    filled(path, 1, LARGEST_FILE)
    assert list(read_series(path)["rank 0"].steps) == [0, 0]


def test_a_file_is_json_lines_for_programs_that_read_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 3, LARGEST_FILE, every=1)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [line["subjects"]["rank 0"][1] for line in lines] == [[0], [1], [2]]
    assert {(line["level"], *line["columns"]) for line in lines} == {(0, "noise", "row")}


def read_bytes(path: Path, data: bytes) -> dict[str, Series]:
    path.write_bytes(data)
    return read_series(path)


def test_a_damaged_byte_loses_one_line_only(tmp_path: Path) -> None:
    path, damaged = tmp_path / "x.jsonl.gz", tmp_path / "damaged.series"
    filled(path, 41, LARGEST_FILE, every=4)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        found = read_bytes(damaged, data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        assert sum(found["rank 0"].counts) >= 41 - 4
        assert list(found["rank 0"].times) == sorted(set(found["rank 0"].times))


@given(content=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_content_is_read_without_an_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "x.jsonl.gz"
    for data in (content + gzip.compress(content, mtime=0), gzip.compress(b'{"subjects":' + content, mtime=0)):
        path.write_bytes(data)
        assert read_series(path) == {}
        assert read_series(path, newest=3) == {}


def test_a_line_of_unknown_content_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 5, LARGEST_FILE)
    others = ([], {}, {"subjects": []}, {"columns": ["a"], "subjects": {"rank 0": [[1], [1], [1], ["a"]]}})
    for line in (*map(json.dumps, others), "[" * 100_000, '{"subjects":{"a":3}}'):
        with path.open("ab") as file:
            file.write(gzip.compress(line.encode(), mtime=0))
    assert read_series(path).keys() == {"rank 0"}
    filled(path, 5, LARGEST_FILE)
    assert list(read_series(path)["rank 0"].steps) == [0, 1, 2, 3, 4] * 2


def test_rows_of_several_values_have_weight(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
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
    assert all(found.mean["a"][number] == pytest.approx(0.75, abs=0.02) for number in coarse)
    assert sum(map(operator.mul, found.mean["a"], found.counts)) == pytest.approx(0.75 * 3000, rel=1e-5)
    assert set(found.lowest["a"]) == {-1.0}


def test_a_restarted_writer_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    for part in range(3):
        writer = SeriesWriter(path)
        for row in range(25):
            writer.add("rank 0", START + 100 * part + row, row, {"a": part})
        writer.close()
    found = read_series(path)["rank 0"]
    assert list(found.mean["a"]) == [0.0] * 25 + [1.0] * 25 + [2.0] * 25


def test_very_large_and_infinite_values_are_kept(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "x.jsonl.gz")
    values = {"big": 1e300, "small": -1e300, "infinite": math.inf, "negative": -math.inf, "absent": math.nan}
    for row in range(10):
        writer.add("rank 0", START, row, values)
    for time in (math.nan, math.inf, 1e300):
        writer.add("rank 0", time, 1, values)
    writer.close()
    found = read_series(tmp_path / "x.jsonl.gz")["rank 0"]
    assert {name: column[0] for name, column in found.mean.items()} == {
        "big": 1e300,
        "small": -1e300,
        "infinite": math.inf,
        "negative": -math.inf,
    }
    assert len(found.times) == 10


def test_a_folder_that_cannot_be_written_loses_rows_and_no_more(tmp_path: Path) -> None:
    blocked = tmp_path / "telemetry"
    blocked.write_text("a file where the folder should be")
    writer = SeriesWriter(blocked / "x.jsonl.gz")
    writer.add("rank 0", START, 1, {"a": 1})
    writer.flush()
    blocked.unlink()
    writer.add("rank 0", START + 1, 2, {"a": 2})
    writer.close()
    assert list(read_series(blocked / "x.jsonl.gz")["rank 0"].mean["a"]) == [2.0]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl.gz"
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
    assert len(gzip.decompress(path.read_bytes()[:size]).splitlines()) == 1


def test_the_newest_rows_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    filled(path, 30_000, LARGEST_FILE, every=100)
    assert list(read_series(path, newest=50)["rank 0"].steps) == list(range(29_950, 30_000))
    assert bytes_read_by(lambda: read_series(path, newest=50)) < path.stat().st_size / 4


def test_subjects_beyond_the_limit_are_ignored(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "x.jsonl.gz")
    for number in range(module.MOST_SUBJECTS + 5):
        writer.add(f"layer {number}", START, 1, {f"column {column}": 1.0 for column in range(2)})
    writer.add("layer 0", START, 1, {f"column {column}": 1.0 for column in range(100)})
    writer.close()
    found = read_series(tmp_path / "x.jsonl.gz")
    assert len(found) == module.MOST_SUBJECTS
    assert len(found["layer 0"].mean) == module.MOST_COLUMNS
