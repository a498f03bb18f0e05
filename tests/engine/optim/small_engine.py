"""A small model under DeepSpeed on one rank of a test, with this package's settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
from scaletrain_cli.engine.checkpoint.shard_file import (
    ShardHeader,
    Slice,
    StateReader,
    shard_name,
    shard_parts,
    write_parts,
)
from scaletrain_cli.engine.checkpoint.snapshot import Snapshot, restore_state
from scaletrain_cli.engine.deepspeed_engine import offload_config, precision_config, prepare_deepspeed
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.optim.deepspeed_optimizer import allow_fp16_on_cpu, fix_loss_scale
from scaletrain_cli.engine.optim.optimizers import build_optimizer
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec
from tests.engine.plain_layout import plain_layout
from tests.model_sizes import model_sizes

BATCH = 8  # rows of a global batch
INPUTS = 16


class Small(NamedTuple):
    """The engine, and the optimizer inside DeepSpeed's."""

    engine: Any
    optimizer: torch.optim.Optimizer


def run_spec(training: dict[str, Any] | None = None, vocab_size: int = 64, **layout: Any) -> RunSpec:
    """Return the spec of a run on CPU ranks. Its model is not the one that is trained here."""
    return RunSpec.model_validate(
        {
            "schema": "scaletrain/v1",
            "name": "small",
            "model": {
                **model_sizes(
                    hidden=16,
                    layers=1,
                    heads=2,
                    kv_heads=2,
                    head_dim=8,
                    intermediate=32,
                    vocab=vocab_size,
                    seq_len=8,
                    positions=8,
                ),
                "family": "llama",
            },
            "data": {"source": "python-stdlib", "tokenizer": {"kind": "bpe", "vocab_size": 64}},
            "training": {"global_batch_size": BATCH, "steps": 20, "precision": "fp32", **(training or {})},
            "layout": layout,
            "cluster": {"scheduler": "local", "gpu": "cpu"},
        }
    )


def layout_of(spec: RunSpec, zero_stage: int, accumulation: int = 1, replicas: int = 1) -> Layout:
    return plain_layout(BATCH, replicas, accumulation, zero_stage=zero_stage, offload=spec.layout.offload)


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.scale


def small_model(width: int = 32, *, scaled: bool = False) -> nn.Module:
    """Return a model with matrices, biases and a norm, and the same weights each time; ``scaled``: and a scalar."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = [Scale()] if scaled else []
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 4), *last)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a global batch, a pure function of the step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, INPUTS, generator=generator), torch.randn(BATCH, 4, generator=generator)


def start(
    spec: RunSpec,
    zero_stage: int,
    *,
    accumulation: int = 1,
    clip: float = 0.0,
    folder: Path = Path(),
    width: int = 32,
    scaled: bool = False,
) -> Small:
    """Return DeepSpeed's engine around the small model, on this rank."""
    layout = layout_of(spec, zero_stage, accumulation, dist.get_world_size())
    model = small_model(width, scaled=scaled)
    optimizer = build_optimizer(spec, model, layout, torch.device("cpu"))
    prepare_deepspeed(torch.device("cpu"))
    import deepspeed

    allow_fp16_on_cpu()
    zero = {"stage": zero_stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": zero | offload_config(spec, layout, folder),
        **precision_config(spec),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    fix_loss_scale(engine)
    return Small(engine, optimizer)


def train(small: Small, step: int, change: Callable[[Tensor], Tensor] | None = None) -> float:
    """Run one optimizer step on this rank's rows; return the mean loss over all rows. ``change`` alters the loss."""
    engine, total = small.engine, 0.0
    inputs, targets = (rows.chunk(dist.get_world_size())[dist.get_rank()] for rows in batch(step))
    parts = engine.gradient_accumulation_steps()
    for rows, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        loss = nn.functional.mse_loss(engine(rows.to(dtype(engine))).float(), wanted)
        total += loss.item() / parts
        engine.backward(loss if change is None else change(loss))
        engine.step()
    mean = torch.tensor(total)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def dtype(engine: Any) -> torch.dtype:
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def weights(small: Small) -> Tensor:
    """Return all weights of the forward pass as one fp32 vector. Collective."""
    import deepspeed

    parameters = list(small.engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().float().flatten().clone() for parameter in parameters])


def save(small: Small, folder: Path, average: WeightAverage | None = None) -> None:
    states, rank = _held(small), dist.get_rank()
    entries, counts = Snapshot(states, average).take()
    header = ShardHeader(rank, {piece.name: piece for piece in _owned(states)}, counts.usual, counts.others)
    write_parts(folder / shard_name(rank), shard_parts(header, entries))
    dist.barrier()


def load(small: Small, folder: Path, average: WeightAverage | None = None) -> None:
    states = _held(small)
    files = [path.name for path in folder.iterdir()]
    restore_state(StateReader(folder, dist.get_rank(), _owned(states), files), states, average, small.engine)


def _held(small: Small) -> ShardedState:
    return ShardedState(small.engine, small.engine.module, Mesh())


def _owned(states: ShardedState) -> list[Slice]:
    return [placed.slice for shard in states.shards for placed in shard.owned]
