import json
import math
import random
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from scaletrain_cli.plan.catalogue.hardware import accelerator_names, find_accelerator
from scaletrain_cli.plan.planning import Measurements, make_plan
from scaletrain_cli.plan.ranges import (
    Quantiles,
    architecture_of,
    chance_within,
    find_error,
    regime_of,
    share_below,
    step_range,
)
from scaletrain_cli.plan.result import RunPlan, Time
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import DATA_ALONE, spec_of
from tests.plan.test_calibration import measurement_of

ERRORS: dict[str, Any] = json.loads(
    files("scaletrain_cli.plan.catalogue").joinpath("errors.json").read_text(encoding="utf-8")
)
CELL = {"p10": 0.9, "p50": 1.0, "p90": 1.2, "n": 9, "sources": ["a", "b"]}


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return spec_of("llama-7b", cluster__gpu="h100-sxm-80gb", planner__framework="fsdp", **DATA_ALONE)


@pytest.fixture(scope="module")
def plan(spec: RunSpec) -> RunPlan:
    return make_plan(spec)


def time_of(plan: RunPlan, **changes: float) -> Time:
    return replace(plan.time, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "regime"),
    [
        ({}, "usual sizes"),
        ({"cluster__nodes": 4}, "usual sizes"),
        ({"training__micro_batch_size": 1, "model__seq_len": 2048}, "small micro-batches"),
        ({"layout__tensor_parallel": 4, "layout__pipeline_parallel": 2}, "usual sizes"),
        ({"cluster__nodes": 4, "layout__pipeline_parallel": 4}, "pipeline between nodes"),
        ({"layout__offload": "optimizer"}, "offload"),
        ({"layout__activation_offload": True}, "offload"),
        ({"model__seq_len": 65536, "model__max_position_embeddings": 65536}, "usual sizes"),
        ({"preset": "gpt2"}, "tiny model"),
    ],
)
def test_the_regime_is_what_limits_a_run(overrides: dict[str, Any], regime: str) -> None:
    spec = spec_of(**{"preset": "llama-7b", **DATA_ALONE, **overrides})
    assert regime_of(spec, make_plan(spec).layout) == regime


@pytest.mark.parametrize(
    ("preset", "overrides", "name"),
    [
        ("nemotron-h-8b", {"cluster__nodes": 4}, "state-space layers"),
        ("llama-4-scout", {"cluster__nodes": 32}, "chunked attention"),
        ("deepseek-v3.2", {"cluster__nodes": 128}, "sparse attention"),
        ("llama-7b", {"training__local_sgd": {"groups": 2}}, "local SGD"),
        ("llama-7b", {"training__precision": "fp4", "cluster__gpu": "b200-sxm-180gb"}, "fp4"),
    ],
)
def test_what_no_published_run_has_gets_the_range_of_usual_runs(
    preset: str, overrides: dict[str, Any], name: str
) -> None:
    spec = spec_of(preset, layout__activation_checkpointing="full", training__micro_batch_size=1, **overrides)
    plan = make_plan(spec)
    assert regime_of(spec, plan.layout) == name
    for error in (plan.ranges.time, plan.ranges.memory):
        assert (error.calibrated, error.regime, error.measured_regime) == (False, name, "usual sizes")
        assert error.measured_framework == "deepspeed"
    assert plan.ranges.step_seconds.p10 < plan.time.step < plan.ranges.step_seconds.p90


def test_every_device_of_the_catalogue_has_an_architecture() -> None:
    names = {architecture_of(find_accelerator(spec_of(cluster__gpu=name).cluster)) for name in accelerator_names()}
    assert {"cpu", "volta", "ampere", "ada", "hopper", "blackwell", "cdna3"} <= names


def test_a_range_has_the_percentiles_of_the_error_and_contains_the_plan(plan: RunPlan) -> None:
    found = step_range(plan.time, Quantiles(0.9, 1.0, 1.2))
    assert (found.p10, found.p90) == pytest.approx((0.9 * plan.time.step, 1.2 * plan.time.step), rel=1e-4)
    slow = step_range(plan.time, Quantiles(1.1, 1.2, 1.4))
    assert (slow.p10, slow.p90) == pytest.approx((plan.time.step, 1.4 * plan.time.step), rel=1e-4)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.8])
def test_a_run_that_may_stall_has_the_percentiles_of_the_mixture(plan: RunPlan, chance: float) -> None:
    """Against drawn runs."""
    stall = 2 * plan.time.step
    time = time_of(
        plan, stall_probability=chance, stall_seconds=stall, step=plan.time.step + (stall if chance > 0.5 else 0.0)
    )
    assert time.unstalled == pytest.approx(plan.time.step)
    mean = plan.time.step + chance * stall
    assert time.expected == pytest.approx(mean if chance < 0.5 else time.step)
    draw = random.Random(0)
    wide = math.log(1.1) / 1.2816
    drawn = sorted(
        (plan.time.step + (stall if draw.random() < chance else 0.0)) * math.exp(draw.gauss(0.0, wide))
        for _ in range(20_000)
    )
    error = Quantiles(1 / 1.1, 1.0, 1.1)
    found = step_range(time, error)
    assert found.p10 == pytest.approx(drawn[2_000], rel=0.03)
    assert found.p90 == pytest.approx(max(time.step, drawn[18_000]), rel=0.03)
    assert share_below(time, error, drawn[10_000]) == pytest.approx(0.5, abs=0.02)


