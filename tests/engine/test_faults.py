import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from scaletrain_cli.engine import __main__ as engine
from scaletrain_cli.engine.faults import KINDS, Faults, InjectedError
from scaletrain_cli.errors import DoNotRequeueError, UsageError
from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import SupersededAttemptError, open_attempt, stage_checkpoint
from scaletrain_cli.worker.failures import read_failures
from tests.launch.conftest import PROJECT
from tests.rundir.test_checkpoints import save
from tests.waiting import wait_until


def test_no_fault_is_injected_by_default() -> None:
    faults = Faults.from_environment(rank=0, attempt=1)
    faults.before_step(1)
    assert faults.save_delay_seconds == 0
    assert not faults.injects_nan(1)


def test_damaged_data_end_the_run_although_its_events_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DamagedDataError(DoNotRequeueError):
        failure_reason, evidence = "data", {"file": "shard-00001"}

    def fail(*_: object) -> NoReturn:
        raise DamagedDataError("shard-00001 is damaged")

    run, unused = RunDir(tmp_path), cast("Any", None)
    run.events.mkdir()
    monkeypatch.setattr(engine, "_train", fail)
    assert engine._exit_code(run, 1, 0, unused, unused, unused) == 93
    assert [failure.reason for failure in read_failures(run, 1)] == ["data"]


def test_a_fault_applies_to_its_rank_step_and_attempt_only() -> None:
    text = "exception rank=1 step=7 attempt=2"
    for rank, attempt, step in ((0, 2, 7), (1, 1, 7), (1, 2, 6)):
        Faults(text, rank, attempt).before_step(step)
    with pytest.raises(InjectedError):
        Faults(text, 1, 2).before_step(7)


def test_a_signal_fault_sends_the_real_signal() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        Faults("sigterm step=3", 0, 1).before_step(3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_spike_fault_applies_to_batches_on_every_rank() -> None:
    faults = Faults("spike step=20-22 factor=5; spike step=22", 1, 3)
    assert [faults.loss_factor(batch) for batch in (19, 20, 21, 22, 23)] == [1, 5, 5, 100, 1]
    assert math.isnan(Faults("spike step=4 factor=nan", 0, 1).loss_factor(4))


def test_delays_of_a_save_add_up() -> None:
    assert Faults("slow-save seconds=0.5; slow-save seconds=1 rank=0", 0, 1).save_delay_seconds == 1.5


@pytest.mark.parametrize(
    "text", ["explode step=1", "sigkill step=x", "sigkill when=1", "sigkill step", "spike step=3-x"]
)
def test_an_invalid_fault_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="SCALETRAIN_FAULT"):
        Faults(text, 0, 1)


def test_an_unknown_kind_is_answered_with_all_kinds_and_an_unknown_key_with_those_of_the_kind() -> None:
    with pytest.raises(UsageError) as kind:
        Faults("explode step=1", 0, 1)
    assert f"kinds are {', '.join(KINDS)}." in str(kind.value)
    with pytest.raises(UsageError) as key:
        Faults("slow-save factor=2 when=1", 0, 1)
    assert "unknown keys (factor, when); keys of slow-save are rank, step, attempt, seconds" in str(key.value)


def test_the_documentation_has_every_kind_with_its_keys() -> None:
    page = (PROJECT / "docs" / "drills.md").read_text(encoding="utf-8")
    table = page.partition("## Faults of your own")[2]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", table, flags=re.MULTILINE))
    assert rows == {name: kind.effect for name, kind in KINDS.items()}
    assert all(f"`{key}`" in kind.effect for kind in KINDS.values() for key in kind.keys)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("truncate", "1500 bytes instead of 3000"),
        ("flip", "content does not match the recorded hash"),
        ("delete", "No such file or directory"),
    ],
)
def test_the_latest_checkpoint_is_corrupted_once_there_is_an_earlier_one(
    kind: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    faults = Faults(f"{kind} rank=0 step=5", 0, 1, tmp_path)
    save(tmp_path, 4)
    faults.before_step(6)
    assert sent == [], "nothing would be left to resume from"
    save(tmp_path, 8)
    faults.before_step(9)
    assert sent == [signal.SIGKILL]
    first, second = list_checkpoints(tmp_path)
    assert (verify(first), verify(second)) == ([], [f"rank-00000.pt: {found}"])


def test_a_slow_rank_waits_before_every_step_from_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    faults = Faults("slow-rank rank=1 step=3 seconds=0.2", 1, 1)
    for step in range(1, 6):
        faults.before_step(step)
    assert waited == [0.2] * 3
    faults = Faults("slow-rank step=2-4 seconds=0.1", 1, 1)
    for step in range(1, 8):
        faults.before_step(step)
    assert waited[3:] == [0.1] * 3


@pytest.mark.parametrize(("kind", "alive"), [("sigkill-agent", []), ("node", []), ("sigstop", ["T"])])
def test_a_node_fault_kills_the_agent_and_every_rank(kind: str, alive: list[str]) -> None:
    """Run an agent with a rank that injects the fault and one that sleeps."""
    rank = (
        "import os, sys; from scaletrain_cli.engine.faults import Faults;"
        "from scaletrain_cli.worker.signals import die_with_agent; die_with_agent();"
        "print('up', flush=True); sys.stdin.readline(); Faults(sys.argv[1], 0, 1).before_step(1)"
    )
    agent = (
        "import os, subprocess, sys; os.environ['SCALETRAIN_AGENT_PID'] = str(os.getpid());"
        "start = lambda fault: subprocess.Popen([sys.executable, '-c', sys.argv[1], fault], stdin=subprocess.PIPE,"
        "                                       stdout=subprocess.PIPE, start_new_session=True);"
        "ranks = [start(sys.argv[2]), start('')]; [rank.stdout.readline() for rank in ranks];"
        "print(*(rank.pid for rank in ranks), flush=True); ranks[0].stdin.write(b'\\n'); ranks[0].stdin.flush();"
        "[rank.wait() for rank in ranks]"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent, rank, f"{kind} step=1"], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    try:
        wait_until(lambda: states(pids) == alive if kind != "sigstop" else "T" in states(pids), kind)
        if kind == "sigstop":
            assert process.poll() is None
        else:
            assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    wait_until(lambda: states(pids) == [], "the ranks go with their agent")


def states(pids: list[int]) -> list[str]:
    """Return the states of the processes that still run; T is stopped."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return [state for state in found if state not in "ZX"]


def test_a_disk_is_full_from_the_nth_write_after_a_step_on() -> None:
    faults = Faults("disk-full step=3 write=2", rank=0, attempt=1)
    faults.before_write()
    faults.before_step(3)
    faults.before_write()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            faults.before_write()


def test_a_stale_attempt_loses_its_checkpoints_to_the_next_one(tmp_path: Path) -> None:
    open_attempt(tmp_path, 1)
    Faults("stale-attempt step=2", rank=0, attempt=1, folder=tmp_path).before_step(2)
    with pytest.raises(SupersededAttemptError):
        stage_checkpoint(tmp_path, 1, 5)
