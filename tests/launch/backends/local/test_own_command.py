"""Programs of code.command: their environment, signals and exit codes, and launchers that start their own ranks."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import AttemptRecord, read_attempts
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.paths import RunDir
from tests.launch.backends.local.launching import launching
from tests.launch.conftest import make_plan, make_spec
from tests.waiting import wait_until

# A shell that starts a program which takes its time to save, as many training scripts do.
SHELL = """
echo "$1|$RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR, $SCALETRAIN_RUN_DIR"
[ "$SCALETRAIN_ATTEMPT" = 2 ] && exit 0
"$PYTHON" -c '
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.7)
    open(os.environ["SCALETRAIN_RUN_DIR"] + "/saved-" + os.environ["RANK"], "w")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(100_000)
'
echo "never reached"
"""
RANK_PROGRAM = """
import sys, time
from scaletrain_cli.worker import ExitCode, Rank
rank = Rank.start()
place = rank.environment

class Nan(ValueError):
    failure_reason = "nan"

def train():
    rank.heartbeat.beat(1, "step")
    if sys.argv[1] == "nan" and place.rank == 1:
        raise Nan("loss nan")
    print("up", place.rank, place.world_size, flush=True)
    while place.attempt == 1:
        time.sleep(0.05)
        if rank.preemption.raised:
            open(place.run.path / f"saved-{place.rank}", "w")
            return ExitCode.PREEMPTED
    return ExitCode.DONE

rank.run(train)
"""


def submitted(words: list[str], *overrides: str) -> RunDir:
    spec = make_spec("cluster.gpus_per_node=2", f"code.command={json.dumps(words)}", "data=null", *overrides)
    made = create_run(spec, make_plan(spec), None)
    launching("submit", made.run)
    return made.run


def logs(run: RunDir, attempt: int) -> list[str]:
    return [path.read_text() for path in sorted(run.attempt(attempt).glob("logs/*.log"))]


def ended(run: RunDir, number: int = 1) -> AttemptRecord:
    """Wait for the end of an attempt."""

    def attempts() -> list[AttemptRecord]:
        return [attempt for attempt in read_attempts(run) if attempt.number == number and attempt.reason]

    wait_until(lambda: bool(attempts()), f"attempt {number} ends")
    return attempts()[0]


def preempt(run: RunDir, ranks: int) -> None:
    """Signal the node agent once ``ranks`` ranks are up."""
    wait_until(lambda: "".join(logs(run, 1)).count("up") == ranks, "the ranks are up")
    os.kill(read_node_records(run, 1)[0].agent_pid, signal.SIGTERM)


def test_a_shell_script_gets_its_words_and_its_child_has_the_grace_period_to_save() -> None:
    run = submitted(["bash", "-c", SHELL.replace("$PYTHON", sys.executable), "bash", "two words; $HOME"])
    preempt(run, 2)
    first = ended(run)
    assert (first.exit_code, first.reason) == (75, "preempted")
    assert first.message == "the programs of code.command ended within the grace period"
    assert sorted(path.name for path in run.path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert "never reached" not in "".join(logs(run, 1))
    assert ended(run, 2).reason == "done"
    lines = [log.splitlines()[0] for log in logs(run, 1)]
    assert lines == [f"two words; $HOME|{n} of 2, local {n} of 2, 127.0.0.1, {run.path}" for n in (0, 1)]
    assert run_status(run).state == "finished"


@pytest.mark.parametrize(
    ("script", "code", "reason", "requeue"),
    [("exit 93", 93, "crash", False), ("kill -9 $$", 1, "killed", True), ("sleep 600 & exit 0", 0, "done", False)],
)
def test_an_exit_code_has_its_documented_meaning(script: str, code: int, reason: str, requeue: bool) -> None:
    run = submitted(["sh", "-c", f"[ $SCALETRAIN_ATTEMPT = 1 ] || exit 0; {script}"])
    first = ended(run)
    assert (first.exit_code, first.reason, first.decision and first.decision.requeue) == (code, reason, requeue)
    if requeue:
        assert ended(run, 2).reason == "done"


def torchrun(tmp_path: Path, *words: str) -> RunDir:
    (tmp_path / "ranks.py").write_text(RANK_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", str(tmp_path / "ranks.py"), *words]
    return submitted(command, "code.processes_per_node=1")


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_a_node_and_they_save_when_preempted(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "train")
    preempt(run, 2)
    first = ended(run)
    assert (first.exit_code, first.reason) == (75, "preempted"), logs(run, 1)
    assert sorted(path.name for path in run.path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert len(logs(run, 1)) == 1
    second = ended(run, 2)
    assert second.reason == "done", logs(run, 2)


@pytest.mark.long
def test_the_failure_of_a_rank_below_torchrun_is_the_reason_of_the_attempt(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "nan")
    first = ended(run)
    assert (first.reason, first.decision and first.decision.requeue) == ("nan", True)
    assert first.message.startswith("rank 1 on node-0000-")


def test_a_hang_is_found_after_the_first_heartbeat_also_below_a_shell(tmp_path: Path) -> None:
    program = "import time; from scaletrain_cli.worker import Rank; rank = Rank.start(); "
    program += "rank.heartbeat.beat(1, 'step', 1.0); time.sleep(100_000)"
    script = f'[ $SCALETRAIN_ATTEMPT = 2 ] || "{sys.executable}" -c "{program}"'
    run = submitted(["bash", "-c", f"{script}; exit 0"], "cluster.gpus_per_node=1")
    first = ended(run)
    assert first.reason == "hang"
    assert "<module>" in (run.attempt(1) / "stacks" / "00000.txt").read_text()
    assert ended(run, 2).reason == "done"
