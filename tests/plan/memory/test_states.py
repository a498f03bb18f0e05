"""Bytes of model states: examples of the literature, and what DeepSpeed allocates."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.plan.memory.buffers import (
    SUB_GROUP_ELEMENTS,
    BufferBytes,
    cast_gradient_bytes,
    communication_buffer_bytes,
    flat_reduction_bytes,
    step_temporary_bytes,
)
from scaletrain_cli.plan.memory.states import (
    MasterWeights,
    checkpoint_bytes_per_parameter,
    lighter_update_bytes,
    master_bytes,
    model_state_bytes,
    moment_bytes_per_parameter,
    uses_bf16_optimizer,
)
from scaletrain_cli.plan.planning import make_plan
from scaletrain_cli.plan.search.engine_support import submittable
from tests.plan.specs import spec_of

GB = 10**9


# Billions of parameters, types, ZeRO stage and ranks; GB of weights, gradients and optimizer states on each.
PUBLISHED = {
    "7B in fp32 before activations": (7, "fp32 fp32", 0, 8, (28, 28, 56)),
    "7B in mixed precision": (7, "bf16 fp32", 1, 1, (14, 28, 84)),
    "7B in mixed precision, ZeRO-1 on 8 GPUs": (7, "bf16 fp32", 1, 8, (14, 28, 10.5)),
    "GPT-3: 350 GB of weights, 1.4 TB of moments": (175, "bf16 bf16", 1, 1, (350, 350, 700 + 1400)),
    "18 bytes of Megatron": (1, "bf16 fp32", 1, 1, (2, 4, 12)),
    "ZeRO-1 shards states": (8, "bf16 bf16", 1, 8, (16, 16, 12)),
    "ZeRO-2 gradients, too": (8, "bf16 bf16", 2, 8, (16, 2, 12)),
    "ZeRO-3 weights, too": (8, "bf16 bf16", 3, 8, (2, 2, 12)),
    "fp32 under ZeRO keeps a second copy of its partition": (8, "fp32 fp32", 1, 8, (32, 32, 12)),
}


@pytest.mark.parametrize(("billions", "types", "stage", "ranks", "gigabytes"), PUBLISHED.values(), ids=PUBLISHED)
def test_states_are_as_published(
    billions: int, types: str, stage: int, ranks: int, gigabytes: tuple[float, ...]
) -> None:
    states = model_state_bytes(billions * GB, *types.split(), stage, data_parallel=ranks)
    assert states == tuple(size * GB for size in gigabytes)


def test_a_partition_is_rounded_up() -> None:
    assert model_state_bytes(10, "fp32", "fp32", zero_stage=3, data_parallel=4).parameters == 3 * 4


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adam", 8), ("momentum", 4), ("sgd", 0), ("adamw_8bit", 2 + 2 * 4 / 256)]
)
def test_other_optimizers_keep_their_own_moments(optimizer: str, moments: float) -> None:
    states = model_state_bytes(2560, "bf16", "fp32", zero_stage=1, data_parallel=1, optimizer=optimizer)
    assert states.optimizer_states == 2560 * (4 + moments)


def test_the_weights_of_fsdp_are_fp32_without_a_master_copy() -> None:
    assert model_state_bytes(800, "bf16", "fp32", 3, 8, master=MasterWeights.THE_WEIGHTS) == (400, 400, 800)


def test_megatron_clones_no_fp32_weights() -> None:
    assert model_state_bytes(800, "fp32", "fp32", 1, 8, master=MasterWeights.BESIDE_16_BIT) == (3200, 3200, 800)


@given(
    parameters=st.integers(1, 10**13),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8"]),
    grad_dtype=st.sampled_from(["fp32", "bf16"]),
    stage=st.integers(1, 2),
    ranks=st.integers(1, 10**5),
)
def test_sharding_more_holds_no_more(parameters: int, precision: str, grad_dtype: str, stage: int, ranks: int) -> None:
    def held(stage: int, ranks: int) -> int:
        return sum(model_state_bytes(parameters, precision, grad_dtype, stage, ranks))

    assert held(stage + 1, ranks) <= held(stage, ranks)
    assert held(stage, ranks + 1) <= held(stage, ranks)
    assert held(stage, ranks) <= held(stage, 1)


@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_in_fp32_every_stage_holds_less_than_no_zero_from_two_ranks_on(ranks: int) -> None:
    held = [sum(model_state_bytes(10**6, "fp32", "fp32", stage, ranks)) for stage in range(4)]
    assert held == sorted(held, reverse=True)


@pytest.fixture(scope="module")
def live_bytes() -> dict[str, dict[Any, float]]:
    """Bytes per parameter that DeepSpeed holds and saves, counted in a process of its own."""
    for library in ("torch", "deepspeed"):
        pytest.importorskip(library)
    from tests.engine.deepspeed_bytes import count_all
    from tests.engine.ranks import on_ranks

    counted: dict[str, dict[Any, float]] = on_ranks(1, count_all, CASES)[0]
    return counted


CASES = [
    *(("fp32", "fp32", 0), ("bf16", "fp32", 1), ("bf16", "bf16", 2), ("bf16", "fp32", 3), ("bf16", "bf16", 3)),
    ("fp32", "fp32", 2),
]


@pytest.mark.long  # the engine's own states are counted in test_engine_states.py
@pytest.mark.parametrize(("precision", "grad_dtype", "stage"), CASES)
def test_deepspeed_holds_and_saves_what_the_planner_says(
    live_bytes: dict[str, dict[Any, float]], precision: str, grad_dtype: str, stage: int
) -> None:
    counted = live_bytes[f"{precision} {grad_dtype} {stage}"]
    held = sum(model_state_bytes(10**6, precision, grad_dtype, stage, data_parallel=1)) / 10**6
    assert counted["held"] == pytest.approx(held, rel=0.01)
    update = step_temporary_bytes(10**6, precision, grad_dtype, stage, data_parallel=1) / 10**6
    assert counted["update"] == pytest.approx(update, rel=0.02, abs=0.05)
    if cast := cast_gradient_bytes(10**6, precision, grad_dtype, stage, data_parallel=1):
        assert counted["largest"] == pytest.approx(cast / 10**6, rel=0.02)
    assert counted["saved"] == pytest.approx(checkpoint_bytes_per_parameter(precision, stage), rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_copies_the_first_gradients_when_a_bucket_is_full(
    live_bytes: dict[str, dict[Any, float]], stage: int
) -> None:
    layer = 256 * 257
    planned = communication_buffer_bytes(8 * layer, layer, stage, 2, 2, 1, pipeline=False, bucket_elements=3 * layer)
    assert live_bytes["first copy"][stage] == planned.full_after == 3 * layer


def test_moments_of_fewer_bits_and_no_master_weights_take_the_bytes_of_their_dtypes() -> None:
    def held(dtype: str, master: MasterWeights) -> int:
        return moment_bytes_per_parameter("adamw", dtype) + master_bytes("bf16", 1, master)

    usual = MasterWeights.OF_EACH_PARTITION
    assert [held(dtype, usual) for dtype in ("fp32", "bf16", "fp8")] == [12, 8, 6]
    assert [held("bf16", master) for master in (MasterWeights.OF_16_BITS, MasterWeights.NONE)] == [6, 4]
    assert checkpoint_bytes_per_parameter("bf16", 3, "adamw", MasterWeights.NONE, "bf16") == 2 + 4


def test_an_update_without_fp32_master_weights_reads_and_writes_16_bit_ones() -> None:
    def saved(**optimizer: object) -> int:
        return lighter_update_bytes(spec_of("llama-7b", training__optimizer=optimizer))

    assert saved() == 0
    assert saved(master_weights=False) == 2 * 4 - 2 * 2
    assert saved(state_dtype="bf16") == 2 * 8 - 2 * 4


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp4"])
def test_bf16_optimizer_runs_in_stage_1_with_fp32_gradients(precision: str) -> None:
    assert uses_bf16_optimizer(precision, "fp32", 1)
    assert not any(uses_bf16_optimizer(precision, *other) for other in (("bf16", 1), ("fp32", 2)))


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_a_plan_counts_moments_master_weights_and_stored_weights_of_fewer_bits(framework: str) -> None:
    def states(**training: object) -> tuple[float, float]:
        settings = {f"training__{key}": value for key, value in training.items()}
        fixed = {f"layout__{axis}_parallel": 1 for axis in ("tensor", "pipeline", "sequence")}
        spec = spec_of("llama-7b", planner__framework=framework, layout__zero_stage=1, **fixed, **settings)
        plan = make_plan(spec)
        count = plan.model.parameters
        refused = {rule.code for rule in submittable(spec, plan)} - {"framework-for-comparison", "layout-does-not-fit"}
        assert bool(refused) == bool(training)
        return plan.memory.parameters / count, plan.memory.optimizer_states * 8 / count

    copied = 2 if framework == "deepspeed" else 0
    assert states() == pytest.approx((2, 12), abs=0.01)
    assert states(optimizer={"state_dtype": "bf16"}) == pytest.approx((2, 8), abs=0.01)
    both = states(optimizer={"state_dtype": "bf16", "master_weights": False})
    assert both == pytest.approx((2, 4 + copied), abs=0.01)
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008) / 6_738_415_616
    assert states(weight_dtype="fp8")[0] == pytest.approx(2 - blocks, abs=0.01)
    assert states(weight_dtype="nvfp4")[0] == pytest.approx(2 - blocks * (2 - 0.5625), abs=0.01)


def test_fp4_products_are_as_much_faster_as_the_device_has_them() -> None:
    def compute(precision: str, gpu: str) -> float:
        spec = spec_of("llama-7b", training__precision=precision, cluster__gpu=gpu, planner__framework="megatron")
        return make_plan(spec).time.compute

    assert compute("fp4", "gb300-279gb") < compute("fp8", "gb300-279gb") < compute("bf16", "gb300-279gb")
    spec = spec_of("llama-7b", training__precision="fp4")
    assert "fp4-device" in {rule.code for rule in submittable(spec, make_plan(spec))}


def test_the_update_of_16_bit_weights_without_zero_casts_and_flattens_the_gradients() -> None:
    """FP16_Optimizer: 24 bytes per parameter in all, so 1.3B over two tensor ranks took 14.9 GiB of each V100.

    DeepSpeed's own run (Megatron-DeepSpeed, examples_deepspeed/rebase/README.md), max_memory_allocated.
    """
    on_rank = 658_000_000
    held = 16 * on_rank + step_temporary_bytes(on_rank, "fp16", "fp16", zero_stage=0, data_parallel=8)
    assert held / 2**30 == pytest.approx(14.884, rel=0.02)


def test_stage_3_updates_one_sub_group_at_a_time() -> None:
    """6.86B over four H100 took 31.4 GiB with fp32 master weights (DeepSpeedExamples, bf16_master_weight)."""
    parameters = 6_860_000_000
    update = step_temporary_bytes(parameters, "bf16", "bf16", zero_stage=3, data_parallel=4)
    assert update == 6 * SUB_GROUP_ELEMENTS
    states = model_state_bytes(parameters, "bf16", "bf16", zero_stage=3, data_parallel=4)
    assert (sum(states) + update) / 2**30 == pytest.approx(31.38, rel=0.02)


def test_gradients_that_bf16_optimizer_flattens_for_their_reduction_take_fp32_and_16_bits() -> None:
    # 1.2e6 and 8e3 elements have one bucket, which copies them; beyond 5e8 elements a group has one alone.
    assert flat_reduction_bytes([1_200_000, 8_000]) == (4 + 2) * 1_208_000
    assert flat_reduction_bytes([1_200_000]) == 2 * 1_200_000
    assert flat_reduction_bytes([600_000_000, 8_000]) == 2 * 600_000_000
    assert flat_reduction_bytes([8_000, 600_000_000]) == (4 + 2) * 600_008_000
    assert step_temporary_bytes(1_000_000, "bf16", "fp32", zero_stage=1, data_parallel=8) == 6 * 1_000_000
    assert step_temporary_bytes(10**9, "bf16", "fp32", zero_stage=1, data_parallel=8) == 2 * 10**9
    assert step_temporary_bytes(10**9, "bf16", "fp32", zero_stage=1, data_parallel=1) == 0


def test_foreach_adamw_needs_the_root_of_the_second_moment() -> None:
    assert [step_temporary_bytes(100, "fp32", "fp32", 0, 1, foreach=each) for each in (False, True)] == [0, 400]
    others = [step_temporary_bytes(100, "bf16", "fp32", 2, 1, name, foreach=True) for name in ("adamw", "sgd")]
    assert others == [400, 0]


def test_buffers_follow_the_phases_of_a_step() -> None:
    def buffers(stage: int, **more: Any) -> BufferBytes:
        return communication_buffer_bytes(10**9, 10**8, stage, 2, 2, 8, pipeline=False, bucket_elements=10**8, **more)

    bucket = 2 * 10**8
    # Two buckets, which do not exist before the loss runs backward, and the one being reduced, once it is full.
    assert buffers(2) == (0, 3 * bucket, 0, 2 * bucket, bucket, 10**8)
    assert buffers(2, before_the_loss=True).loss == 2 * bucket
    assert buffers(2, head=4 * 10**7).full_after == 6 * 10**7
    # A head that fits into a bucket; a larger one is flattened in pieces of one partition, which exceeds a bucket.
    assert buffers(2, head=10**7).head == 2 * bucket + 2 * 10**7
    assert buffers(2, head=4 * 10**8).head == 2 * bucket + 2 * 4 * 10**8 + 2 * 125 * 10**6
    gathered = 2 * 10**9  # what is gathered ahead counts among the live parameters
    assert buffers(3)[:4] == (bucket + gathered, 2 * bucket + gathered, bucket, bucket + gathered)
    # Without weights: the bucket is always there, and the gradient of a head is reduced in place.
    assert buffers(3, gathered=0, head=4 * 10**8)[:4] == (bucket, 2 * bucket, bucket, bucket + 2 * 4 * 10**8)
    assert buffers(3, gathered=0, stage_3_buckets=2)[:3] == (2 * bucket, 3 * bucket, 2 * bucket)
    assert not any(buffers(1, bf16_optimizer=True))
    assert not any(communication_buffer_bytes(10**9, 10**8, 0, 2, 2, 1, pipeline=False))


def test_stage_1_of_a_pipeline_copies_gradients_only_when_all_blocks_have_run_backward() -> None:
    found = communication_buffer_bytes(10**9, 10**8, 1, 2, 2, 8, pipeline=True, bucket_elements=10**8)
    assert found.full_after == 10**9
