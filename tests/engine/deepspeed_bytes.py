"""Count what DeepSpeed holds after a backward pass, allocates in an update, and saves, on the rank of a test.

All counts are bytes per parameter, except ``first copy``: elements of gradients, by stage.
"""

import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.engine.deepspeed_engine import prepare_deepspeed
from tests.engine.model.test_attention_memory import LiveBytes


def count_all(cases: list[tuple[str, str, int]]) -> dict[str, dict[Any, float]]:
    warnings.simplefilter("ignore")
    prepare_deepspeed(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        counted: dict[str, dict[Any, float]] = {" ".join(map(str, case)): count(Path(folder), *case) for case in cases}
    return counted | {"first copy": {stage: first_copy(stage) for stage in (1, 2, 3)}}


def count(folder: Path, precision: str, grad_dtype: str, stage: int) -> dict[str, float]:
    import deepspeed

    earlier = live_tensors()  # held until the end, so that what an earlier case left behind is not freed meanwhile
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Small buffers, so that states are what is counted.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10,
            "stage3_prefetch_bucket_size": 10,
            "stage3_max_live_parameters": 10,
            "stage3_max_reuse_distance": 10,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": grad_dtype}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as on a GPU
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.ones(1, 256, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    for _ in range(2):  # moments exist after the first step
        engine.backward(engine(batch).sum())
        gc.collect()
        held = total_bytes(live_tensors()) - total_bytes(earlier)
        with LiveBytes(live_tensors()) as update:
            engine.step()
    target = folder / f"{precision}-{grad_dtype}-{stage}"
    engine.save_checkpoint(str(target), tag="t", save_latest=False)
    saved = sum(file.stat().st_size for file in target.rglob("*.pt"))
    engine.destroy()
    counted = {"held": held, "update": update.peak, "largest": update.largest, "saved": saved}
    return {name: bytes_ / parameters for name, bytes_ in counted.items()}


def first_copy(stage: int) -> int:
    """The elements of gradients that the first reduction of a backward pass copies; a bucket has room for 3 layers."""
    import deepspeed
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": 3 * 256 * 257,
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    copied: list[int] = []
    flatten, scatter = DeepSpeedZeroOptimizer.allreduce_bucket, stage3.reduce_scatter_coalesced

    def watched(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        copied.append(sum(tensor.numel() for tensor in bucket))
        return flatten(self, bucket, *args, **kwargs)

    def watched_scatter(tensors: Any, *args: Any) -> Any:
        copied.append(sum(tensor.numel() for tensor in tensors))
        return scatter(tensors, *args)

    DeepSpeedZeroOptimizer.allreduce_bucket, stage3.reduce_scatter_coalesced = watched, watched_scatter
    try:
        engine.backward(engine(torch.ones(1, 256, dtype=torch.bfloat16)).sum())
    finally:
        DeepSpeedZeroOptimizer.allreduce_bucket, stage3.reduce_scatter_coalesced = flatten, scatter
        engine.destroy()
    return copied[0]


def live_tensors() -> list[torch.Tensor]:
    """All tensors on the CPU, gradients included; those on the meta device hold nothing."""
    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def total_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of their storages, each counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
