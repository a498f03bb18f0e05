from dataclasses import replace

import pytest

from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.plan.planning import plan_or_raise
from scaletrain_cli.plan.reliability.node_sizes import (
    NodeSize,
    break_even,
    growth,
    largest_usable,
    least_size_problem,
    mark_slower,
    plan_sizes,
    usable_plans,
    usable_sizes,
)
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import DATA_ALONE, spec_of


def planned(spec: RunSpec) -> RunPlan:
    return plan_or_raise(spec, compared=False)


def sizes_of(least: int, most: int, **overrides: object) -> tuple[RunSpec, tuple[NodeSize, ...]]:
    spec = spec_of("llama-7b", cluster__nodes={"min": least, "max": most}, **overrides)
    return spec, plan_sizes(spec, planned)


def test_every_size_has_the_same_batch_and_a_size_that_does_not_divide_is_never_used() -> None:
    _, sizes = sizes_of(1, 4, **DATA_ALONE)
    assert [size.nodes for size in sizes] == [1, 2, 3, 4]
    assert usable_sizes(sizes) == (1, 2, 4)
    assert {plan.layout.global_batch_size for plan in usable_plans(sizes).values()} == {256}
    assert {plan.layout.world_size for plan in usable_plans(sizes).values()} == {8, 16, 32}
    assert sizes[2].why_not.code == "plan.cluster-does-not-divide"
    assert "must be a multiple of" in sizes[2].to_json()["why_not"]


def test_a_size_that_does_not_fit_is_not_used_and_as_the_smallest_one_refuses_the_range() -> None:
    spec, sizes = sizes_of(1, 4, model__num_hidden_layers=320, layout__offload="none")
    assert sizes[0].why_not.code == "plan.cluster-does-not-fit"
    assert sizes[-1].why_not is None
    problem = least_size_problem(spec, sizes)
    assert problem.key == "cluster.nodes.min"
    assert f"Set cluster.nodes.min to {usable_sizes(sizes)[0]} or more." in str(problem)


def test_a_size_that_is_no_faster_than_fewer_nodes_is_not_used() -> None:
    plan = make_plan(spec_of())
    steps = {1: 4.0, 2: 2.0, 3: 2.5, 4: 1.9}
    sizes = mark_slower(NodeSize(n, replace(plan, time=replace(plan.time, step=step))) for n, step in steps.items())
    assert usable_sizes(sizes) == (1, 2, 4)
    assert str(sizes[2].why_not) == "a step takes 2.50 s, no less than the 2 s on 2 nodes"


def test_the_largest_size_that_a_job_can_use_is_at_most_what_it_got() -> None:
    assert [largest_usable((2, 4, 8), nodes) for nodes in (1, 2, 3, 7, 8, 9)] == [None, 2, 2, 4, 8, 8]


def plans(cost: float, between: float) -> dict[int, RunPlan]:
    """Return a run of 10,000 s on 2 nodes and 5,000 s on 4, where a save takes 0 s and a restart ``cost``."""
    plan = make_plan(spec_of())
    durability = replace(plan.durability, save_seconds=0.0, restart_seconds=cost, seconds_between_interruptions=between)
    return {
        nodes: replace(plan, durability=durability, time=replace(plan.time, step=step, to_train=1000 * step))
        for nodes, step in ((2, 10.0), (4, 5.0))
    }


@pytest.mark.parametrize(
    ("cost", "between", "left", "pace", "gain"),
    [
        (300, 1e9, 1.0, 1.0, 5000.0),  # half of the time that is left
        (300, 1e9, 0.05, 1.0, 250.0),  # near the end a restart does not pay
        (300, 1e9, 0.05, 2.0, 500.0),  # unless steps take longer than planned
        (300, 500, 1.0, 1.0, 250.0),  # nor if the next interruption is near
    ],
)
def test_a_restart_pays_if_it_saves_more_than_it_costs_before_the_next_interruption(
    cost: float, between: float, left: float, pace: float, gain: float
) -> None:
    found = growth(plans(cost, between), 2, 4, left=left, pace=pace)
    assert (found.cost_seconds, found.gain_seconds) == (cost, pytest.approx(gain))
    assert found.pays == (gain > cost)


def test_the_break_even_of_a_wait_is_the_start_and_the_later_save() -> None:
    found = plans(300, 1e9)
    assert break_even({4: found[4]}) is None
    why = break_even(found)
    assert (why.params["seconds"], why.params["rate"]) == (300.0, 0.5)
    assert str(why).startswith("on 2 nodes the run trains at 50 % of the rate of 4: to start on fewer pays if")
