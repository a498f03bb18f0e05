import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from scaletrain_cli.engine.deepspeed_engine import exclusive_build, extensions_folder, load_operator

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads, which hold no lock
FORK = multiprocessing.get_context("fork")


class SlowOperator:
    """Act like torch for a DeepSpeed builder, without compiling: take the lock, or wait until it is removed."""

    def __init__(self, folder: Path, begun: Connection | None = None) -> None:
        self.baton, self.begun = FileBaton(str(folder / "operator" / "lock"), wait_seconds=0.01), begun

    def load(self) -> None:
        if self.baton.try_acquire():
            if self.begun is not None:
                self.begun.send(True)
                signal.pause()
            self.baton.release()
        else:
            self.baton.wait()


@contextmanager
def process(begin: Callable[..., Any], *arguments: Any) -> Generator[Any]:
    """Run a builder in another process that has begun; it is killed on exit."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=begin, args=(theirs, *arguments))
    child.start()
    assert ours.recv()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def build(begun: Connection, folder: Path) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    load_operator(SlowOperator(folder, begun))


def build_without_us(begun: Connection, folder: Path) -> None:
    SlowOperator(folder, begun).load()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "operator").mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_after_a_killed_build_the_next_one_begins_at_once(folder: Path) -> None:
    with process(build, folder) as builder:
        assert (folder / "operator" / "lock").exists()
        builder.kill()
        builder.join()
        assert (folder / "operator" / "lock").exists()
        load_operator(SlowOperator(folder))
    assert not (folder / "operator" / "lock").exists()


def test_the_lock_of_a_running_build_is_not_removed(folder: Path) -> None:
    with process(build_without_us, folder), exclusive_build(folder):
        assert (folder / "operator" / "lock").exists()


def test_one_process_builds_at_a_time_and_the_next_continues_when_it_dies(folder: Path) -> None:
    with process(build, folder) as builder, process(build_when_free, folder) as waiting:
        waiting.join(0.3)
        assert waiting.is_alive()
        builder.kill()
        waiting.join()
        assert waiting.exitcode == 0


def build_when_free(begun: Connection, folder: Path) -> None:
    begun.send(True)
    load_operator(SlowOperator(folder))


def test_the_default_build_folder_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert extensions_folder().name == "torch_extensions"
