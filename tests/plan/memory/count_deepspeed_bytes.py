"""Count what DeepSpeed holds after a backward pass, allocates in an update, and saves; prints JSON.

All counts are bytes per parameter, except ``first copy``: elements of gradients, by stage.

Run by test_states.py as a process of its own: it initialises torch.distributed and leaves buffers behind.
"""

import gc
import json
import os
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

CASES = [
    *(("fp32", "fp32", 0), ("bf16", "fp32", 1), ("bf16", "bf16", 2), ("bf16", "fp32", 3), ("bf16", "bf16", 3)),
    ("fp32", "fp32", 2),
]


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", DS_ACCELERATOR="cpu")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        import deepspeed

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(dist_init_required=False)
        counted = {" ".join(map(str, case)): count(deepspeed, Path(folder), *case) for case in CASES}
        counted["first copy"] = {str(stage): first_copy(deepspeed, stage) for stage in (1, 2, 3)}
    print(json.dumps(counted))


def count(deepspeed: Any, folder: Path, precision: str, grad_dtype: str, stage: int) -> dict[str, float]:
    import torch

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
        allocated, largest = most_allocated(engine.step)
    target = folder / f"{precision}-{grad_dtype}-{stage}"
    engine.save_checkpoint(str(target), tag="t", save_latest=False)
    saved = sum(file.stat().st_size for file in target.rglob("*.pt"))
    engine.destroy()
    counted = {"held": held, "update": allocated, "largest": largest, "saved": saved}
    return {name: bytes_ / parameters for name, bytes_ in counted.items()}


def first_copy(deepspeed: Any, stage: int) -> int:
    """The elements of gradients that the first reduction of a backward pass copies; a bucket has room for 3 layers."""
    import torch
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


def most_allocated(function: Any) -> tuple[int, int]:
    """The most bytes at once of tensors that a call creates, and the bytes of the largest."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    known = {tensor.untyped_storage()._cdata for tensor in live_tensors()}
    alive: dict[int, int] = {}
    most = largest = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most, largest
            result = called(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    if storage._cdata not in known and storage._cdata not in alive:
                        alive[storage._cdata] = storage.nbytes()
                        largest = max(largest, storage.nbytes())
                        weakref.finalize(storage, alive.pop, storage._cdata, None)
            most = max(most, sum(alive.values()))
            return result

    with Count():
        function()
    return most, largest


def live_tensors() -> list[Any]:
    """All tensors on the CPU, gradients included; those on the meta device hold nothing."""
    import torch

    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def total_bytes(tensors: list[Any]) -> int:
    """Return the bytes of their storages, each counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


if __name__ == "__main__":
    main()
