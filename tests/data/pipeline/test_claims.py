"""One preparation by several processes: claims, dead processes, failures, and the same bytes after kills."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from scaletrain_cli.data.drafts import draft_of, new_owner, own_drafts_as
from scaletrain_cli.data.pipeline import claims as claims_module
from scaletrain_cli.data.pipeline import schedule
from scaletrain_cli.data.pipeline.claims import Claims, Timing, read_failure, record_failure
from scaletrain_cli.data.pipeline.prepare import prepare
from scaletrain_cli.data.pipeline.schedule import Stage, Workers, run_stage
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from tests.data.pipeline.test_prepare import files_below, ignore, preparation, tokenizer
from tests.waiting import Clock, wait_until

__all__ = ["tokenizer"]  # a fixture
QUICK = Timing(heartbeat_seconds=0.05, stale_seconds=0.6, poll_seconds=0.02)
BY_CLOCK = Timing(heartbeat_seconds=1e6, stale_seconds=600.0, poll_seconds=1.0)  # with a Clock; beats are the test's


@contextmanager
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that register meanwhile are on a machine whose process table cannot be seen."""
    with monkeypatch.context() as patch:
        patch.setattr(claims_module, "_machine", lambda: "another machine")
        yield


@pytest.mark.parametrize("interrupted", ["_register", "_beat"])
def test_a_signal_while_a_process_registers_leaves_no_file_of_it(
    interrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = Claims(tmp_path, timing=QUICK)
    if interrupted == "_register":  # a mock of the time at which the signal arrives
        register = claims._register
        monkeypatch.setattr(claims, "_register", lambda: (register(), signal.raise_signal(signal.SIGINT)))
    else:
        start = claims._beating.start
        monkeypatch.setattr(claims._beating, "start", lambda: (start(), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt), claims:
        pass
    assert list(tmp_path.rglob("workers/*")) == []


def test_a_process_shows_again_and_again_that_it_lives(tmp_path: Path) -> None:
    with Claims(tmp_path, timing=Timing(heartbeat_seconds=0.01)) as own:
        for _ in range(2):
            os.utime(own._own, (1, 1))
            wait_until(lambda: own._own.stat().st_mtime > 1, "it beats")


def test_a_unit_belongs_to_one_process_until_that_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(claims_module, "time", clock)

    def taken(*others: Claims) -> list[Claims]:
        for other in others:
            other.refresh("stage")
        return [other for other in others if other.claim("stage", "unit")]

    with Claims(tmp_path, timing=BY_CLOCK) as third, Claims(tmp_path, timing=BY_CLOCK) as second:
        with other_machine(monkeypatch):
            first = Claims(tmp_path, timing=BY_CLOCK).__enter__()
        assert first.claim("stage", "unit")
        assert taken(second, third) == []
        for _ in range(3):
            clock.sleep(400.0)
            beat = first._own.stat().st_mtime_ns + 1  # a file system may have the same time for two beats in a row
            os.utime(first._own, ns=(beat, beat))
            assert taken(second, third) == []
        clock.sleep(600.0)  # as if its machine were off
        assert taken(second, third) == []
        clock.sleep(1.0)
        assert taken(second, third) == [second]
        first.beat()  # it was only suspended
        assert first.losses == 1
        first._ended.set()
        assert sorted(path.name for path in (tmp_path / "claims" / "stage").iterdir()) == ["unit.0", "unit.1"]


def test_of_many_processes_that_take_over_at_once_one_succeeds(tmp_path: Path) -> None:
    with Claims(tmp_path, timing=QUICK) as dead:
        assert all(dead.claim("stage", str(unit)) for unit in range(20))
    (tmp_path / "claims" / "stage").mkdir(parents=True)  # the last one to leave removes the claims: put some back
    for unit in range(20):
        (tmp_path / "claims" / "stage" / f"{unit}.0").write_text(dead.owner, encoding="ascii")
    taken: list[str] = []
    start = threading.Barrier(8)

    def take() -> None:
        with Claims(tmp_path, timing=QUICK) as own:
            start.wait()
            own.refresh("stage")
            taken.extend(str(unit) for unit in range(20) if own.claim("stage", str(unit)))
            start.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(str(unit) for unit in range(20))


def test_drafts_of_living_processes_stay(tmp_path: Path) -> None:
    with Claims(tmp_path / "work", timing=QUICK) as living, Claims(tmp_path / "work", timing=QUICK) as other:
        drafts = {}
        for owner in (living.owner, new_owner()):
            own_drafts_as(owner)
            drafts[owner] = draft_of(tmp_path / "result")
            drafts[owner].mkdir()
        other.remove_drafts(tmp_path)
        assert [path for path in tmp_path.iterdir() if path.name != "work"] == [drafts[living.owner]]
    with Claims(tmp_path / "work", timing=QUICK) as other:
        other.remove_drafts(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["work"]


def fail(folder: Path, unit: int) -> None:
    time.sleep(0.05)
    if unit == 3:
        raise UsageError("web.jsonl:3: not JSON")
    (folder / str(unit)).touch()


def test_a_failing_unit_ends_all_processes_of_the_job_with_its_reason(tmp_path: Path) -> None:
    said: list[str] = []

    def work(name: str) -> None:
        units = tuple(str(unit) for unit in range(200))
        stage = Stage("tokenize", "tokens", tmp_path / "out", units, partial(fail, tmp_path / "out"))
        with Claims(tmp_path / "work", tmp_path / "failure.json", QUICK) as own, Workers(1) as workers:
            try:
                run_stage(stage, own, workers, ignore)
            except UsageError as error:
                said.append(f"{name}: {str(error).rstrip('.')}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"{name}: web.jsonl:3: not JSON" for name in "abc"]
    assert len(list((tmp_path / "out").iterdir())) < 200
    recorded = json.loads((tmp_path / "failure.json").read_text(encoding="utf-8"))
    assert (recorded["unit"], recorded["exit_code"]) == ("tokenize 3", 2)
    assert isinstance(read_failure(tmp_path / "failure.json"), UsageError)


def test_looks_at_a_slow_file_system_are_rare_and_the_waiting_process_sees_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = Clock(), list[float]()
    monkeypatch.setattr(schedule, "time", clock)
    listed = os.listdir

    def slow(folder: Path) -> list[str]:
        if folder == tmp_path / "out":
            looks.append(clock.now)
            if clock.now > 120.0:
                (folder / "0").touch()  # by the other one
        clock.sleep(1.0)
        return listed(folder)

    monkeypatch.setattr(schedule.os, "listdir", slow)
    stage = Stage("tokenize", "tokens", tmp_path / "out", ("0",), partial(fail, tmp_path / "out"))
    with Claims(tmp_path / "work", timing=QUICK) as other, Claims(tmp_path / "work", timing=QUICK) as own:
        assert other.claim("tokens", "0")
        with Workers(1) as workers:
            run_stage(stage, own, workers, ignore)
        monkeypatch.undo()
    # 20 times as long as the first look took, then the longest wait after looks at results and claims.
    assert looks == pytest.approx([0, 21, 53, 85, 117, 149], abs=0.1)


# A process that the machine does not run for as long as in QUICK is taken for dead, and what it has begun is removed.
PATIENT = dataclasses.replace(QUICK, stale_seconds=2.0)


def main(folder: str, workers: str, tokenizer: str, machine: str, count: str) -> None:
    """Prepare in a process of its own, which the test kills. ``machine``: as if it were another one."""
    claims_module._machine = lambda: machine
    given = preparation(Path(folder), Path(tokenizer).read_text(encoding="utf-8"), int(count))
    prepare(given, Path(folder) / "data", int(workers), ignore, failure=Path(folder) / "failure.json", timing=PATIENT)


def start(folder: Path, workers: int, machine: int, count: int) -> subprocess.Popen[bytes]:
    tokens = str(folder / "tokenizer.json")
    words = [sys.executable, "-m", "tests.data.pipeline.test_claims", str(folder), str(workers), tokens, str(machine)]
    return subprocess.Popen([*words, str(count)], start_new_session=True, cwd=Path(__file__).parents[3])


def prepared_by_many(folder: Path, tokenizer: str, processes: int, kills: int, seed: int, count: int) -> None:
    """Prepare with ``processes`` on up to three machines, killing one of them at random ``kills`` times."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    draw = random.Random(seed)
    expected = preparation(folder, tokenizer, count)
    before = time.monotonic()
    prepare(expected, folder / "whole", 1, ignore)
    seconds = time.monotonic() - before
    running = [start(folder, 1 + number % 2, number % 3, count) for number in range(processes)]
    try:
        while kills:
            time.sleep(draw.random() * seconds / 2)
            number = draw.randrange(processes)
            if running[number].poll() is None:
                os.killpg(running[number].pid, signal.SIGKILL)
                kills -= 1
            elif running[number].returncode == 0 and kills:
                break
            running[number].wait()
            running[number] = start(folder, 1 + number % 2, number % 3, count)
        assert [process.wait() for process in running] == [0] * processes
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    prepare(expected, folder / "data", 1, ignore, timing=PATIENT)  # removes what killed processes have left
    assert files_below(folder / "data") == files_below(folder / "whole")


def test_processes_that_are_killed_on_several_machines_prepare_the_same_bytes(tokenizer: str, tmp_path: Path) -> None:
    prepared_by_many(tmp_path / "two", tokenizer, processes=2, kills=1, seed=1, count=30)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_random_kills_of_processes_on_several_machines_change_no_byte(
    tokenizer: str, tmp_path: Path, processes: int
) -> None:
    for seed in range(4):
        prepared_by_many(tmp_path / str(seed), tokenizer, processes, kills=5, seed=seed, count=150)


def test_the_last_of_processes_that_end_together_removes_the_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, remove_dead = threading.Barrier(2), Claims._remove_dead

    def look_together(claims: Claims) -> None:
        remove_dead(claims)
        looked.wait()

    monkeypatch.setattr(Claims, "_remove_dead", look_together)
    entered = [Claims(tmp_path).__enter__() for _ in range(2)]
    assert all(claims.claim("read", str(number)) for number, claims in enumerate(entered))
    ends = [threading.Thread(target=claims.__exit__, args=(None, None, None)) for claims in entered]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert not list(tmp_path.glob("*/*"))


def test_a_recorded_failure_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_TOKEN", "t0psecret-value")
    error = UsageError(Reason("data.task-failed", {"task": "read web", "error": "refused t0psecret-value"}))
    record_failure(tmp_path / "failure.json", error, "read web")
    assert "t0psecret" not in (tmp_path / "failure.json").read_text()
    found = read_failure(tmp_path / "failure.json")
    assert found is not None
    assert "refused" in str(found)


if __name__ == "__main__":
    main(*sys.argv[1:])


def test_a_unit_that_was_done_since_the_last_look_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, again = Claims.claim, list[int]()

    def claim_after_another_ended(self: Claims, key: str, result: str) -> bool:
        (tmp_path / "results" / result).touch()
        return claim(self, key, result)

    monkeypatch.setattr(Claims, "claim", claim_after_another_ended)
    stage = Stage("hash", "hash", tmp_path / "results", ("0", "1"), again.append)
    with Claims(tmp_path) as claims, Workers(1) as pool:
        run_stage(stage, claims, pool, lambda *_: None)
    assert again == []
