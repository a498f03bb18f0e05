import statistics

import pytest
from goodput import AT_PUBLISHED_RATE, LARGER, PUBLISHED, Costs, costs_of, simulated

from scaletrain_cli.plan.reliability.durability import best_interval_steps, expected_goodput

HOUR, DAY = 3600.0, 86400.0
CHEAP = Costs(step=2.0, save=3.0, blocked=0.1, restart=60.0)


def test_without_interruptions_only_the_saves_and_the_one_start_are_lost() -> None:
    found = simulated(CHEAP, 1e9, DAY, seed=0)
    assert (found.lost_work, found.idle) == (0, 0)
    assert found.restore == 60
    assert found.productive + found.save + found.restore == pytest.approx(DAY)


def test_the_same_seed_simulates_the_same_interruptions() -> None:
    assert simulated(CHEAP, HOUR, DAY, seed=3) == simulated(CHEAP, HOUR, DAY, seed=3)
    assert simulated(CHEAP, HOUR, DAY, seed=3) != simulated(CHEAP, HOUR, DAY, seed=4)


def test_attempts_that_never_train_count_as_restart_time() -> None:
    found = simulated(Costs(step=2.0, save=3.0, blocked=0.1, restart=1e6), HOUR, DAY, seed=0)
    assert found.restore == pytest.approx(DAY)
    assert found.share == 0


@pytest.mark.parametrize(
    "costs", [pytest.param(CHEAP, marks=pytest.mark.long), *LARGER.values()], ids=["cheap", *LARGER]
)
def test_the_mean_goodput_is_that_of_the_plan(costs: Costs) -> None:
    between = 3 * HOUR
    interval = best_interval_steps(costs.step, costs.save, costs.blocked, 1 / between)
    planned = expected_goodput(interval * costs.step, costs.save, costs.blocked, costs.restart, 1 / between)
    shares = [simulated(costs, between, 10 * DAY, seed).share for seed in range(6)]
    assert statistics.fmean(shares) == pytest.approx(planned, abs=0.01)


def test_interruptions_at_even_distances_lose_a_restart_each() -> None:
    free = Costs(step=1.0, save=0.0, blocked=0.0, restart=100.0)
    found = simulated(free, 1000.0, 10_000.0, seed=0, limits=(1000.0, 1000.0))
    assert found.restore == pytest.approx(10 * 100, rel=0.01)
    assert found.share == pytest.approx(0.9, abs=0.01)


def test_copies_in_host_memory_keep_more_at_a_published_rate_of_failures() -> None:
    shares = {name: simulated(costs, 3600.0, DAY, 0, PUBLISHED).share for name, costs in AT_PUBLISHED_RATE.items()}
    assert shares["rank lost, copies in host memory"] > 0.95 > shares["rank lost, checkpoints on storage"]
    assert shares["node lost, copies on a second node"] > shares["node lost, checkpoints on storage"] + 0.05


def test_costs_are_read_from_the_journals_of_a_run_that_was_killed_once() -> None:
    metrics = [
        {"step": step, "attempt": attempt, "time": time, "step_seconds": 2.0}
        for step, attempt, time in ((1, 1, 102.0), (2, 1, 104.0), (2, 2, 136.0), (3, 2, 138.0))
    ]
    events = [{"event": "checkpoint", "seconds": 0.5, "blocked_seconds": 0.1}, {"event": "started"}]
    assert costs_of(metrics, events) == Costs(step=2.0, save=0.5, blocked=0.1, restart=30.0)
