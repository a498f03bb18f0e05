"""The hashes of what files contain: against hashlib, by several processes at once, and after kills."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from scaletrain_cli.data import content
from scaletrain_cli.data.content import FileRange, hash_range, read_hashes
from scaletrain_cli.data.pipeline import contents
from scaletrain_cli.data.pipeline.claims import Timing
from scaletrain_cli.data.pipeline.contents import shared_reading
from scaletrain_cli.data.sources.records import SourceFile, local_file
from tests.data.texts import ignore
from tests.waiting import wait_until

QUICK = Timing(heartbeat_seconds=0.05, stale_seconds=5.0, poll_seconds=0.02)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    """Write small and large files, in units and ranges of few bytes."""
    monkeypatch.setattr(contents, "UNIT_BYTES", 3000)
    monkeypatch.setattr(contents, "_OPENING_BYTES", 10)
    monkeypatch.setattr(content, "_WHOLE_BYTES", 5000)
    monkeypatch.setattr(content, "_RANGE_BYTES", 2000)
    draw = random.Random(3)
    for number, size in enumerate([0, 900, 5000, 5001, 40, 17_000, 800, 700]):
        (tmp_path / f"{number}.jsonl").write_bytes(draw.randbytes(size))
    return [local_file(tmp_path / f"{number}.jsonl", "jsonl") for number in range(8)]


def read(folder: Path, files: list[SourceFile], workers: int = 1) -> dict[str, str]:
    with shared_reading(folder, workers, ignore, timing=QUICK) as read:
        return dict(read(files))


def test_the_hash_of_a_file_up_to_a_size_is_that_of_its_bytes_and_above_of_its_ranges(
    files: list[SourceFile], tmp_path: Path
) -> None:
    found = read(tmp_path / "data", files)
    assert found == read_hashes(files, 2)
    for file in files:
        data = Path(file.path).read_bytes()
        expected = hashlib.blake2b(data, digest_size=32).hexdigest()
        if file.size > 5000:
            ranges = [data[start : start + 2000] for start in range(0, len(data), 2000)]
            digests = [hashlib.blake2b(each, digest_size=32).hexdigest() for each in ranges]
            expected = "ranges-" + hashlib.sha256("\n".join(digests).encode()).hexdigest()
        assert found[file.path] == expected


def test_three_processes_at_once_read_each_byte_once(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: Counter[tuple[Path, int]] = Counter()

    def counted(given: FileRange) -> str:
        ranges[given.path, given.start] += 1
        if not together.is_set():  # none ends before all have begun
            wait_until(lambda: together.is_set() or len([*(tmp_path / "data").rglob("workers/*")]) == 3, "all read")
            together.set()
        return hash_range(given)

    monkeypatch.setattr(contents, "hash_range", counted)
    together, found = threading.Event(), list[dict[str, str]]()
    threads = [
        threading.Thread(target=lambda: found.append(read(tmp_path / "data", files)), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [read_hashes(files)] * 3
    assert set(ranges.values()) == {1}


class Killed(BaseException):
    pass


def test_a_killed_reading_goes_on_where_it_was(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, int]] = []

    def killed(given: FileRange) -> str:
        calls.append((given.path, given.start))
        if len(calls) == 9:
            raise Killed
        return hash_range(given)

    monkeypatch.setattr(contents, "hash_range", killed)
    with pytest.raises(Killed):
        read(tmp_path / "data", files)
    results = list((tmp_path / "data" / ".steps" / ".content").rglob("*.json"))
    assert len(results) > 1
    results.pop().write_text('["123')  # as a crash of the machine leaves it
    kept = sum(len(json.loads(path.read_text(encoding="utf-8"))) for path in results)
    before = len(calls)
    assert read(tmp_path / "data", files) == read_hashes(files)
    assert len(calls) - before == len(set(calls)) - kept < len(set(calls)) == 18
    assert not list((tmp_path / "data" / ".steps" / ".content").iterdir())
