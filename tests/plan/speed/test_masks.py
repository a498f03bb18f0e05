from typing import Any

import pytest

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.memory.activations import repeats_keys
from scaletrain_cli.plan.memory.engine_memory import kept_mask_bytes
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.plan.speed.block_time import _attention_core
from scaletrain_cli.plan.speed.kernels import rates
from scaletrain_cli.plan.speed.stage_time import _rank_work
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import DATA_ALONE, spec_of

PACKED = {"data__packing": "best_fit", "training__objective": "sft"}
WINDOWS = {"model__sliding_window": 512}
SINKS = {"model__attention_sinks": True}


def run(**changes: Any) -> RunSpec:
    return spec_of("llama-7b", **{**DATA_ALONE, "training__micro_batch_size": 2, **changes})


def core_seconds(**changes: Any) -> float:
    spec = run(**changes)
    device, framework = find_accelerator(spec.cluster), framework_of(spec)
    work = _rank_work(spec, build_layout(spec, resolve_axes(spec), 1, "none", 2), device)
    rate = rates(device, spec.training.precision)
    return _attention_core(spec.transformer, work, framework.profile_on(device), 32, rate)[0]


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        (PACKED, 1.0),  # flash attention by document: at most as long as one document
        (WINDOWS, (2 * 512 - 512**2 / 4096) / 4096),
        ({**SINKS, **WINDOWS}, 4.0),  # all scores instead of half, in a kernel of half the rate
        ({**SINKS, **PACKED}, 4.0),
        (SINKS, 1.0),
    ],
)
def test_a_mask_costs_the_skipped_scores_and_the_faster_kernel(changes: dict[str, Any], times: float) -> None:
    assert core_seconds(**changes) == pytest.approx(times * core_seconds(), rel=0.01)


def test_a_program_that_passes_a_causal_mask_computes_all_scores_in_a_kernel_of_half_the_rate() -> None:
    assert core_seconds(planner__attention="masked") == pytest.approx(4 * core_seconds(), rel=0.01)


# arXiv:2407.08608, figure 5, H100, head size 128, causal: tokens, TFLOP/s forward of FlashAttention-2 and 3.
FLASH = [(1024, 260, 423), (2048, 298, 521), (4096, 319, 579), (8192, 333, 602), (16384, 335, 616)]


@pytest.mark.parametrize(("tokens", "second", "third"), FLASH)
def test_flash_attention_3_is_as_fast_as_published(tokens: int, second: float, third: float) -> None:
    length = {"model__seq_len": tokens, "training__micro_batch_size": 2}
    flops = 4 * 32 * 128 * 2 * tokens**2 / 2
    rates_of = {kind: flops / core_seconds(planner__attention=kind, **length) / 1e12 for kind in ("flash", "flash3")}
    assert rates_of == pytest.approx({"flash": second, "flash3": third}, rel=0.1)


def test_flash_attention_3_needs_hopper_and_is_slower_with_small_heads() -> None:
    ampere = {"cluster__gpu": "a100-sxm-80gb"}
    assert core_seconds(planner__attention="flash3", **ampere) == core_seconds(**ampere)
    small = {"model__head_dim": 64}
    assert core_seconds(**small) / core_seconds(planner__attention="flash3", **small) == pytest.approx(1.55, rel=0.01)


def test_in_fp32_the_kernel_is_the_same_with_a_mask() -> None:
    fp32 = {"training__precision": "fp32"}
    assert core_seconds(**fp32, **PACKED) == pytest.approx(2 * core_seconds(**fp32), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "checkpointing", "masks"),
    [
        (PACKED, "none", 0),
        ({**SINKS, **PACKED}, "none", 2),  # one for each of two rows
        ({**SINKS, **WINDOWS}, "none", 1),
        ({**SINKS, **PACKED, **WINDOWS}, "full", 4),  # recomputed blocks keep both kinds
        ({"model__attn_logit_softcapping": 50.0, **WINDOWS}, "none", 0),  # unfused attention saves none
        ({"model__attn_logit_softcapping": 50.0, **WINDOWS}, "full", 1),
    ],
)
def test_masks_are_kept_until_the_backward_pass_by_kernels_and_recomputed_blocks(
    changes: dict[str, Any], checkpointing: str, masks: int
) -> None:
    spec = run(**changes)
    layout = build_layout(spec, resolve_axes(spec), 1, checkpointing, 2)
    assert kept_mask_bytes(spec, layout, find_accelerator(spec.cluster)) == masks * 2 * 4096**2


def test_unfused_attention_repeats_no_keys() -> None:
    capped = run(**WINDOWS, model__attn_logit_softcapping=50.0, model__num_key_value_heads=8)
    assert not repeats_keys(capped, find_accelerator(capped.cluster))
    sinks = run(**WINDOWS, **SINKS, model__num_key_value_heads=8)
    assert repeats_keys(sinks, find_accelerator(sinks.cluster))
