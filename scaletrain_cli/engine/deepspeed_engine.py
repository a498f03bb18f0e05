"""The one file that configures and starts DeepSpeed, and that knows its traps."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scaletrain_cli.engine.optimization.offload import offload_config
from scaletrain_cli.engine.optimization.precision import precision_config
from scaletrain_cli.engine.parallel.mesh import Mesh, group_of
from scaletrain_cli.plan import zero_buffers
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed quietly and let it use the process group: its talk goes to stderr, and it compiles nothing.

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
    _load_muon_uncompiled()
    deepspeed.init_distributed(dist_init_required=False)


def _load_muon_uncompiled() -> None:
    """Make DeepSpeed's Muon cheap to import: ZeRO looks for it whatever the optimizer, and its file compiles it.

    That loads all of inductor, more than a second of CPU time at the start of every rank. We train without Muon.
    """
    from deepspeed.runtime import compiler

    compile_now, compiler.compile = compiler.compile, lambda: lambda function: function
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    compiler.compile = compile_now


def deepspeed_config(spec: RunSpec, layout: Layout, parameters: int, swap_folder: Path) -> dict[str, Any]:
    """DeepSpeed's configuration for a rank that computes with so many parameters.

    Learning rate and checkpoints are ours, not DeepSpeed's. ``swap_folder``: on a disk of the node, for NVMe offload.
    """
    # As the plan counted them.
    buffers = zero_buffers(parameters, layout.zero_stage, pipeline=layout.pipeline_parallel > 1)
    config: dict[str, Any] = {
        # Sequence ranks are hidden among its data-parallel ones, so that it counts each sequence that many times.
        "train_batch_size": layout.global_batch_size * layout.sequence_parallel,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": 0.0,  # set before each step where it does the clipping
        "zero_optimization": {
            "stage": layout.zero_stage,
            "reduce_bucket_size": buffers.reduce_bucket_size,
            "allgather_bucket_size": buffers.allgather_bucket_size,
            "stage3_prefetch_bucket_size": buffers.prefetch_bucket_size,
            "stage3_max_live_parameters": buffers.max_live_parameters,
            "stage3_param_persistence_threshold": buffers.param_persistence_threshold,
            "overlap_comm": buffers.overlap_comm,
        },
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    config.update(precision_config(spec))
    config["zero_optimization"].update(offload_config(spec, layout, swap_folder))
    # Elementwise optimizers do not care that they are handed flat pieces; ours are of that kind.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


class ModelParallelUnit:
    """What DeepSpeed asks about tensor parallelism (its ``mpu``); sequence ranks are replicas to it."""

    def __init__(self, mesh: Mesh) -> None:
        self._tensor, self._replicas = mesh.tensor, mesh.replicas
        # DeepSpeed wants a group even of one rank.
        self._groups = {axis: axis.group or group_of([dist.get_rank()]) for axis in (mesh.tensor, mesh.replicas)}

    @classmethod
    def of(cls, mesh: Mesh) -> ModelParallelUnit | None:
        """None where every rank is a replica, or where DeepSpeed's own pipeline grid takes this place. Collective."""
        return None if mesh.tensor.size == 1 or mesh.pipeline.size > 1 else cls(mesh)

    def get_model_parallel_group(self) -> Any:
        return self._groups[self._tensor]

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._groups[self._replicas]

    def get_data_parallel_rank(self) -> int:
        return self._replicas.rank

    def get_data_parallel_world_size(self) -> int:
        return self._replicas.size


def start_deepspeed(config: dict[str, Any], module: nn.Module, optimizer: Any, unit: ModelParallelUnit | None) -> Any:
    """DeepSpeed's engine around the module and optimizer: a PipelineEngine where the module is a pipeline's."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=unit)
    return engine
