"""A run that resumes on other ranks trains on the same samples: its losses are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.rundir.record import read_record
from tests.cli.command_line import scaletrain
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, slowed, submit_drill

pytestmark = [pytest.mark.drill, pytest.mark.long]
LOSS_TOLERANCE = 1e-4  # of sums in another order


def test_a_cancelled_run_resumes_on_one_rank_and_then_on_four(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, slowed({1: 11, 2: 23}))
    drill = submit_drill(dataset)
    for size, step in ((1, 10), (4, 22)):
        drill.wait_for_step(step)
        assert scaletrain("cancel", drill.run.path).code == 0
        drill.wait_for_end()
        readers = ("--set", f"data.loader.workers={size // 2}")
        resumed = scaletrain("resume", drill.run.path, "--gpus-per-node", size, *readers, "--json")
        assert resumed.code == 0, resumed.err
        assert resumed.data["steps_lost"] == 0
        assert resumed.data["resize"]["after"]["layout"]["world_size"] == size
    drill.wait_for_end()
    assert read_record(drill.run).revision == 2
    assert drill.events("finished"), drill.events()
    assert len(drill.losses()) == STEPS
    assert drill.losses() == pytest.approx(undisturbed().losses(), rel=LOSS_TOLERANCE)