def test_the_architecture_counts_before_its_neighbors_and_these_before_all() -> None:
    cells = [
        {"regime": "usual sizes", "hardware": "", **CELL},
        {"regime": "usual sizes", "hardware": "volta", **CELL, "p90": 1.1},
        {"regime": "usual sizes", "hardware": "ampere", **CELL, "p90": 1.3},
        {"regime": "offload", "hardware": "ampere", **CELL, "p90": 2.0},
    ]
    other = [{"regime": "images", "hardware": "hopper", **CELL, "p90": 1.4}]
    errors = {
        "apart": 0.1,
        "frameworks": {"fsdp": {"runs": 9, "cells": cells}, "megatron": {"runs": 3, "cells": other}},
    }

    def found(regime: str, hardware: str, framework: str = "fsdp") -> tuple[str, str, str, float, bool]:
        error = find_error(errors, framework, regime, hardware)
        measured = error.measured_framework, error.measured_regime, error.measured_hardware
        return *measured, error.p90, not error.calibrated

    def wider(p90: float) -> float:
        return pytest.approx(math.exp(math.hypot(math.log(p90), 0.1)))

    assert found("usual sizes", "ampere") == ("fsdp", "usual sizes", "ampere", 1.3, False)
    assert found("usual sizes", "volta") == ("fsdp", "usual sizes", "volta", 1.1, False)
    assert found("usual sizes", "hopper") == ("fsdp", "usual sizes", "ampere", wider(1.3), True)
    assert found("usual sizes", "turing") == ("fsdp", "usual sizes", "ampere", wider(1.3), True)  # the newer of two
    assert found("usual sizes", "xe-hpc") == ("fsdp", "usual sizes", "", wider(1.2), True)
    assert found("offload", "hopper") == ("fsdp", "offload", "ampere", wider(2.0), True)
    assert found("images", "hopper") == ("megatron", "images", "hopper", wider(1.4), True)
    assert found("sparse attention", "ampere") == ("fsdp", "usual sizes", "ampere", wider(1.3), True)
    assert found("usual sizes", "ampere", "megatron") == ("fsdp", "usual sizes", "ampere", wider(1.3), True)
    assert find_error(errors, "fsdp", "usual sizes", "cpu") is None


@pytest.mark.parametrize("quantity", ["time", "memory"])
def test_the_data_file_has_ordered_percentiles_and_covers_what_they_promise(quantity: str) -> None:
    assert ERRORS["date"]
    for name, framework in ERRORS[quantity]["frameworks"].items():
        for cell in framework["cells"]:
            assert 0 < cell["p10"] <= cell["p50"] <= cell["p90"], (name, cell)
            assert cell["n"] >= 5
            assert cell["sources"]
        for regime, found in framework["regimes"].items():
            if found["runs_left_out"] >= 20:
                assert 0.75 <= found["inside"] <= 0.85, (name, regime)


def test_the_figures_of_a_plan_have_ranges_in_proportion(plan: RunPlan) -> None:
    ranges = plan.ranges
    assert ranges.time.calibrated
    assert ranges.time.basis == "published runs"
    assert ranges.step_seconds.p10 < plan.time.step < ranges.step_seconds.p90
    ratio = ranges.step_seconds.p90 / plan.time.step
    assert ranges.to_train_seconds.p90 == pytest.approx(ratio * plan.time.to_train)
    assert ranges.on_demand_usd.p90 == pytest.approx(ratio * (plan.cost.on_demand.usd or 0))
    data = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert data["ranges"]["step_seconds"]["p90"] == ranges.step_seconds.p90
    assert data["ranges"]["time"]["n"] == ranges.time.n


@pytest.mark.parametrize("gpu", ["mi300x-192gb", "b200-sxm-180gb", "rtx-4090-24gb"])
def test_a_device_that_nobody_measured_has_a_wider_range_of_the_nearest(gpu: str) -> None:
    ranges, measured = (
        make_plan(spec_of("llama-7b", cluster__gpu=name, layout__zero_stage=3, **DATA_ALONE)).ranges
        for name in (gpu, "a100-sxm-80gb")
    )
    assert (ranges.time.calibrated, measured.time.calibrated) == (False, True)
    assert ranges.time.measured_hardware == measured.time.measured_hardware == "ampere"
    assert ranges.time.p90 / ranges.time.p10 > measured.time.p90 / measured.time.p10


def test_ranks_on_cpus_have_no_range() -> None:
    ranges = make_plan(spec_of("gpt2", cluster__gpu="cpu", cluster__gpus_per_node=2)).ranges
    assert not ranges.time.calibrated
    assert (ranges.step_seconds, ranges.to_train_seconds, ranges.expected_usd) == (None, None, None)


def test_the_probability_of_limits_follows_from_the_range(plan: RunPlan) -> None:
    wall, cost, ranges = plan.durability.wall_seconds, plan.cost.expected_usd, plan.ranges
    assert chance_within(plan, ranges.wall_seconds.p90, None) == pytest.approx(0.9, abs=1e-3)
    assert chance_within(plan, None, ranges.expected_usd.p90) == pytest.approx(0.9, abs=1e-3)
    assert chance_within(plan, ranges.time.p50 * wall, None) == pytest.approx(0.5, abs=1e-3)
    tighter = chance_within(plan, 0.9 * wall, None)
    assert chance_within(plan, 0.9 * wall, 2 * cost) == tighter < 0.2
    assert chance_within(plan, None, None) is None
    unknown = replace(plan, ranges=replace(ranges, time=replace(ranges.time, basis="")))
    assert chance_within(unknown, wall, None) is None


def test_own_measurements_replace_published_ones(spec: RunSpec, plan: RunPlan) -> None:
    ranges = make_plan(spec, Measurements((measurement_of(spec, 1.3, plan),))).ranges
    assert (ranges.time.basis, ranges.time.n) == ("own runs", 1)
    measured = (0.9 * 1.3 * plan.time.step, 1.1 * 1.3 * plan.time.step)
    assert (ranges.step_seconds.p10, ranges.step_seconds.p90) == pytest.approx(measured)
