"""Measured step times correct those of later plans, as far as they apply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaletrain_cli.plan.calibration import Measurement, find_calibration, samples_length, workload_text
from scaletrain_cli.plan.planning import Measurements, make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of

PARTS = ("compute", "exposed_communication", "bubble", "optimizer", "data_wait")


def measurement_of(spec: RunSpec, factor: float, plan: RunPlan | None = None, **changes: object) -> Measurement:
    """Return a measurement of this run whose steps took ``factor`` times as long as planned, up to 10 % off."""
    plan = plan or make_plan(spec)
    seconds = factor * plan.time.step
    found = Measurement(
        gpu="h100-sxm-80gb",
        machine="",
        family=spec.model.family,
        precision=spec.training.precision,
        framework=spec.planner.framework,
        workload=workload_text(spec),
        parameters=plan.model.parameters,
        samples_length=samples_length(spec),
        nodes=spec.cluster.nodes,
        layout=plan.layout,
        seconds=seconds,
        low=0.9 * seconds,
        high=1.1 * seconds,
        steps=100,
        planned_seconds=plan.time.step,
        measured=1.7e9,
        source="run",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return spec_of("llama-7b", cluster__gpu="h100-sxm-80gb")


@pytest.fixture(scope="module")
def plan(spec: RunSpec) -> RunPlan:
    return make_plan(spec)


def test_a_plan_of_a_measured_run_has_its_measured_step_time(spec: RunSpec, plan: RunPlan) -> None:
    found = make_plan(spec, Measurements((measurement_of(spec, 1.3, plan),)))
    assert found.layout == plan.layout
    assert found.time.step == pytest.approx(1.3 * plan.time.step)
    assert sum(getattr(found.time, name) for name in PARTS) == pytest.approx(found.time.step)
    assert found.time.tokens_per_second == pytest.approx(plan.time.tokens_per_second / 1.3)
    assert found.time.mfu == pytest.approx(plan.time.mfu / 1.3)
    assert found.time.to_train == pytest.approx(1.3 * plan.time.to_train)
    assert found.calibration is not None
    assert (found.calibration.low, found.calibration.high) == pytest.approx((0.9 * 1.3, 1.1 * 1.3))
    assert found.calibration.same_workload
    assert [each.step_seconds for each in found.alternatives] == pytest.approx(
        [1.3 * each.step_seconds for each in plan.alternatives]
    )
    assert found.cost.on_demand_usd == pytest.approx(1.3 * (plan.cost.on_demand_usd or 0))
    assert "plan.calibrated-same" in [reason.code for reason in found.assumptions]


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": "a100-sxm-80gb"},
        {"family": "gpt"},
        {"precision": "fp8"},
        {"framework": "fsdp"},
        {"machine": "another"},
        {"parameters": 10**6, "workload": "another"},
    ],
)
def test_measurements_of_other_hardware_or_work_do_not_apply(
    changes: dict[str, object], spec: RunSpec, plan: RunPlan
) -> None:
    other = measurement_of(spec, 2.0, plan, **changes)
    assert find_calibration(spec, plan.model, plan.layout, [other], "this") is None


def test_the_same_layout_counts_before_similar_ones(spec: RunSpec, plan: RunPlan) -> None:
    same = [measurement_of(spec, factor, plan, measured=1.7e9 + factor) for factor in (1.1, 1.2, 1.5)]
    larger = replace(plan.layout, micro_batch_size=4 * plan.layout.micro_batch_size)
    similar = measurement_of(spec, 3.0, plan, layout=larger, measured=1.8e9)
    found = find_calibration(spec, plan.model, plan.layout, [similar, *same])
    assert found is not None
    assert (found.factor, found.runs, found.same_workload) == (pytest.approx(1.2), 3, True)
    alone = find_calibration(spec, plan.model, plan.layout, [similar])
    assert alone is not None
    assert not alone.same_workload


def test_communication_of_other_nodes_is_as_planned() -> None:
    """One node was measured, and the run has four."""
    large = spec_of("llama-7b", cluster__gpu="h100-sxm-80gb", cluster__nodes=4, layout__zero_stage=3)
    plan = make_plan(large)
    measured = measurement_of(large, 1.5, plan, nodes=1, workload="of one node")
    found = make_plan(large, Measurements((measured,)))
    planned = plan.time.exposed_communication
    assert planned > 0
    assert found.time.exposed_communication == pytest.approx(planned)
    assert found.time.step == pytest.approx(1.5 * (plan.time.step - planned) + planned)
    assert "plan.calibrated-other-nodes" in [reason.code for reason in found.assumptions]
