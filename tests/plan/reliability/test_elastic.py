"""Runs that follow a trace of capacity, computed by hand, and the comparison with waiting for all nodes."""

from dataclasses import replace

import pytest

from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.plan.reliability.elastic import compare_on_trace, simulate_sizes
from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.plan.reliability.spot_trace import SpotTrace
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import ONE_LAYOUT, spec_of


def run_of(**table: object) -> tuple[RunSpec, dict[int, RunPlan]]:
    """Return a run of 1,000 steps: 10 s each on 2 nodes and 5 s on 4; a restart takes 100 s, a save 20 s.

    A checkpoint is committed every 500 s and does not block training; there is no notice before a node is lost.
    """
    nodes = {"min": 2, "max": 4, "check_every": 100, "grow_every": 0, **table}
    spec = spec_of(**ONE_LAYOUT, cluster__nodes=nodes, cluster__spot=True, cluster__grace_seconds=0)
    plan = make_plan(spec)
    durability = replace(
        plan.durability,
        interval_seconds=500.0,
        blocked_seconds=0.0,
        save_seconds=20.0,
        restart_seconds=100.0,
        grace_ok=False,
        seconds_between_interruptions=1e9,
    )
    return spec, {
        nodes: replace(plan, durability=durability, time=replace(plan.time, step=step, to_train=1000 * step))
        for nodes, step in ((2, 10.0), (4, 5.0))
    }


def test_with_all_nodes_the_run_takes_one_start_and_its_steps() -> None:
    spec, plans = run_of()
    ended = simulate_sizes(spec, plans, [(1e6, 4)])
    assert ended.seconds == pytest.approx(100 + 5000)
    assert ended.node_seconds == pytest.approx(4 * 5100)
    assert (ended.interruptions, ended.growths, ended.waiting) == (0, 0, 0)


def test_a_run_that_loses_nodes_continues_on_what_is_left_from_its_last_checkpoint() -> None:
    """1,000 s on 4 nodes: 100 s to start, one checkpoint at 500 s: 500 of 5,000 s done. Then 90 % of 10,000 s on 2."""
    spec, plans = run_of(grow=False)
    ended = simulate_sizes(spec, plans, [(1000, 4), (1e6, 2)])
    assert ended.seconds == pytest.approx(1000 + 100 + 9000)
    assert ended.node_seconds == pytest.approx(4 * 1000 + 2 * 9100)
    assert ended.interruptions == 1


def test_a_run_returns_to_all_nodes_after_the_check_and_two_saves() -> None:
    """Nodes return at 2,000 s and are seen at 2,100 s; the run trains during the first save of 20 s, to 2,120 s."""
    spec, plans = run_of()
    ended = simulate_sizes(spec, plans, [(2000, 2), (1e6, 4)])
    done = (2120 - 100) / 10_000
    assert ended.seconds == pytest.approx(2140 + 100 + (1 - done) * 5000)
    assert (ended.interruptions, ended.growths) == (0, 1)


def test_a_run_without_enough_nodes_waits() -> None:
    spec, plans = run_of()
    ended = simulate_sizes(spec, plans, [(600, 1), (1e6, 4)])
    assert ended.seconds == pytest.approx(600 + 100 + 5000)
    assert ended.waiting == pytest.approx(600)


def test_a_job_holds_its_spare_nodes_beside_those_that_train() -> None:
    spec, plans = run_of(grow=False)
    spec = spec.with_changes("cluster", spare_nodes=1)
    assert simulate_sizes(spec, plans, [(1e6, 5)]).node_seconds == pytest.approx(5 * 5100)
    assert simulate_sizes(spec, plans, [(1e6, 4)]).node_seconds == pytest.approx(3 * 10_100)
    sizes = [NodeSize(nodes, plan) for nodes, plan in plans.items()]
    for nodes in (4, 5):  # all nodes of a trace of fewer stand for those that the job holds
        assert compare_on_trace(spec, sizes, SpotTrace("mine", ((1e6, nodes),))).waiting.waiting_hours.median == 0


def test_growing_again_waits_for_the_least_time_between_two_restarts() -> None:
    """Grown at 1,140 s, shrunk at 2,000 s; with grow_every 10,000 s the rest is trained on 2 nodes first."""
    spec, plans = run_of(grow_every=10_000)
    trace = [(1000.0, 2), (1000.0, 4), (1000.0, 2), (1e6, 4)]
    assert simulate_sizes(spec, plans, trace).growths == 1
    spec, plans = run_of()
    assert simulate_sizes(spec, plans, trace).growths == 2


def test_the_range_is_compared_with_waiting_for_all_nodes() -> None:
    spec, plans = run_of()
    sizes = [NodeSize(nodes, plan) for nodes, plan in plans.items()]
    outcome = compare_on_trace(spec, sizes, SpotTrace("mine", ((40_000.0, 2), (2_000.0, 4))))
    assert outcome.advice.code == "plan.range-pays"
    assert outcome.elastic.days.median < outcome.waiting.days.median
    samples = 1000 * 256
    assert outcome.elastic.samples_per_hour.median == pytest.approx(
        samples / (outcome.elastic.days.median * 24), rel=0.1
    )
    assert outcome.to_json()["advice"].startswith("on mine the run takes")


def test_a_run_that_would_wait_for_ever_needs_the_range() -> None:
    spec, plans = run_of()
    sizes = [NodeSize(nodes, plan) for nodes, plan in plans.items()]
    outcome = compare_on_trace(spec, sizes, SpotTrace("mine", ((3_600.0, 2), (60.0, 4))))
    assert (outcome.advice.code, outcome.waiting.finished) == ("plan.range-needed", 0)


def test_a_trace_of_fewer_nodes_is_scaled_to_the_run() -> None:
    spec, plans = run_of()
    sizes = [NodeSize(nodes, plan) for nodes, plan in plans.items()]
    whole = compare_on_trace(spec, sizes, SpotTrace("mine", ((5_000.0, 2), (5_000.0, 4))))
    half = compare_on_trace(spec, sizes, SpotTrace("mine", ((5_000.0, 1), (5_000.0, 2))))
    assert whole == half
