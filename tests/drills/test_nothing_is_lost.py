"""Kill, signal and preempt real runs at random moments; the result equals the undisturbed run to the bit."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import copies_folder
from scaletrain_cli.rundir.record import read_record
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, Drill, assert_same_run, differences, slowed, submit_drill

pytestmark = pytest.mark.drill
LAST_MOMENT = STEPS - 14
_RECOMPUTED = {"layout__activation_checkpointing": "selective"}
every_kind = pytest.mark.parametrize(
    ("kind", "asks", "workers"),
    [
        ({"layout__zero_stage": 0}, (signal.SIGTERM,), 0),
        ({"layout__zero_stage": 1, **_RECOMPUTED}, (signal.SIGUSR1,), 1),
        ({"layout__zero_stage": 2, "training__precision": "bf16"}, (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1), 0),
        ({"layout__zero_stage": 3, **_RECOMPUTED}, (signal.SIGTERM, signal.SIGTERM), 2),
    ],
    ids=["stage 0", "stage 1", "stage 2 in bf16", "stage 3"],
)


def test_a_rank_killed_and_a_preemption_under_the_node_agent_change_nothing(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues from the copy in host memory, and then from where the preemption stopped it."""
    monkeypatch.setenv(VARIABLE, slowed({1: 12, 2: 12}))
    drill = submit_drill(dataset, checkpoint__in_memory=1)
    drill.wait_for(lambda: list_checkpoints(drill.run.checkpoints) and drill.step() >= 13)
    os.kill(drill.rank_pids()[1], signal.SIGKILL)
    drill.wait_for(lambda: any(line["attempt"] == 2 for line in read_metrics(drill.run)))
    drill.preempt()
    drill.wait_for_end()
    assert [event["reason"] for event in drill.events("attempt-ended")] == ["killed", "preempted", "done"]
    assert [event["event"] for event in drill.beginnings()] == ["started", "resumed", "resumed"]
    _, killed, preempted = drill.beginnings()
    assert (killed["step"] > killed["saved_step"] >= 10, killed["lost_steps"] <= 1) == (True, True)
    assert ("saved_step" in preempted, preempted["lost_steps"]) == (False, 0)
    # The folder itself stays if the agent of another test looks at its lock meanwhile.
    assert not list(copies_folder(drill.run).glob("step-*"))
    assert_same_run(drill, undisturbed())


