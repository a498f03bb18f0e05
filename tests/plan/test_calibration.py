from dataclasses import replace

import pytest

from scaletrain_cli.plan.calibration import Measurement, find_calibration, samples_length, workload_text
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.plan.planning import Measurements, make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.search.cluster_search import on_cluster
from scaletrain_cli.plan.speed.kernels import rates
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import ONE_LAYOUT, spec_of

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
def test_measurements_of_other_runs_do_not_apply(changes: dict[str, object], spec: RunSpec, plan: RunPlan) -> None:
    other = measurement_of(spec, 2.0, plan, **changes)
    assert find_calibration(spec, plan.model, plan.layout, [other], "this") is None


def test_the_same_layout_counts_before_similar_ones(spec: RunSpec, plan: RunPlan) -> None:
    same = [measurement_of(spec, factor, plan, measured=1.7e9 + factor) for factor in (1.1, 1.2, 1.5)]
    larger = replace(plan.layout, micro_batch_size=4 * plan.layout.micro_batch_size)
    similar = measurement_of(spec, 3.0, plan, layout=larger, measured=1.8e9)
    found = find_calibration(spec, plan.model, plan.layout, [similar, *same])
    assert (found.factor, found.runs, found.same_workload) == (pytest.approx(1.2), 3, True)
    alone = find_calibration(spec, plan.model, plan.layout, [similar])
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


def test_shares_of_the_spec_replace_those_of_the_catalogue() -> None:
    """The stated shares are the catalogue's, divided by two: each kind of kernel then takes twice as long."""
    row = rates(find_accelerator(spec_of("llama-7b").cluster), "bf16")
    peak = find_accelerator(spec_of("llama-7b").cluster)
    stated = {
        "matmul": row.matmul / peak.peak_flops("bf16") / 2,
        "attention": row.attention_forward / peak.peak_flops("bf16") / 2,
        "memory": row.memory / peak.memory_bandwidth / 2,
    }
    halved = rates(find_accelerator(spec_of("llama-7b", cluster__efficiency=stated).cluster), "bf16")
    for name in ("matmul", "attention_forward", "attention_backward", "memory"):
        assert getattr(halved, name) == pytest.approx(getattr(row, name) / 2)
    one = rates(find_accelerator(spec_of("llama-7b", cluster__efficiency={"memory": 0.5}).cluster), "bf16")
    assert (one.matmul, one.attention_backward) == (row.matmul, row.attention_backward)


def test_measured_figures_of_the_network_replace_those_of_the_catalogue() -> None:
    def seconds(**figures: float) -> tuple[float, float, float]:
        spec = spec_of("llama-7b", **ONE_LAYOUT, cluster__nodes=16, cluster__network_figures=figures)
        link = cluster_link(spec.cluster, find_accelerator(spec.cluster))
        return link.reduce(1e9, 128), link.gather(1e9, 128), link.send(1e9, 8)

    usual = seconds(latency=0.0)
    network_bytes = 50e9  # per second and GPU, of infiniband-ndr
    slow = seconds(all_reduce=0.1, latency=0.0)
    assert slow[0] == pytest.approx(2e9 * 127 / 128 / (8 * network_bytes * 0.1), rel=1e-3)
    assert slow[1:] == usual[1:]
    sent = 1e9 * 127 / 128
    assert seconds(all_gather=0.1, latency=0.0)[1] == pytest.approx(sent / (8 * network_bytes * 0.1), rel=1e-3)
    assert seconds(point_to_point=0.5, message_latency=0.25)[2] == pytest.approx(0.25 + 1e9 / (0.5 * network_bytes))


def test_shares_of_one_gpu_do_not_apply_to_another() -> None:
    spec = spec_of("llama-7b", cluster__efficiency={"matmul": 0.3})
    assert find_accelerator(on_cluster(spec, 1, "a100-sxm-80gb").cluster).efficiency == (None, None, None)
    assert find_accelerator(on_cluster(spec, 2).cluster).efficiency == (0.3, None, None)
