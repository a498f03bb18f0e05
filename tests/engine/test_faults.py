"""Injected faults hit the rank, step and attempt they name, and nothing else."""

import math
import signal

import pytest

from scaletrain_cli.engine.faults import Faults, InjectedError
from scaletrain_cli.errors import UsageError


def test_off_by_default() -> None:
    faults = Faults.from_environment(rank=0, attempt=1)
    faults.before_step(1)
    assert faults.save_delay_seconds == 0
    assert not faults.poisons_gradient(1)


def test_only_the_named_rank_step_and_attempt_are_hit() -> None:
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


def test_a_spike_is_in_the_data_whatever_the_step_or_rank() -> None:
    faults = Faults("spike step=20-22 factor=5; spike step=22", 1, 3)
    assert [faults.loss_factor(batch) for batch in (19, 20, 21, 22, 23)] == [1, 5, 5, 100, 1]
    assert math.isnan(Faults("spike step=4 factor=nan", 0, 1).loss_factor(4))


def test_delays_of_a_save_add_up() -> None:
    assert Faults("slow-save seconds=0.5; slow-save seconds=1 rank=0", 0, 1).save_delay_seconds == 1.5


@pytest.mark.parametrize(
    "text", ["explode step=1", "sigkill step=x", "sigkill when=1", "sigkill step", "spike step=3-x"]
)
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="SCALETRAIN_FAULT"):
        Faults(text, 0, 1)
