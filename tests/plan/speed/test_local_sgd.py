from typing import Any

import pytest

from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.speed.step_time import stage_bytes
from tests.plan.specs import DATA_ALONE, spec_of

NODES = {
    "cluster__nodes": 4,
    "layout__activation_checkpointing": "selective",
    "layout__zero_stage": 1,
    "training__micro_batch_size": 1,
    **DATA_ALONE,
}


def planned(bandwidth: float | str, **settings: Any) -> RunPlan:
    return make_plan(spec_of(**NODES, cluster__inter_node_bandwidth=bandwidth, training__local_sgd=settings))


def about(plan: RunPlan) -> Any:
    (found,) = [warning for warning in plan.warnings if warning.code.startswith("plan.local-sgd")]
    return found


def test_groups_save_the_time_of_a_slow_network() -> None:
    together, apart = planned(1e9), planned(1e9, groups=4, inner_steps=50)
    assert apart.layout.local_sgd_groups == 4
    assert apart.time.step < together.time.step / 1.5
    reason = about(apart)
    assert reason.code == "plan.local-sgd-saves"
    assert reason.params["together"] == pytest.approx(together.time.step)
    least = reason.params["least"]
    assert planned(1e9, groups=4, inner_steps=least).time.step <= together.time.step
    if least > 1:
        assert planned(1e9, groups=4, inner_steps=least - 1).time.step > together.time.step


def test_groups_are_compared_with_the_fastest_layout_of_one_group() -> None:
    """One group on a slow network has a pipeline between the nodes, which groups of local SGD cannot have."""
    free = {"cluster__nodes": 4, "cluster__inter_node_bandwidth": 1e9}
    together = make_plan(spec_of("llama-7b", **free))
    apart = make_plan(spec_of("llama-7b", **free, training__local_sgd={"groups": 4, "inner_steps": 100}))
    assert (together.layout.pipeline_parallel, apart.layout.pipeline_parallel) == (8, 1)
    assert about(apart).params["together"] == together.time.step
    assert about(apart).params["times"] == together.time.step / apart.time.step


def test_an_outer_step_costs_its_all_reduce_divided_by_the_inner_steps() -> None:
    often, rarely = planned(1e9, groups=4, inner_steps=10), planned(1e9, groups=4, inner_steps=100)
    outer = about(often).params["outer"]
    assert often.time.step - rarely.time.step == pytest.approx(outer * (1 / 10 - 1 / 100))
    assert outer == pytest.approx(about(rarely).params["outer"])
    assert rarely.network.per_step_bytes.data < often.network.per_step_bytes.data


def test_an_outer_step_takes_as_long_if_it_is_the_only_one_of_the_run() -> None:
    often, once = (planned(1e9, groups=4, inner_steps=steps) for steps in (10, 10_000))
    assert once.time.to_train / once.time.step < 10_000, "fewer steps than inner steps"
    assert about(once).params["outer"] == pytest.approx(about(often).params["outer"])
    assert about(once).params["least"] == about(often).params["least"]


@pytest.mark.parametrize("muon", [False, True])
def test_the_bytes_of_a_stage_are_those_of_the_plan(muon: bool) -> None:
    # Muon's gradients take less memory in 16 bits, because DeepSpeed copies fp32 ones for their reduction.
    optimizer = {"training__optimizer": {"name": "muon"}, "training__grad_dtype": "bf16"} if muon else {}
    settings = {"groups": 4, "inner_steps": 10}
    spec = spec_of(**NODES, **optimizer, training__local_sgd=settings)
    plan = make_plan(spec)
    assert stage_bytes(spec, plan.layout, find_accelerator(spec.cluster), 0) == plan.network.per_step_bytes
    fewer = spec_of(**NODES, **optimizer, training__local_sgd={**settings, "inner_steps": 1})
    assert stage_bytes(fewer, plan.layout, find_accelerator(spec.cluster), 0).data > plan.network.per_step_bytes.data


def test_states_are_sharded_over_the_ranks_of_a_group_with_outer_weights_and_momentum() -> None:
    together, apart, plain = (
        planned("auto"),
        planned("auto", groups=4),
        planned("auto", groups=4, outer_optimizer="sgd"),
    )
    assert apart.memory.optimizer_states == pytest.approx(4 * together.memory.optimizer_states * 20 / 12, rel=1e-3)
    assert plain.memory.optimizer_states == pytest.approx(4 * together.memory.optimizer_states * 16 / 12, rel=1e-3)


def test_an_outer_step_after_each_step_is_too_often_and_on_nvlink_groups_save_nothing() -> None:
    assert about(planned(1e9, groups=4, inner_steps=1)).code == "plan.local-sgd-too-often"
    one_node = spec_of(
        "gpt2", layout__zero_stage=1, training__local_sgd={"groups": 8, "inner_steps": 100}, **DATA_ALONE
    )
    assert about(make_plan(one_node)).code == "plan.local-sgd-saves-nothing"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"layout__pipeline_parallel": 2}, "not with 2 groups of local SGD"),
        ({"layout__tensor_parallel": 8}, "must divide layout.data_parallel"),
    ],
)
def test_layouts_that_groups_rule_out_are_rejected(layout: dict[str, int], expected: str) -> None:
    with pytest.raises(InfeasibleError) as raised:
        make_plan(spec_of(**layout, training__local_sgd={"groups": 2}))
    assert any(expected in str(problem) for problem in raised.value.problems)
