"""Checkpoint cadence, goodput, grace and dollars."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scaletrain_cli.plan import RunPlan, make_plan
from tests.plan.specs import spec_of


def plan_of(preset: str = "llama-7b", **overrides: Any) -> RunPlan:
    return make_plan(spec_of(preset, **{"cluster__nodes": 4, **overrides}))


def test_a_bf16_checkpoint_is_14_bytes_per_parameter() -> None:
    assert plan_of().durability.checkpoint_bytes == 14 * 6_738_415_616


def test_an_interval_of_auto_is_young_s() -> None:
    plan = plan_of(cluster__mean_time_between_interruptions="6h", checkpoint__async=False, training__steps=10**6)
    durability = plan.durability
    young = math.sqrt(2 * durability.save_seconds * 6 * 3600)
    assert durability.interval_seconds == pytest.approx(young, abs=plan.time.step)
    assert durability.interval_seconds == pytest.approx(durability.interval_steps * plan.time.step)


def test_a_stated_interval_is_kept() -> None:
    assert plan_of(checkpoint__every=123).durability.interval_steps == 123


def test_more_interruptions_mean_shorter_intervals_and_less_goodput() -> None:
    plans = [
        plan_of(cluster__mean_time_between_interruptions=hours, training__steps=10**6).durability
        for hours in ("100h", "10h", "1h")
    ]
    intervals, goodputs = [p.interval_steps for p in plans], [p.expected_goodput for p in plans]
    assert intervals == sorted(intervals, reverse=True)
    assert goodputs == sorted(goodputs, reverse=True)
    assert all(0 <= goodput <= 1 for goodput in goodputs)


def test_the_grace_period_must_hold_one_step_and_one_checkpoint() -> None:
    plan = plan_of(cluster__grace_seconds=10_000)
    enough = plan.durability.save_seconds + plan.time.step
    assert plan.durability.grace_ok
    assert plan_of(cluster__grace_seconds=math.ceil(enough)).durability.grace_ok
    short = plan_of(cluster__grace_seconds=math.floor(enough), cluster__spot=True)
    assert not short.durability.grace_ok
    assert any("more than cluster.grace_seconds" in warning for warning in short.warnings)


def test_without_a_price_the_cost_is_unknown_not_zero() -> None:
    cost = plan_of().cost
    assert cost.price_per_gpu_hour is cost.on_demand_usd is cost.spot_usd is cost.expected_usd is None
    assert "price_per_gpu_hour" in cost.price_source


def test_a_price_times_gpus_times_hours_is_the_cost() -> None:
    plan = plan_of(cluster__price_per_gpu_hour=2.5)
    bare = 2.5 * 32 * plan.time.to_train / 3600
    assert plan.cost.on_demand_usd == pytest.approx(bare)
    assert plan.cost.expected_usd == pytest.approx(bare / plan.durability.expected_goodput)
    assert plan.cost.spot_usd is None


def test_on_spot_the_price_is_the_spot_price() -> None:
    cost = plan_of(cluster__price_per_gpu_hour=1, cluster__spot=True).cost
    assert cost.on_demand_usd is None
    assert cost.spot_usd is not None
