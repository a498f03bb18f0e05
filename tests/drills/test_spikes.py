"""A run with a loss spike reaches, in one attempt, the state of a run that skipped the bad data from the start."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import assert_same_run, submit_drill

pytestmark = [pytest.mark.drill, pytest.mark.long]


@pytest.mark.parametrize(
    "kind",
    [
        {"layout__zero_stage": 2, "training__averaging": "{name: ema, every: 1, decay: 0.9}"},
        {"layout__zero_stage": 3, "training__precision": "bf16"},
        {"layout__zero_stage": 1, "layout__pipeline_parallel": 2},
    ],
    ids=["stage 2 with averages", "stage 3 in bf16", "pipeline"],
)
def test_a_spike_is_found_within_the_patience_and_its_data_are_skipped_as_if_from_the_start(
    kind: dict[str, Any], dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "spike step=26-28 factor=20")
    drill = submit_drill(dataset, **kind)
    drill.wait_for_end()
    (back,) = drill.events("rolled-back")
    assert (back["from_step"], back["to_step"], back["skip"]) == (28, 10, [23, 28])
    assert (back["cause"], back["steps"]) == ("spike", [26, 27, 28])
    assert min(back["losses"]) > 3 * back["median_loss"]
    assert [event["reason"] for event in drill.events("attempt-ended")] == ["done"]
    monkeypatch.delenv(VARIABLE)
    assert_same_run(drill, undisturbed(data__skip="[[23, 28]]", **kind))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_nan_in_the_data_is_skipped_where_the_guard_may_roll_back(
    stage: int, dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"layout__zero_stage": stage, "guard__nan": "rollback"}
    monkeypatch.setenv(VARIABLE, "spike step=31 factor=nan")
    drill = submit_drill(dataset, **kind)
    drill.wait_for_end()
    (back,) = drill.events("rolled-back")
    assert (back["from_step"], back["to_step"], back["skip"]) == (31, 20, [30, 31])
    assert (back["cause"], back["loss"]) == ("nan", None)  # JSON has no NaN
    monkeypatch.delenv(VARIABLE)
    assert_same_run(drill, undisturbed(data__skip="[[30, 31]]", **kind))


@pytest.mark.parametrize("in_memory", ["off", 1])
def test_a_kill_right_after_a_rollback_does_not_bring_the_bad_data_back(
    in_memory: object, dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slow, so that it is killed on its way from the checkpoint; the rank that is killed never gets to the end.
    slow = "slow-rank rank=0 seconds=0.2 attempt=1; slow-rank rank=1 step=40 seconds=600 attempt=1"
    monkeypatch.setenv(VARIABLE, f"spike step=26-28 factor=20; {slow}")
    drill = submit_drill(dataset, checkpoint__in_memory=in_memory)
    drill.wait_for(lambda: drill.events("rolled-back"))
    os.kill(drill.rank_pids()[1], signal.SIGKILL)
    drill.wait_for_end()
    assert [event["reason"] for event in drill.events("attempt-ended")] == ["killed", "done"]
    assert len(drill.events("rolled-back")) == 1
    monkeypatch.delenv(VARIABLE)
    assert_same_run(drill, undisturbed(data__skip="[[23, 28]]"))


def test_a_spike_that_returns_stops_the_run_with_the_evidence(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "spike step=24-900 factor=20")
    drill = submit_drill(dataset, guard__spike__retries=2)
    drill.wait_for_end()
    backs = drill.events("rolled-back")
    assert [(back["to_step"], back["retry"]) for back in backs] == [(10, 1), (10, 2)]
    assert backs[0]["skip"][1] < backs[1]["skip"][1]
    (ended,) = drill.events("attempt-ended")
    assert (ended["exit_code"], ended["reason"], ended["requeue"]) == (93, "spike", False)
    assert "after 2 rollbacks to step 10" in ended["message"]
    assert list_checkpoints(drill.run.checkpoints)[0].clean


def test_a_spike_before_any_clean_checkpoint_is_recorded_only(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "spike step=14-16 factor=20")
    drill = submit_drill(dataset, training__steps=18)
    drill.wait_for_end()
    (reported,) = drill.events("spike")
    assert reported["step"] == 16
    assert "no checkpoint is known to be clean" in reported["then"]
    assert drill.events("finished")
