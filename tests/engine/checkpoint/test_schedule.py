import pytest

from scaletrain_cli.engine.checkpoint.schedule import CheckpointSchedule


def due(schedule: CheckpointSchedule, steps: range) -> list[int]:
    """Return the steps at which a checkpoint is due, and record each as saved."""
    found = []
    for step in steps:
        if schedule.is_due(step):
            found.append(step)
            schedule.begin_at(step)
    return found


def test_checkpoints_are_due_at_multiples_of_every_wherever_the_run_begins() -> None:
    schedule = CheckpointSchedule(10, planned_interval_steps=3, seconds_between_losses=100.0)
    schedule.begin_at(7)
    assert due(schedule, range(7, 42)) == [10, 20, 30, 40]
    schedule.step_took(1.0)
    schedule.save_took(5.0, 9.0)
    assert due(schedule, range(41, 62)) == [50, 60]


def test_with_auto_the_first_interval_is_that_of_the_plan() -> None:
    assert due(CheckpointSchedule("auto", 6, seconds_between_losses=1e4), range(20)) == [6, 12, 18]


def test_the_interval_follows_youngs_formula_for_measured_saves() -> None:
    """sqrt(2 x 0.5 s x 10,000 s) = 100 s of steps of 2 s."""
    schedule = CheckpointSchedule("auto", 6, seconds_between_losses=10_000.0)
    schedule.begin_at(6)
    schedule.step_took(2.0)
    schedule.save_took(0.5, 1.0)
    assert schedule.interval_steps == 50
    assert due(schedule, range(6, 120)) == [56, 106]


@pytest.mark.parametrize(("blocked", "whole", "expected"), [(0.001, 40.0, 20), (0.0, 0.0, 1), (90.0, 90.0, 671)])
def test_the_interval_is_at_least_the_seconds_of_a_save(blocked: float, whole: float, expected: int) -> None:
    schedule = CheckpointSchedule("auto", 6, seconds_between_losses=10_000.0)
    schedule.step_took(2.0)
    schedule.save_took(blocked, whole)
    assert schedule.interval_steps == expected


def test_one_slow_save_does_not_change_the_interval() -> None:
    schedule = CheckpointSchedule("auto", 6, seconds_between_losses=10_000.0)
    schedule.step_took(2.0)
    for blocked in (0.5, 0.5, 200.0):
        schedule.save_took(blocked, blocked)
    assert schedule.interval_steps == 50
