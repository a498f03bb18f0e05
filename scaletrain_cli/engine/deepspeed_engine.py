"""The one file that configures and starts DeepSpeed, and that knows its traps."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
from torch import nn

from scaletrain_cli.plan import parameter_count, zero_buffers
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed quietly: its talk goes to stderr, and it compiles nothing on the way.

    Without the patch `init_distributed` builds a shared-memory op on CPU that only inference uses (up to two minutes,
    needs g++, leaves files in /dev/shm). `import deepspeed.comm.torch` would name the real torch, hence sys.modules.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


def deepspeed_config(spec: RunSpec, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's configuration for this run. Learning rate and checkpoints are ours, not DeepSpeed's."""
    buffers = zero_buffers(parameter_count(spec.transformer), layout.zero_stage)  # as the plan counted them
    config: dict[str, Any] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": spec.training.gradient_clipping,
        "zero_optimization": {
            "stage": layout.zero_stage,
            "reduce_bucket_size": buffers.reduce_bucket_size,
            "allgather_bucket_size": buffers.allgather_bucket_size,
            "stage3_prefetch_bucket_size": buffers.prefetch_bucket_size,
            "stage3_max_live_parameters": buffers.max_live_parameters,
            "overlap_comm": buffers.overlap_comm,
        },
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if spec.training.precision == "bf16":
        # Without check_grad_overflow a NaN gradient would go into the weights; without immediate_grad_update stage 1
        # keeps the bf16 gradients beside the fp32 ones.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": spec.training.grad_dtype}
    return config


def start_deepspeed(spec: RunSpec, layout: Layout, model: nn.Module, optimizer: Any, device: torch.device) -> Any:
    """A DeepSpeedEngine around the model and optimizer; the process group must exist."""
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(spec, layout))
    return engine
