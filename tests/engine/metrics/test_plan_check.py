from pathlib import Path

from scaletrain_cli.rundir.measured import read_measured
from tests.engine.parity.layouts import begun_run, train_rank
from tests.engine.parity.rows import Row, with_features
from tests.engine.ranks import on_ranks

STEPS = 8


def test_a_run_whose_first_steps_overflow_is_measured_later(dataset: Path) -> None:
    """Before that the optimizer has no moments."""
    overflowing = ("training.precision=fp16", "training.loss_scale.initial=1048576", "training.loss_scale.hysteresis=1")
    spec = with_features(Row(1, data=2), "overflows", *overflowing).spec(dataset, STEPS)
    run = begun_run(spec)
    on_ranks(2, train_rank, run.path, 1, STEPS, connected=False)
    measured = read_measured(run)
    assert measured.step > 2
    assert measured.model_states.difference == 0
