"""Programs on DeepSpeed, or like it, that others measured: their buffers, and the memory of their loss.

The planner's ``deepspeed`` is this project's engine, which sizes DeepSpeed's buckets by the model and computes its loss
with three fp32 values per logit. The programs here leave the buckets at DeepSpeed's default, and differ in the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from scaletrain_cli.plan.frameworks.deepspeed import DeepSpeed
from scaletrain_cli.plan.frameworks.megatron import Megatron
from scaletrain_cli.plan.memory.engine_memory import Program

# deepspeed/runtime/zero/config.py, reduce_bucket_size
_DEFAULT_BUCKET = 500_000_000
# Values per logit at the peak of torch's cross-entropy: the log-probabilities, and the gradients of nll_loss and
# log_softmax. transformers casts the logits of Llama's family to fp32 before it (modeling_llama.py, ``.float()``);
# those of GPT-2, OPT and BLOOM stayed in the dtype of the model (modeling_gpt2.py of version 4).
_VALUES = 3
# Megatron-DeepSpeed's vocab_parallel_cross_entropy holds in its forward pass, beside the 16-bit logits, their fp32 copy
# and the same without its maximum; deepspeedai's exponentiates into a tensor more, that of argonne-lcf in place
# (megatron/core/tensor_parallel/cross_entropy.py of microsoft/Megatron-DeepSpeed@69e6dc2 and
# saforem2/Megatron-DeepSpeed@40e942a).
_IN_PLACE = 2 + 2 * 4
_OUT_OF_PLACE = _IN_PLACE + 4


class Transformers(DeepSpeed):
    """Modules of transformers or of the program itself, with torch's cross-entropy in fp32."""

    program = Program(
        _DEFAULT_BUCKET, 4 * _VALUES, True, fused_norms=False, keeps_activated=True, buckets_before_loss=True
    )


class OpenLM(DeepSpeed):
    """Modules of transformers in chenyaofo/OpenLM@4ce2a95.

    Its loop keeps the model's output, and with it the fp32 logits, during the backward pass
    (openlm/engine/pretraining.py). Its configuration (config/default.hocon) has memory_efficient_linear off and
    stage3_max_live_parameters of 3e7, so nothing is gathered ahead. A parameter is then kept between the passes if less
    than stage3_max_reuse_distance, 1e9 by default, is used between its two uses: half of that in either pass
    (partitioned_param_coordinator.py, __params_to_release).
    """

    program = Program(
        _DEFAULT_BUCKET,
        4 * (_VALUES + 1),
        True,
        fused_norms=False,
        keeps_activated=True,
        buckets_before_loss=True,
        live_elements=1_000_000_000 // 2,
        keeps_gathered=True,
    )


class TransformersIn16Bits(DeepSpeed):
    """The same with logits in 16 bits."""

    program = Program(
        _DEFAULT_BUCKET, 2 * _VALUES, True, fused_norms=False, keeps_activated=True, buckets_before_loss=True
    )


class MegatronDeepSpeed(DeepSpeed):
    """Megatron-DeepSpeed, whose loss and norms are those of Megatron-LM (vocab_parallel_cross_entropy, apex)."""

    program = Program(
        _DEFAULT_BUCKET,
        Megatron().logit_bytes,
        True,
        keeps_activated=True,
        buckets_before_loss=True,
        forward_entry_bytes=_OUT_OF_PLACE,
    )


class ArgonneMegatronDeepSpeed(DeepSpeed):
    """The fork of argonne-lcf."""

    program = replace(MegatronDeepSpeed.program, forward_entry_bytes=_IN_PLACE)


class EarlyMegatronDeepSpeed(DeepSpeed):
    """Megatron-DeepSpeed before January 2022, whose DeepSpeed had two buckets in stage 3 (stage3.py ``backward``)."""

    program = replace(MegatronDeepSpeed.program, stage_3_buckets=2)


class InternEvo(DeepSpeed):
    """InternEvo's HybridZeroOptimizer, which flattens and casts gradients as DeepSpeed does, with torch's AdamW."""

    program = Program(foreach=True, fused_norms=False, keeps_activated=True, buckets_before_loss=True)


def is_megatron(row: Mapping[str, str]) -> bool:
    """Return whether notes or source of a row name Megatron-DeepSpeed or Megatron-LM."""
    return re.search("megatron", row["notes"] + row["source"], re.IGNORECASE) is not None


def program_of(row: Mapping[str, str]) -> DeepSpeed:
    """Return the program of a row of deepspeed_2026_11.csv, from its notes, source, model and precision."""
    if is_megatron(row):
        # The configurations of scalable-transformer have ``cpu_offload``, which version 0.4 of 2021 deprecated.
        early = EarlyMegatronDeepSpeed() if row["set"] == "scalable-transformer" else MegatronDeepSpeed()
        return ArgonneMegatronDeepSpeed() if "argonne-lcf" in row["source"] else early
    if re.search("gpt-?2|opt|bloom", row["model"].lower()) and row["precision"] in ("fp16", "bf16"):
        return TransformersIn16Bits()
    # The memory that its table prints after a step is 14.8 GB with two sequences and 17.7 GB with eight: 0.48 GiB per
    # sequence more, its fp32 logits (4,096 x 32,000 x 4 bytes).
    return OpenLM() if row["set"] == "chenyaofo-deepspeed" else Transformers()
