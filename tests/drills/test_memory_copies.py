"""Kill ranks of runs with copies in host memory: at most the steps between two copies are lost, and no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.worker.memory_copies import copies_folder
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import Drill, assert_same_run, drill_spec

pytestmark = pytest.mark.drill


def test_a_killed_rank_loses_one_step(dataset: Path, undisturbed: Undisturbed) -> None:
    run = ForkedRun.create(drill_spec(dataset, checkpoint__every=1000, checkpoint__in_memory=1))
    run.attempt(fault="sigkill rank=1 step=17")
    run.attempts_to_end()
    print(run.events("started", "resumed", "memory-copies", "memory-copies-off", "checkpoint"))
    assert [event["lost_steps"] for event in run.events("resumed")] == [1]
    assert_same_run(Drill(run.run, None), undisturbed(checkpoint__every=1000))  # type: ignore[arg-type]
