from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.engine.deepspeed_engine import prepare_deepspeed
from scaletrain_cli.engine.model.materialization import DrawnWeights, Initial, materialize, zero3_partition
from scaletrain_cli.engine.model.moe import Experts
from scaletrain_cli.engine.parallel.mesh import ShardSpec, mark_sharded, shard_spec_of
from tests.engine.ranks import on_ranks

CPU = torch.device("cpu")


def initial(name: str, shape: tuple[int, ...]) -> Initial:
    return Initial(std=0.1) if len(shape) > 1 else Initial(0.0 if name.endswith("bias") else 1.0)


SOURCE = DrawnWeights(0, CPU, initial)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 32))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class Tied(nn.Module):
    """Embedding, layers, a gain that belongs to no layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(32))
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = Scores()
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) * self.gain
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def outline() -> Tied:
    with torch.device("meta"):
        return Tied()


def test_every_parameter_becomes_real_and_keeps_its_ties_marks_and_freezing() -> None:
    model = outline()
    mark_sharded(model.layers[1].weight, ShardSpec(0, 2, 1))
    model.layers[2].bias.requires_grad = False
    materialize(model, SOURCE, CPU)
    assert model.head.weight is model.embed.weight
    assert shard_spec_of(model.layers[1].weight) == ShardSpec(0, 2, 1)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["layers.2.bias"]
    assert torch.equal(model.layers[1].weight, SOURCE.read("layers.1.weight", (64, 32), ShardSpec(0, 2, 1)))
    assert torch.equal(model.embed.weight, SOURCE.read("embed.weight", (64, 32), None))
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_stacked_experts_hold_what_the_files_have_matrix_by_matrix(tensor_ranks: int) -> None:
    with torch.device("meta"):
        experts = nn.ModuleDict({"experts": Experts(4, 16, 8)})
    held = experts["experts"]
    held.members = range(1, 3)
    for name, spec in (
        ("gate_up_proj", ShardSpec(1, tensor_ranks, 0, parts=2)),
        ("down_proj", ShardSpec(2, tensor_ranks, 0)),
    ):
        whole = getattr(held, name)[1:3]
        setattr(held, name, nn.Parameter(spec.take(whole)))
        mark_sharded(getattr(held, name), spec)
    materialize(experts, SOURCE, CPU)
    for place, number in enumerate(held.members):
        rows = ShardSpec(0, tensor_ranks, 0)
        gate, up = (SOURCE.read(f"experts.{number}.{name}_proj.weight", (8, 16), rows) for name in ("gate", "up"))
        down = SOURCE.read(f"experts.{number}.down_proj.weight", (16, 8), ShardSpec(1, tensor_ranks, 0))
        assert torch.equal(held.gate_up_proj[place], torch.cat((gate, up)))
        assert torch.equal(held.down_proj[place], down)


def test_values_of_another_shape_are_not_broadcast() -> None:
    class Scalars:
        def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
            return torch.zeros(1)

    with pytest.raises(ValueError, match=r"gain: \(1,\) values for \(32,\)"):
        materialize(outline(), Scalars(), CPU)


def train_under_zero(stage: int, shard_at_birth: bool) -> dict[str, object]:
    """Return the losses of 10 steps on two ranks, and the largest number of unsharded elements at once."""
    prepare_deepspeed(CPU)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    model, live = outline(), []
    mark_sharded(model.layers[1].weight, ShardSpec(0, 1, 0))

    def partition_and_count(module: nn.Module) -> None:
        live.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        partition(module)

    partition = zero3_partition(config, MPU)
    materialize(model, SOURCE, CPU, partition=partition_and_count if shard_at_birth else None)
    kept = shard_spec_of(model.layers[1].weight) == ShardSpec(0, 1, 0) and model.layers[1].weight.tensor_model_parallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(10):
        loss = engine(torch.randint(64, (2, 8), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "most_live": max(live, default=0), "kept": kept}


MPU = SimpleNamespace(
    get_data_parallel_group=lambda: dist.group.WORLD, get_data_parallel_world_size=dist.get_world_size
)


def test_a_model_that_zero_3_shards_module_by_module_trains_like_a_whole_one() -> None:
    reference = on_ranks(2, train_under_zero, 1, False)
    sharded = on_ranks(2, train_under_zero, 3, True)
    for whole, shards in zip(reference, sharded, strict=True):
        assert shards["losses"][0] == whole["losses"][0]
        torch.testing.assert_close(shards["losses"], whole["losses"], rtol=0, atol=1e-5)
        assert shards["most_live"] == 64 * 32  # its largest module, the embedding; the model has 6,304
        assert shards["kept"]
