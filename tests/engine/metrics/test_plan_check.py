from pathlib import Path

import pytest

from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.measured import read_measured
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.engine.parity.dataset import write_dataset
from tests.engine.parity.layouts import train_rank
from tests.engine.parity.rows import Row, with_features
from tests.engine.ranks import on_ranks

STEPS = 8


def test_a_run_whose_first_steps_overflow_is_measured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that the optimizer has no moments."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    overflowing = ("training.precision=fp16", "training.loss_scale.initial=1048576", "training.loss_scale.hysteresis=1")
    spec = with_features(Row(1, data=2), "overflows", *overflowing).spec(write_dataset(tmp_path), STEPS)
    run = create_run(spec, make_plan(spec)).run
    run.attempt(1).mkdir(parents=True)
    open_attempt(run.checkpoints, 1)
    on_ranks(2, train_rank, run.path, 1, STEPS, connected=False)
    measured = read_measured(run)
    assert measured.step > 2
    assert measured.model_states.difference == 0