@pytest.mark.long
@every_kind
def test_a_rank_killed_and_a_preemption_at_random_steps_change_nothing(
    kind: dict[str, Any],
    asks: tuple[signal.Signals, ...],
    workers: int,
    dataset: Path,
    undisturbed: Undisturbed,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed run resumes from its latest checkpoint; a preempted one loses no step, however often.

    With reader processes as without.
    """
    monkeypatch.setenv(VARIABLE, slowed({1: LAST_MOMENT, 2: LAST_MOMENT}))
    drill = submit_drill(dataset, **kind, data__loader__workers=workers)
    drill.wait_for_step(chance.randrange(1, LAST_MOMENT))
    os.kill(chance.choice(drill.rank_pids()), signal.SIGKILL)
    begun = drill.wait_for(lambda: drill.beginnings()[1:])[0]["step"]
    moment = chance.randrange(begun + 1, max(begun + 2, LAST_MOMENT))
    drill.wait_for(lambda: any(line["step"] >= moment and line["attempt"] == 2 for line in read_metrics(drill.run)))
    agent = drill.agent_pid()
    for number in asks:
        os.kill(agent, number)
    drill.wait_for_end()
    assert [event["reason"] for event in drill.events("attempt-ended")][1:] == ["preempted", "done"]
    assert drill.beginnings()[2]["lost_steps"] == 0
    assert_same_run(drill, undisturbed(**kind))


def saving(drill: Drill) -> bool:
    return any(drill.run.checkpoints.glob("attempt-*.tmp/*/rank-*"))


@pytest.mark.long
def test_a_signal_inside_a_save_loses_no_step(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"slow-save seconds=0.4 attempt=1; {slowed({1: 21})}")
    drill = submit_drill(dataset)
    drill.wait_for(lambda: saving(drill))
    drill.preempt()
    drill.wait_for_end()
    assert [event["lost_steps"] for event in drill.events("resumed")] == [0]
    assert_same_run(drill, undisturbed())


@pytest.mark.long
def test_signals_to_starting_ranks_are_heard(dataset: Path, undisturbed: Undisturbed, chance: random.Random) -> None:
    drill = submit_drill(dataset)
    for _ in range(3):  # the interpreter, torch and DeepSpeed load for some seconds; hit anywhere in there
        pid = drill.agent_pid()
        time.sleep(chance.uniform(0, 2.5))
        os.kill(pid, signal.SIGTERM)
        drill.wait_for(lambda pid=pid: drill.agent_pid() != pid)
    drill.wait_for_end()
    assert [event["exit_code"] for event in drill.events("attempt-ended")] == [75, 75, 75, 0]
    assert_same_run(drill, undisturbed())


@pytest.mark.long
def test_a_killed_agent_leaves_no_rank_and_the_run_continues(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 16}))
    drill = submit_drill(dataset, data__loader__workers=2)
    drill.wait_for_step(15)
    ranks = drill.rank_pids()
    readers = [each.pid for rank in ranks for each in psutil.Process(rank).children()]
    assert len(readers) == 2 * len(ranks)
    os.kill(drill.agent_pid(), signal.SIGKILL)
    drill.wait_for_end()
    assert not [pid for pid in ranks + readers if Path(f"/proc/{pid}").exists()]
    assert_same_run(drill, undisturbed())


@pytest.mark.long
def test_replaced_data_stop_the_next_attempt(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 13}))
    folder = Path(shutil.copytree(dataset, tmp_path / "data"))
    drill = submit_drill(folder)
    drill.wait_for_step(12)
    tokens, other = folder / "000000" / "train.bin", folder / "other"
    other.write_bytes(bytes(tokens.stat().st_size))
    other.replace(tokens)
    os.kill(drill.rank_pids()[0], signal.SIGKILL)
    drill.wait_for_end()
    ended = drill.events("attempt-ended")[1:]
    assert [(event["exit_code"], event["reason"], event["requeue"]) for event in ended] == [(93, "data", False)]
    assert {(event["file"], event["attempt"]) for event in drill.events("damaged-data")} == {(str(tokens), 2)}
    assert not [line for line in read_metrics(drill.run) if line["attempt"] == 2]


@pytest.mark.long
def test_a_nan_stops_the_run_and_the_save_in_flight_becomes_a_clean_checkpoint(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nan rank=1 step=21; slow-save seconds=0.5")
    drill = submit_drill(dataset)
    drill.wait_for_end()
    ended = drill.events("attempt-ended")
    assert [(event["exit_code"], event["reason"], event["requeue"]) for event in ended] == [(93, "nan", False)]
    assert drill.losses() == undisturbed().losses()[:20]
    assert [checkpoint.step for checkpoint in list_checkpoints(drill.run.checkpoints)] == [10, 20]


@pytest.mark.long
def test_an_evaluation_that_a_signal_interrupts_is_repeated_by_the_next_attempt(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 21}))
    overrides = {"evaluation__batches": 30}
    drill = submit_drill(dataset, **overrides)
    drill.wait_for_step(20)
    drill.preempt()
    drill.wait_for_end()
    assert [event["exit_code"] for event in drill.events("attempt-ended")] == [75, 0]
    assert drill.events("preempted")[0]["step"] >= 20
    assert_same_run(drill, undisturbed(**overrides))


@pytest.mark.long
def test_a_stopped_rank_is_found(dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 16}))
    drill = submit_drill(dataset, guard__hang="10s")
    drill.wait_for_step(15)
    os.kill(drill.rank_pids()[1], signal.SIGSTOP)
    drill.wait_for_end()
    (hang,) = drill.events("hang")
    assert (hang["attempt"], hang["rank"]) == (1, 1)
    assert "does not respond: stopped by a signal (state T)" in hang["message"]
    stacks = {path.name: path.read_text() for path in (drill.run.attempt(1) / "stacks").iterdir()}
    assert list(stacks) == ["00000.txt"]
    assert "trainer.py" in stacks["00000.txt"]
    ended = drill.events("attempt-ended")
    assert [event["reason"] for event in ended] == ["hang", "done"]
    assert_same_run(drill, undisturbed())


@pytest.mark.long
def test_a_stopped_node_agent_is_continued_by_its_ranks_and_a_preemption_meanwhile_loses_no_step(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "slow-rank attempt=1 seconds=2 step=15")
    drill = submit_drill(dataset)
    drill.wait_for_step(15)
    agent = drill.agent_pid()
    for signum in (signal.SIGSTOP, signal.SIGUSR1):
        os.kill(agent, signum)
    drill.wait_for_end()
    assert [event["ends"] for event in drill.events("node-agent-stopped")] == [False]
    assert [event["reason"] for event in drill.events("attempt-ended")] == ["preempted", "done"]
    assert drill.beginnings()[1]["lost_steps"] == 0
    assert_same_run(drill, undisturbed())


@pytest.mark.long
def test_a_start_from_scratch_keeps_the_new_checkpoints(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 23, 2: 13}))
    drill = submit_drill(dataset, checkpoint__keep=1)
    drill.wait_for_step(22)
    drill.scheduler.cancel(drill.run, read_record(drill.run))
    drill.wait_for_end()
    for checkpoint in list_checkpoints(drill.run.checkpoints):
        (checkpoint.path / next(iter(checkpoint.files))).unlink()
    with pytest.raises(UsageError, match="--from-scratch"):
        resume(drill.run)
    resume(drill.run, from_scratch=True)
    drill.wait_for(lambda: list_checkpoints(drill.run.checkpoints)[-1:] and drill.step() >= 12)
    drill.preempt()
    drill.wait_for_end()
    assert drill.events("resumed")[-1]["step"] >= 12
    assert drill.events("finished")
    assert len(drill.losses()) == STEPS


def test_two_states_differ_if_one_bit_differs(undisturbed: Undisturbed) -> None:
    first, second = undisturbed().final_state(), undisturbed().final_state()
    assert differences(first, second) == []
    second["weight/model.norm.weight"][0] += 1e-7
    assert len(differences(first, second)) == 1


@pytest.mark.long
def test_a_slow_rank_is_reported_while_the_run_continues(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "slow-rank rank=1 seconds=0.2")
    drill = submit_drill(dataset)
    drill.wait_for_end()
    (reported,) = drill.events("stragglers")
    assert (reported["rank"], reported["step"]) == (1, 40)
    assert reported["seconds"] > max(0.2, reported["others_seconds"])
    assert str(run_status(drill.run).straggler).startswith("rank 1 computes")
