import math
from dataclasses import replace
from typing import Any

import pytest

from scaletrain_cli.plan import RunPlan, find_accelerator, make_plan
from scaletrain_cli.plan.reliability.cost import plan_cost
from scaletrain_cli.plan.reliability.durability import (
    checkpoint_bytes,
    expected_goodput,
    interruptions_per_second,
    most_goodput,
    plan_durability,
    save_seconds,
    spare_nodes_pay_from,
    without_partners,
)
from tests.plan.specs import ONE_LAYOUT, spec_of


def plan_of(preset: str = "llama-7b", **overrides: Any) -> RunPlan:
    return make_plan(spec_of(preset, **{**ONE_LAYOUT, "cluster__nodes": 4, **overrides}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_checkpoint_has_12_bytes_per_parameter_in_every_layout(stage: int, precision: str) -> None:
    plan = plan_of(layout__zero_stage=stage, training__precision=precision)
    assert plan.durability.checkpoint_bytes == 12 * 6_738_415_616


def test_megatron_writes_the_weights_of_the_forward_pass_too() -> None:
    plan = plan_of(layout__zero_stage=1, planner__framework="megatron")
    assert plan.durability.checkpoint_bytes == 14 * 6_738_415_616


@pytest.mark.parametrize(("outer", "bytes_of_outer"), [("nesterov", 8), ("sgd", 4)])
def test_each_group_of_local_sgd_has_its_own_state_beside_the_outer_weights(outer: str, bytes_of_outer: int) -> None:
    settings = {"groups": 4, "outer_optimizer": outer}
    plan = plan_of(training__local_sgd=settings, layout__tensor_parallel=1, layout__pipeline_parallel=1)
    assert plan.durability.checkpoint_bytes == (4 * 12 + bytes_of_outer) * 6_738_415_616


def test_muon_has_one_moment_of_the_matrices_that_train_and_adamw_two_of_the_others() -> None:
    muon = {"name": "muon"}
    trainable = [{"match": ["*.down_proj.*", "*norm*"], "start_step": 5}, {"match": "lm_head.*", "end_step": 4}]
    plan = plan_of(training__optimizer=muon, training__trainable=trainable)
    matrices, norms, every = 32 * 4096 * 11008, 65 * 4096, 6_738_415_616
    assert plan.durability.checkpoint_bytes == 8 * matrices + 12 * norms + 2 * (every - matrices - norms)


def test_an_interval_of_auto_is_young_s() -> None:
    plan = plan_of(cluster__mean_time_between_interruptions="6h", checkpoint__async=False, training__steps=10**6)
    durability = plan.durability
    young = math.sqrt(2 * durability.save_seconds * 6 * 3600)
    assert durability.interval_seconds == pytest.approx(young, abs=plan.time.step)
    assert durability.interval_seconds == pytest.approx(durability.interval_steps * plan.time.step)


def test_on_spot_a_stated_mean_time_is_of_preemptions_and_failures_add() -> None:
    run = {"cluster__nodes": 16, "cluster__mean_time_between_interruptions": "3h"}
    for spot, expected in ((True, (1 / 10800, 128 / 3600 / 50_694)), (False, (0, 1 / 10800))):
        spec = spec_of(cluster__spot=spot, **run)
        rates = interruptions_per_second(spec, find_accelerator(spec.cluster))
        assert rates == pytest.approx(expected, rel=1e-3)


def test_preemptions_that_a_last_save_answers_do_not_shorten_the_interval() -> None:
    run = {"cluster__nodes": 16, "cluster__spot": True, "training__steps": 10**6, "checkpoint__async": False}
    warned = plan_of(cluster__grace_seconds=600, cluster__mean_time_between_interruptions="1h", **run)
    seldom = plan_of(cluster__grace_seconds=600, cluster__mean_time_between_interruptions="3h", **run)
    sudden = plan_of(cluster__grace_seconds=1, cluster__mean_time_between_interruptions="1h", **run)
    assert warned.durability.interval_steps == seldom.durability.interval_steps
    assert warned.durability.interval_steps > 5 * sudden.durability.interval_steps
    young = math.sqrt(2 * warned.durability.save_seconds * 3600 * 50_694 / 128)
    assert warned.durability.interval_seconds == pytest.approx(young, abs=warned.time.step)


def test_work_during_an_asynchronous_write_is_lost_too() -> None:
    """Two checkpoints of one interval: one that holds up training, one that is written beside it and whole later."""
    run = {"checkpoint__every": 200, "cluster__mean_time_between_interruptions": "100h"}
    held, beside = (plan_of(checkpoint__async=way, **run).durability for way in (False, True))
    late = beside.save_seconds - beside.blocked_seconds
    assert late > 0
    assert held.lost_work_seconds == pytest.approx((held.interval_seconds + held.save_seconds) / 2, rel=0.01)
    expected = (beside.interval_seconds + beside.blocked_seconds) / 2 + late
    assert beside.lost_work_seconds == pytest.approx(expected, rel=0.01)


def test_a_stated_interval_is_kept() -> None:
    assert plan_of(checkpoint__every=123).durability.interval_steps == 123


def test_the_grace_period_must_hold_one_step_and_one_checkpoint() -> None:
    plan = plan_of(cluster__grace_seconds=10_000)
    enough = plan.durability.save_seconds + plan.time.step
    assert plan.durability.grace_ok
    assert plan_of(cluster__grace_seconds=math.ceil(enough)).durability.grace_ok
    short = plan_of(cluster__grace_seconds=math.floor(enough), cluster__spot=True)
    assert not short.durability.grace_ok
    assert any("more than cluster.grace_seconds" in str(warning) for warning in short.warnings)


def test_saving_bloom_takes_as_long_as_its_chronicle_says() -> None:
    """2.3 TB in 40 s from 48 nodes (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md).

    The storage rate is derived from this, the size and who writes what are not.
    """
    shape = {
        "model__hidden_size": 14336,
        "model__num_hidden_layers": 70,
        "model__num_attention_heads": 112,
        "model__vocab_size": 250880,
    }
    spec = spec_of("gpt2", **shape, cluster__nodes=48, layout__tensor_parallel=4, layout__pipeline_parallel=12)
    layout = replace(plan_of().layout, tensor_parallel=4, pipeline_parallel=12, zero_stage=1)
    assert checkpoint_bytes(spec, layout) == pytest.approx(2.3e12, rel=0.1)
    assert save_seconds(spec, layout) == pytest.approx(40, rel=0.25)


def test_llama_3_at_its_size_keeps_over_90_percent_of_the_time() -> None:
    """More than 90 % effective training time with 419 unexpected interruptions in 54 days, arXiv:2407.21783, 3.3.4."""
    spec = spec_of("llama-405b", cluster__nodes=2048, training__global_batch_size=2048, training__steps=10**6)
    preemptions, failures = interruptions_per_second(spec, find_accelerator(spec.cluster))
    assert preemptions == 0
    assert failures * 54 * 86400 == pytest.approx(419)
    layout = replace(plan_of().layout, world_size=16384, tensor_parallel=8, pipeline_parallel=16, zero_stage=1)
    durability = plan_durability(spec, layout, replace(plan_of().time, step=10.0), find_accelerator(spec.cluster))
    assert 0.90 < durability.expected_goodput < 0.99


def test_spare_nodes_cost_their_share_and_shorten_the_restarts_after_failures() -> None:
    """Llama 3's 16,384 GPUs, a failure each 3.1 hours: a spare node of 2,048 is worth it from a wait of 11 s on, if it
    replaces the node of every other failure."""
    layout = replace(plan_of().layout, world_size=16384, tensor_parallel=8, pipeline_parallel=16, zero_stage=1)
    goodput, dollars = [], []
    for spare in (0, 1):
        settings = {"cluster__nodes": 2048, "training__global_batch_size": 2048, "training__steps": 10**6}
        spec = spec_of("llama-405b", **settings, cluster__scheduler="slurm", cluster__spare_nodes=spare)
        device, time = find_accelerator(spec.cluster), replace(plan_of().time, step=10.0)
        durability = plan_durability(spec, layout, time, device)
        goodput.append(durability.expected_goodput)
        dollars.append(plan_cost(spec, layout, time, durability).on_demand_usd or 0.0)
    failures = 419 / (54 * 86400)
    assert 1 / goodput[0] - 1 / goodput[1] == pytest.approx(failures * (180 - 60) / 2, rel=0.1)
    assert dollars[1] / dollars[0] == pytest.approx(2049 / 2048)
    assert spare_nodes_pay_from(spec, device) == pytest.approx(2 / 2048 / failures)


def test_opt_175b_lost_about_two_machines_a_day() -> None:
    """992 A100 (facebookresearch/metaseq, projects/OPT/chronicles/final_update.md)."""
    spec = spec_of(cluster__nodes=124, cluster__gpu="a100-sxm-80gb")
    _, failures = interruptions_per_second(spec, find_accelerator(spec.cluster))
    assert failures * 86400 == pytest.approx(2)


def test_goodput_is_that_of_kokolis_where_interruptions_are_rare() -> None:
    """arXiv:2410.21680: (1 - N r (u + dt / 2)) / (1 + w / dt), the first order of Daly's formula."""
    plan = plan_of(
        cluster__mean_time_between_interruptions="100h", checkpoint__every=100, checkpoint__async=False,
        cluster__storage_bandwidth="1TB/s",
    )  # fmt: skip
    d = plan.durability
    rate = 1 / (100 * 3600)
    kokolis = (1 - rate * (d.restart_seconds + d.interval_seconds / 2)) / (1 + d.blocked_seconds / d.interval_seconds)
    assert d.expected_goodput == pytest.approx(kokolis, rel=1e-3)
    assert d.lost_work_seconds == pytest.approx(d.interval_seconds / 2, rel=0.01)


def test_a_run_that_is_always_interrupted_never_finishes_and_does_not_overflow() -> None:
    plan = plan_of(cluster__mean_time_between_interruptions=0.001, checkpoint__every=1000)
    assert plan.durability.expected_goodput == 0
    assert plan.durability.wall_seconds is plan.durability.interruptions_expected is plan.cost.expected_usd is None


def test_interruptions_lost_work_and_calendar_follow_from_the_rate() -> None:
    plan = plan_of(cluster__mean_time_between_interruptions="2h", training__steps=10**5)
    d = plan.durability
    assert d.wall_seconds == pytest.approx(plan.time.to_train / d.expected_goodput)
    assert d.interruptions_expected == pytest.approx(d.wall_seconds / 7200)
    late = d.save_seconds - d.blocked_seconds
    assert late < d.lost_work_seconds <= (d.interval_seconds + d.blocked_seconds) / 2 + late


def test_a_mean_time_between_failures_of_nodes_is_divided_by_the_nodes() -> None:
    assert plan_of(cluster__per_node_mtbf="400h").durability.seconds_between_interruptions == pytest.approx(100 * 3600)


def test_a_notice_long_enough_for_a_checkpoint_loses_no_work() -> None:
    run = {"cluster__spot": True, "cluster__mean_time_between_interruptions": "1h", "checkpoint__every": 200}
    warned = plan_of(cluster__grace_seconds=600, **run).durability
    sudden = plan_of(cluster__grace_seconds=1, **run).durability
    assert warned.grace_ok
    assert warned.lost_work_seconds < 0.01 * sudden.lost_work_seconds  # failures of hardware come without notice
    assert warned.expected_goodput > sudden.expected_goodput


def test_a_faster_storage_saves_sooner() -> None:
    fast, slow = (plan_of(cluster__storage_bandwidth=rate).durability for rate in ("10GB/s", "1GB/s"))
    assert slow.save_seconds == pytest.approx(10 * fast.save_seconds)


def test_without_a_price_the_cost_is_unknown_not_zero() -> None:
    cost = plan_of(cluster__gpu="v100-pcie-32gb", training__precision="fp16", layout__zero_stage=3).cost
    assert cost.price_per_gpu_hour is cost.on_demand_usd is cost.spot_usd is cost.expected_usd is None
    assert cost.price_source.code == "plan.price-unknown"
    assert cost.spot.usd is None


def test_a_price_times_gpus_times_hours_is_the_cost() -> None:
    plan = plan_of(cluster__price_per_gpu_hour=2.5)
    bare = 2.5 * 32 * plan.time.to_train / 3600
    assert plan.cost.on_demand_usd == pytest.approx(bare)
    assert plan.cost.expected_usd == pytest.approx(bare / plan.durability.expected_goodput)
    assert str(plan.cost.price_source) == "the run spec"


def test_on_spot_the_price_is_the_spot_price() -> None:
    cost = plan_of(cluster__price_per_gpu_hour=1, cluster__spot=True).cost
    assert (cost.price_per_gpu_hour, cost.spot.price_per_gpu_hour) == (1, 1)
    assert cost.expected_usd == cost.spot.usd
    assert "list prices" in str(cost.on_demand.price_source)


def test_with_both_prices_each_market_has_its_own() -> None:
    for spot in (False, True):
        cost = plan_of(cluster__price_per_gpu_hour=4, cluster__spot_price_per_gpu_hour=1.5, cluster__spot=spot).cost
        assert (cost.on_demand.price_per_gpu_hour, cost.spot.price_per_gpu_hour) == (4, 1.5)
        assert cost.price_per_gpu_hour == (1.5 if spot else 4)


def test_spot_and_on_demand_are_compared_with_their_own_interruptions() -> None:
    cost = plan_of(training__steps=10**5).cost
    assert cost.on_demand.goodput > cost.spot.goodput
    assert cost.on_demand.wall_seconds < cost.spot.wall_seconds
    assert cost.spot.usd < cost.on_demand.usd


def test_each_node_holds_its_share_of_the_copy_that_checkpoints_are_written_from() -> None:
    assert plan_of().durability.copy_bytes_per_node == 12 * 6_738_415_616 / 4


def test_a_memory_per_node_that_cannot_hold_that_copy_is_a_warning() -> None:
    said = {
        memory: "\n".join(map(str, plan_of(cluster__slurm={"memory_per_node": memory}).warnings))
        for memory in ("16GB", "32GB")
    }
    assert "cluster.slurm.memory_per_node = 16.0 GB" in said["16GB"]
    assert "memory_per_node" not in said["32GB"]
    pods = {"cluster__scheduler": "kubernetes", "cluster__kubernetes": {"memory_per_node": "16GB"}}
    assert "cluster.kubernetes.memory_per_node = 16.0 GB" in "\n".join(map(str, plan_of(**pods).warnings))


def test_copies_in_host_memory_are_planned_with_their_interval_and_memory() -> None:
    plans = {each: plan_of(checkpoint__in_memory=each).durability for each in ("off", "auto", 7)}
    size, step = plans["off"].checkpoint_bytes, plan_of().time.step
    assert [plans[each].memory_copy_bytes_per_node for each in plans] == [0, 3 * size // 4, 3 * size // 4]
    assert (plans["off"].memory_copy_steps, plans[7].memory_copy_steps) == (None, 7)
    # 32 GPUs, 5 GB/s each: 1 % of the time.
    assert plans["auto"].memory_copy_steps == math.ceil(size / (32 * 5e9) / 0.01 / step)


def test_copies_on_a_second_node_are_planned_for_jobs_with_spare_nodes_and_count_in_the_goodput() -> None:
    alone, second = (plan_of(checkpoint__in_memory=7, cluster__spare_nodes=spare).durability for spare in (0, 1))
    assert (alone.memory_copies_on_partners, second.memory_copies_on_partners) == (False, True)
    assert second.memory_copy_bytes_per_node == 5 * second.checkpoint_bytes // 4
    assert without_partners(second.memory_copy_bytes_per_node) == alone.memory_copy_bytes_per_node
    often = {"cluster__spare_nodes": 3, "cluster__per_node_mtbf": "2h", "cluster__storage_bandwidth": "200MB/s"}
    without, copied = (plan_of(checkpoint__in_memory=each, **often).durability for each in ("off", "auto"))
    assert copied.expected_goodput > without.expected_goodput + 0.005
    assert copied.lost_work_seconds < 0.7 * without.lost_work_seconds
    assert copied.interval_steps == without.interval_steps, "on disk as often as before"


def test_copies_that_are_slower_than_their_interval_cost_what_training_waits_for_them() -> None:
    plan = plan_of(checkpoint__in_memory=1, cluster__spare_nodes=1, training__global_batch_size=32)
    assert plan.durability.memory_copy_cost > 0.2
    assert plan.durability.expected_goodput < 1 / (1 + plan.durability.memory_copy_cost)
    assert "training waits for a copy every 1 step" in "\n".join(map(str, plan.warnings))
    assert plan_of(checkpoint__in_memory="auto", cluster__spare_nodes=1).durability.memory_copy_cost <= 0.011


@pytest.mark.parametrize("step", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("spot", [False, True])
def test_no_goodput_with_copies_on_a_second_node_exceeds_the_bound(step: float, spot: bool) -> None:
    plan = plan_of()
    spec = spec_of("llama-7b", cluster__nodes=64, cluster__spot=spot, cluster__spare_nodes=2, checkpoint__in_memory=1)
    device = find_accelerator(spec.cluster)
    bound = most_goodput(spec, device, checkpoint_bytes(spec, plan.layout), 0.01)
    planned = plan_durability(spec, plan.layout, replace(plan.time, step=step), device)
    assert planned.memory_copies_on_partners == (planned.interval_steps > 1)
    assert planned.expected_goodput <= bound


def test_copies_stay_on_their_own_node_if_a_second_one_has_no_room_for_them() -> None:
    settings = {"cluster__spare_nodes": 1, "cluster__slurm": {"memory_per_node": "150GB"}}
    plan = plan_of(checkpoint__in_memory=7, **settings)
    assert (plan.durability.memory_copy_steps, plan.durability.memory_copies_on_partners) == (7, False)
    assert "a lost node resumes from disk" in "\n".join(map(str, plan.warnings))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cluster__slurm": {"memory_per_node": "100GB"}}, "60.6 GB of each node's memory, more than 50 %"),
        ({"checkpoint__every": 5}, "no more frequent than checkpoints, every 5 steps"),
    ],
)
def test_copies_that_do_not_fit_or_pay_are_off_with_the_reason(settings: dict[str, Any], why: str) -> None:
    plan = plan_of(checkpoint__in_memory=6, **settings)
    assert (plan.durability.memory_copy_steps, plan.durability.memory_copy_bytes_per_node) == (None, 0)
    assert why in "\n".join(map(str, plan.warnings))


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("nodes", "grace"), [(1, 30), (64, 30), (2048, 3600)])
def test_no_layout_or_interval_exceeds_the_bound_on_it(nodes: int, grace: int, asynchronous: bool, spot: bool) -> None:
    plan = plan_of()
    changes = {"cluster__nodes": nodes, "cluster__spot": spot, "checkpoint__asynchronous": asynchronous}
    spec = spec_of("llama-7b", cluster__grace_seconds=grace, **changes)
    device = find_accelerator(spec.cluster)
    size = checkpoint_bytes(spec, plan.layout)
    bound = most_goodput(spec, device, size, 0.01)
    assert 0 < bound <= 1
    found = []
    for every in ("auto", 1, 30, 1000, 30_000):
        checked = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every": every})})
        for step in (0.01, 1.0, 60.0, 1000.0):
            time = replace(plan.time, step=step)
            found.append(plan_durability(checked, plan.layout, time, device).expected_goodput)
    assert 0.97 * bound < max(found) <= bound


def test_the_bound_on_goodput_is_that_of_the_best_interval() -> None:
    spec = spec_of("llama-7b", cluster__nodes=64, cluster__spot=True, checkpoint__asynchronous=False)
    device, layout = find_accelerator(spec.cluster), plan_of().layout
    size, save, rate = (
        checkpoint_bytes(spec, layout),
        save_seconds(spec, layout),
        sum(interruptions_per_second(spec, find_accelerator(spec.cluster))),
    )
    restart = plan_durability(spec, layout, plan_of().time, device).restart_seconds
    best = max(expected_goodput(interval, save, save, restart, rate) for interval in range(1, 3600))
    assert most_goodput(spec, device, size, 1e9) == pytest.approx(best, rel=1e-4)
