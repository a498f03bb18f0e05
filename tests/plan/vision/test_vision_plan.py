import json
from typing import Any

import pytest

from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.result import Memory, Time
from scaletrain_cli.plan.search.engine_support import submittable
from scaletrain_cli.plan.search.infeasible import PlanInfeasibleError
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.vision.memory import activation_bytes, loss_bytes
from scaletrain_cli.plan.vision.networks import network
from scaletrain_cli.plan.vision.operations import VisionNetwork
from scaletrain_cli.plan.vision.parameters import parameter_counts
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.spec import RunSpec
from tests.plan.vision.test_vision_size import model_of

PRESETS = ["resnet-50", "convnext-tiny", "vit-base-patch16", "clip-vit-base-patch32"]


def spec_of(preset: str = "resnet-50", **changes: Any) -> RunSpec:
    """A bf16 run on eight A100; ``training__steps=5`` sets ``training.steps``."""
    raw: dict[str, Any] = {
        "schema": "scaletrain/v1",
        "name": "images",
        "model": model_of(preset).model_dump(),
        "data": {"source": "imagenet", "loader": {"workers": 32}},
        "training": {"global_batch_size": 512, "steps": 1000},
        "cluster": {"gpus_per_node": 8, "gpu": "a100-sxm-80gb", "scheduler": "slurm"},
    }
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        raw.setdefault(section, {})[key] = value
    return RunSpec.model_validate(raw)


def sized(spec: RunSpec, micro_batch: int, zero_stage: int = 1, checkpointing: str = "none") -> tuple[Memory, Time]:
    layout = build_layout(spec, resolve_axes(spec), zero_stage, checkpointing, micro_batch)
    device = find_accelerator(spec.cluster)
    workload = workload_of(spec.model)
    return workload.memory(spec, layout, device), workload.time(spec, layout, device)[0]


