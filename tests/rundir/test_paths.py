"""Finding runs and claiming attempts, and the documents in them."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.node.record import is_announced
from scaletrain_cli.rundir import documents
from scaletrain_cli.rundir.documents import DamagedError, UnreadableError, read_document, write_document
from scaletrain_cli.rundir.paths import RunDir, find_run, list_runs, runs_root
from scaletrain_cli.rundir.record import read_record


def make(name: str) -> RunDir:
    run = RunDir(runs_root() / name)
    run.path.mkdir(parents=True)
    run.record.write_text("{}")
    return run


def test_attempts_are_numbered_from_one_and_sorted_as_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.attempts() == []
    assert [run.new_attempt() for _ in range(3)] == [1, 2, 3]
    (tmp_path / "attempts" / "10000").mkdir()
    (tmp_path / "attempts" / "notes").mkdir()
    assert run.attempts() == [1, 2, 3, 10000]
    assert run.new_attempt() == 10001


def test_concurrent_claims_of_an_attempt_get_different_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: run.new_attempt(), range(40)))
    assert sorted(numbers) == list(range(1, 41))


def test_a_run_is_found_by_id_prefix_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("llama-1"), make("llama-10")
    assert find_run("llama-10") == second
    assert find_run("llama-1") == first  # exact wins over being a prefix of another
    assert find_run(str(second.path)) == second
    monkeypatch.chdir(first.path)
    assert find_run(".") == first
    with pytest.raises(UsageError, match="matches 2 runs"):
        find_run("lla")
    with pytest.raises(UsageError, match="no run 'gpt'"):
        find_run("gpt")
    with pytest.raises(UsageError, match="no run "):
        find_run("")


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "$(id)", "'", "x" * 5000])
def test_an_impossible_run_id_is_a_usage_error(name: str) -> None:
    make("llama-1")
    with pytest.raises(UsageError):
        find_run(name)


def test_runs_are_listed_from_the_runs_root_only() -> None:
    assert list_runs() == []
    runs = [make("b"), make("a")]
    (runs_root() / "not-a-run").mkdir()
    assert list_runs() == sorted(runs, key=lambda run: run.run_id)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"schema": "scaletrain.run/v9"}', "\0\0"])
def test_a_damaged_record_is_a_usage_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.record.write_text(text)
    with pytest.raises(UsageError, match=r"run\.json"):
        read_record(run)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.EACCES])
def test_a_file_system_that_fails_for_a_moment_ends_no_agent_that_looks_for_a_request_to_stop(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    run = RunDir(tmp_path)
    run.stop_file.touch()
    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", fail)
        found = run.is_cancelled, is_announced(run, 1, "failed")
    assert found == (False, False)
    assert run.is_cancelled


def test_a_document_that_another_host_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system has then removed the file that is open, and answers ESTALE."""
    path, read = tmp_path / "attempt.json", documents.open_to_read
    write_document(path, {"n": 1})
    errors = [OSError(errno.ESTALE, "Stale file handle")]

    def open_to_read(path: Path) -> BinaryIO:
        if errors:
            raise errors.pop()
        return read(path)

    monkeypatch.setattr(documents, "open_to_read", open_to_read)
    assert read_document(path) == {"n": 1}
    errors += [OSError(errno.ESTALE, "Stale file handle")] * 2
    with pytest.raises(UnreadableError, match="Stale file handle"):
        read_document(path)


def test_a_document_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    assert read_document(path) is None
    write_document(path, {"n": 1})
    with pytest.raises(ValueError):
        write_document(path, {"n": float("inf")})
    assert read_document(path) == {"n": 1}
    path.write_text('{"n": ')
    with pytest.raises(DamagedError, match=r"attempt\.json is damaged"):
        read_document(path)
