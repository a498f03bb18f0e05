import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.engine.data.batches import BatchReader, StepBatch
from scaletrain_cli.engine.data.loader import Loader, map_tensors
from scaletrain_cli.engine.data.reader_processes import ReaderKilledError
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from tests.engine.data import reading
from tests.engine.data.test_batches import WHOLE
from tests.engine.data.token_sequences import TokenSequences
from tests.waiting import wait_until

CPU = torch.device("cpu")


def batch(step: int) -> StepBatch:
    tokens = torch.full((2, 1, 4), step)
    return StepBatch(tokens, tokens + 1, torch.zeros(2, 1, dtype=torch.int64), torch.arange(4), None)


class Reading:
    """Records what was read, and fails at one step."""

    def __init__(self, fails_at: int = 0) -> None:
        self.fails_at, self.steps = fails_at, [0]
        self.threads: set[str] = set()
        self.advanced = threading.Condition()

    def __call__(self, step: int) -> StepBatch:
        with self.advanced:
            self.steps.append(step)
            self.threads.add(threading.current_thread().name)
            self.advanced.notify_all()
        if step == self.fails_at:
            raise OSError("the disk is gone")
        return batch(step)

    def wait_for(self, step: int) -> None:
        with self.advanced:
            self.advanced.wait_for(lambda: self.steps[-1] == step)


@pytest.fixture
def feeds() -> Iterator[list[Loader[Any]]]:
    opened: list[Loader[Any]] = []
    yield opened
    for feed in opened:
        feed.close()


def open_feed(feeds: list[Loader[Any]], reading: Reading) -> Loader[StepBatch]:
    feeds.append(Loader(reading, CPU))
    return feeds[-1]


def number_of(batch: StepBatch) -> int:
    return int(batch.micro_batches()[1].tokens[0, 0])


def test_the_following_batches_and_no_others_are_read_ahead(feeds: list[Loader[Any]]) -> None:
    reading = Reading()
    feed = open_feed(feeds, reading)
    for step in (1, 2, 3):
        assert number_of(feed.take(step, [step + 1, step + 2])) == step
        reading.wait_for(step + 2)
    feed.close()
    assert reading.steps == [0, 1, 2, 3, 4, 5]
    assert reading.threads.isdisjoint({threading.current_thread().name})


def test_batches_may_be_taken_in_any_order(feeds: list[Loader[Any]]) -> None:
    feed = open_feed(feeds, Reading())
    assert [number_of(feed.take(step, [step + 1])) for step in (7, 8, 30, 2, 3)] == [7, 8, 30, 2, 3]


def test_an_error_in_the_thread_is_raised_when_its_batch_is_taken(feeds: list[Loader[Any]]) -> None:
    reading = Reading(fails_at=2)
    feed = open_feed(feeds, reading)
    feed.take(1, [2])
    reading.wait_for(2)
    with pytest.raises(OSError, match="the disk is gone"):
        feed.take(2)


def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())
    feed = Loader(Reading(), CPU)
    feed.take(1)
    feed.close()
    assert set(threading.enumerate()) <= before


def wait_for_start(feed: Loader[Any]) -> None:
    """Take batches until every process has started; until then this one reads."""
    for number in itertools.count(100_000):
        feed.take(number, [number + 1, number + 2])
        if all(each.started for each in feed._processes._processes):
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def two() -> Iterator[Loader[Any]]:
    """Two reader processes, which several tests use one after another."""
    feed: Loader[Any] = Loader(reading.read, CPU, workers=2)
    wait_for_start(feed)
    yield feed
    feed.close()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected) and found.dtype == expected.dtype
    if isinstance(expected, dict):
        return all(same(found[key], expected[key]) for key in expected.keys() - {"process", "stopped_by_sigterm"})
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    return bool(found == expected)


def test_processes_return_the_same_batches_in_any_order_of_numbers(two: Loader[Any]) -> None:
    readers = set()
    for number in (1, 2, 3, 4, 9, 8, 30, 2, 3, 1):
        # the batches after 9 are in the slots when 8 is asked for
        found = two.take(number, [number + 1, number + 2, number + 3, number + 4])
        assert same(found, reading.read(number))
        assert not found["stopped_by_sigterm"]
        readers.add(found["process"])
    assert readers == set(two._processes.pids)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (reading.FAILS, FileNotFoundError, "shard-7.bin"),
        (reading.NO_PICKLE, RuntimeError, "OddError: nothing to pickle"),
        (reading.CORRUPT, CorruptDataError, "shard-8.bin"),
    ],
)
def test_an_error_in_a_process_is_raised_when_its_batch_is_taken_and_names_the_file(
    two: Loader[Any], number: int, kind: type[Exception], text: str
) -> None:
    assert same(two.take(number - 3, [number]), reading.read(number - 3))
    with pytest.raises(kind, match=text) as raised:
        two.take(number, [number + 5])
    assert "in read\n" in str(raised.value.__cause__)  # the traceback of the process
    if isinstance(raised.value, CorruptDataError):
        assert raised.value.evidence["chunk"] == 4
        assert raised.value.exit_code == 93
    assert same(two.take(number + 5), reading.read(number + 5))