def whole(preset: str) -> VisionNetwork:
    return network(model_of(preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_counts_images_and_goes_through_json(preset: str) -> None:
    plan = make_plan(spec_of(preset))
    assert plan.memory.fits
    assert plan.model.parameters == parameter_counts(model_of(preset))[0]
    assert plan.time.tokens_per_second == pytest.approx(512 / plan.time.step)
    assert plan.durability.checkpoint_bytes >= 12 * plan.model.parameters
    assert json.loads(json.dumps(plan.to_json()))["layout"]["tensor_parallel"] == 1


def test_the_engine_rejects_clip_without_the_tokenizer_of_its_captions() -> None:
    assert not submittable(spec_of(), make_plan(spec_of()))
    spec = spec_of("clip-vit-base-patch32")
    reasons = submittable(spec, make_plan(spec))
    assert any("captions need the tokenizer" in reason.text for reason in reasons)


@pytest.mark.parametrize("preset", PRESETS)
def test_memory_is_the_sum_of_its_parts_and_grows_with_the_batch(preset: str) -> None:
    spec = spec_of(preset)
    small, large = (sized(spec, batch)[0] for batch in (8, 64))
    assert small.peak < large.peak
    assert large.allocated < large.reserved < large.peak


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpointing_trades_memory_for_time(preset: str) -> None:
    spec = spec_of(preset)
    (kept, fast), (again, slow) = (sized(spec, 64, 1, mode) for mode in ("none", "full"))
    assert again.activations < kept.activations
    assert slow.step > fast.step
    assert slow.hfu / slow.mfu == pytest.approx(4 / 3)


def test_zero_shards_states_and_adds_traffic() -> None:
    spec = spec_of("vit-huge-patch14")
    first, third = (sized(spec, 8, stage)[0] for stage in (1, 3))
    assert third.parameters == pytest.approx(first.parameters / 8, rel=1e-2)  # small tensors stay gathered


def test_a_batch_norm_keeps_the_same_statistics_for_any_batch() -> None:
    one, two, three = (activation_bytes(whole("resnet-50"), count, 2, "none").kept for count in (1, 2, 3))
    assert three - two == two - one < one


def test_the_backward_pass_peaks_at_the_block_with_the_most_bytes_alive() -> None:
    # ResNet keeps most early on, so its backward pass holds little more than what is kept when it starts.
    for preset in PRESETS:
        kept, backward = activation_bytes(whole(preset), 64, 2, "none")
        assert kept < backward < 1.3 * kept


def test_contrastive_logits_grow_with_the_batch_of_all_ranks() -> None:
    for framework, nodes in (("fsdp", 8), ("deepspeed", 8)):
        sizes = []
        for count in (1, nodes):
            spec = spec_of(
                "clip-vit-base-patch32",
                planner__framework=framework,
                cluster__nodes=count,
                training__global_batch_size=2048 * count,
            )
            layout = build_layout(spec, resolve_axes(spec), 1, "none", 256)
            sizes.append(loss_bytes(spec, whole("clip-vit-base-patch32"), layout, 2))
        if framework == "fsdp":  # the rows of a rank at once
            assert sizes[1] == nodes * sizes[0]
        else:  # in tiles: only the features grow
            features = 4 * 512 * 5 * 2048
            tile = 4 * 256 * (4096 - 2048)
            assert sizes[1] - sizes[0] == (nodes - 1) * features + tile
    spec = spec_of("resnet-50")
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 64)
    assert loss_bytes(spec, whole("resnet-50"), layout, 2) == 12 * 64 * 1000


def test_channels_first_are_slower_on_matrix_units_alone() -> None:
    def step(precision: str, memory_format: str) -> float:
        spec = spec_of(training__precision=precision, model__memory_format=memory_format)
        return sized(spec, 64)[1].step

    assert step("bf16", "contiguous_format") > 1.1 * step("bf16", "channels_last")
    assert step("fp32", "contiguous_format") == step("fp32", "channels_last")


def test_a_compiler_saves_the_traffic_between_pointwise_kernels() -> None:
    eager, compiled = (sized(spec_of(training__compile=flag), 64)[1].step for flag in (False, True))
    assert compiled < 0.95 * eager


def test_autocast_keeps_and_moves_more_where_norms_compute_in_fp32() -> None:
    plain, mixed = (sized(spec_of("vit-base-patch16", planner__autocast=flag), 64) for flag in (False, True))
    assert mixed[0].activations > plain[0].activations
    assert mixed[1].step > plain[1].step


def test_attention_without_a_fused_kernel_keeps_its_scores() -> None:
    fused, unfused = (
        sized(spec_of("vit-base-patch16", planner__attention=kind), 64)[0].activations
        for kind in ("flash", "materialised")
    )
    assert unfused - fused > 64 * 12 * 12 * 197**2 * 2 * 0.9


def test_small_micro_batches_wait_for_the_host() -> None:
    spec = spec_of(training__global_batch_size=64)
    times = [sized(spec, batch)[1].compute for batch in (1, 8)]
    assert times[0] > 4 * times[1]


@pytest.mark.parametrize(
    ("preset", "gpu", "precision", "images_per_second"),
    [
        ("resnet-50", "a100-sxm-80gb", "bf16", 2470),  # NVIDIA DeepLearningExamples, PyTorch, one GPU, batch 256
        ("resnet-50", "v100-sxm2-32gb", "fp32", 356),
        ("resnet-101", "rtx-3090-24gb", "bf16", 751),  # timm, channels last
        ("convnext-base", "rtx-3090-24gb", "bf16", 340),
    ],
)
def test_predicted_throughput_is_near_the_measured_one(
    preset: str, gpu: str, precision: str, images_per_second: float
) -> None:
    spec = spec_of(
        preset,
        cluster__gpu=gpu,
        cluster__gpus_per_node=1,
        training__precision=precision,
        training__global_batch_size=128,
        planner__autocast=True,
    )
    assert sized(spec, 128, 0)[1].tokens_per_second == pytest.approx(images_per_second, rel=0.25)


def test_a_micro_batch_that_does_not_fit_is_an_error_with_changes_that_fit() -> None:
    spec = spec_of("vit-huge-patch14", training__micro_batch_size=64, cluster__gpu="l4-24gb")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"image_size": 896})})
    with pytest.raises(PlanInfeasibleError) as caught:
        make_plan(spec)
    assert caught.value.plan is not None
    assert "would fit" in str(caught.value)