def test_a_process_keeps_no_batch_and_no_descriptor(two: Loader[Any]) -> None:
    assert two._processes is not None
    found = []
    gc.collect()  # files that earlier tests have left in cycles are closed now
    for number in range(reading.LARGE, reading.LARGE + 60):
        batch = two.take(number, [number + 1, number + 2])
        assert int(batch["large"][-1]) == number
        found.append((batch["held"], batch["descriptors"], len(os.listdir("/proc/self/fd"))))
    assert max(held for held, _, _ in found) <= 2  # the one that is sent, and the next one
    assert len({descriptors for _, descriptors, _ in found[10:]}) == 1
    assert len({own for _, _, own in found[10:]}) == 1


def test_a_killed_process_is_replaced_and_a_fourth_time_is_an_error(two: Loader[Any]) -> None:
    two.take(40, [41, 42])
    os.kill(two._processes.pids[0], signal.SIGKILL)
    for number in (41, 42, 43, 44):
        assert same(two.take(number, [number + 1, number + 2]), reading.read(number))
    two._processes._restarts = 3
    for pid in two._processes.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ReaderKilledError, match="ended with SIGKILL, after 3 others were started again"):
        [two.take(number, [number + 1]) for number in range(45, 60)]


def test_no_process_is_left_when_the_rank_is_killed() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.data.reading"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    first, *readers = map(int, rank.stdout.readline().split())
    assert [first] == readers
    processes = [psutil.Process(pid) for pid in readers]
    rank.kill()
    rank.communicate()
    # Without an init that reaps they stay as zombies.
    wait_until(lambda: not [each for each in processes if state_of(each) != psutil.STATUS_ZOMBIE], "they have ended")


def state_of(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def reader_of(folder: Path, kind: str) -> BatchReader:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 500, 40 * 16 + 1).astype(np.uint16)
    ends = np.append(np.flatnonzero(random.random(len(tokens) - 1) < 0.1), len(tokens) - 1).astype(np.int64)
    arrays = {"tokens": tokens, "ends": ends, "weights": (random.random(len(tokens)) < 0.5).astype(np.float32)}
    for name, values in arrays.items():
        values.tofile(folder / name)
    mapped = {name: np.memmap(folder / name, values.dtype, "r") for name, values in arrays.items()}
    text = TokenSequences(mapped["tokens"], 16, mapped["ends"]).part(3, 30)
    lengths = np.diff(ends, prepend=-1)
    rows = RowSequences(
        mapped["tokens"],
        mapped["weights"],
        mapped["ends"] + 1,
        np.arange(1, len(ends) + 1),
        np.ones(len(ends)),
        int(lengths.max()),
        packed=True,
    )
    layout = replace(WHOLE, data_parallel=2, micro_batch_size=2, gradient_accumulation_steps=3, global_batch_size=12)
    group: Any = threading.Lock()
    mesh = Mesh(data=Axis(2, 1, group), replicas=Axis(2, 1, group))
    return BatchReader(
        text if kind == "text" else rows, layout, mesh, 3, mask_document_starts=False, within_documents=kind == "text"
    )


def test_a_process_reads_batches_of_text_and_rows_from_the_same_files(tmp_path: Path, feeds: list[Loader[Any]]) -> None:
    readers = [reader_of(tmp_path, kind) for kind in ("text", "rows")]
    feed = Loader(partial(reading.both, *(reader.without_groups().batch for reader in readers)), CPU, workers=1)
    feeds.append(feed)
    assert same(feed.take(1), tuple(reader.batch(1) for reader in readers))  # read here, while the process starts
    assert not feed._processes._processes[0].started
    wait_for_start(feed)
    for number in (1, 2, 50):
        found = feed.take(number, [number + 1])
        assert same(found, tuple(reader.batch(number) for reader in readers))


def test_every_tensor_of_a_batch_is_changed() -> None:
    halves = map_tensors(batch(4), lambda tensor: tensor // 2)
    assert int(halves.tokens[0, 0, 0]) == 2
    assert halves.divisor is None
