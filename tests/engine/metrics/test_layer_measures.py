"""Norms of layers in each layout equal those of a plain torch loop in one process."""

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.engine.data.sample_order import sample_at
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.telemetry.run import layers_file
from scaletrain_cli.telemetry.series import read_series
from tests.engine.parity.layouts import begun_run, ready
from tests.engine.parity.reference import batch_loss, first_weights, set_groups
from tests.engine.parity.rows import Row
from tests.engine.ranks import on_ranks

STEPS = 3
# Long enough that dead units are counted: 8 sequences of 256 tokens, of which two ranks have 1024 each.
OFTEN = ("telemetry.layers_every=1", "model.seq_len=256", "model.max_position_embeddings=256")
CLIPPED = "training.gradient_clipping=0.5"  # at every step
Layers = dict[str, dict[str, list[float]]]


@cache
def reference(dataset: Path, row: Row) -> Layers:
    spec = Row(overrides=(*row.overrides, *OFTEN, CLIPPED)).spec(dataset)
    found: Layers = on_ranks(1, layers_alone, spec, connected=False)[0]
    return found


def layers_alone(spec: RunSpec) -> Layers:
    _, sequences, _ = open_source_dataset(Path(spec.data.source), spec.transformer.seq_len)
    model: Any = first_weights(spec)
    with torch.no_grad():  # units of the first block that no token activates
        model.model.layers["0"].mlp.up_proj.weight[:24] = 0
    settings = spec.training.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), betas=settings.betas, eps=settings.eps)
    optimizer.param_groups.clear()
    observed: dict[str, list[Tensor]] = {}
    places = {"embedding": model.model.embed_tokens, "head": model.model.norm}
    places |= {f"block {number}": block for number, block in model.model.layers.items()}
    for name, module in places.items():
        module.register_forward_hook(lambda _, __, found, name=name: observed.setdefault(name, []).append(found))
    for number, block in model.model.layers.items():
        block.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs, name=f"units {number}": observed.setdefault(name, []).append(inputs[0])
        )
    layers: Layers = {}
    for step in range(1, STEPS + 1):
        set_groups(optimizer, dict(model.named_parameters()), spec, step)
        positions = range((step - 1) * 8, step * 8)
        drawn = [sample_at(position, seed=spec.training.seed, samples=len(sequences)) for position in positions]
        observed.clear()
        loss = batch_loss(model, spec, torch.from_numpy(sequences.rows(drawn)), torch.tensor(positions))
        optimizer.zero_grad()
        loss.backward()
        found = {name: {"gradient_norm": norm(p.grad for p in own)} for name, own in members(model).items()}
        before = {name: [p.detach().clone() for p in own] for name, own in members(model).items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.training.gradient_clipping)
        optimizer.step()
        for name, own in members(model).items():
            changes = (p.detach() - old for p, old in zip(own, before[name], strict=True))
            found[name] |= {"weight_norm": norm(before[name]), "update_ratio": norm(changes) / norm(before[name])}
            [activation] = observed[name]
            found[name]["activation_rms"] = activation.double().square().mean().sqrt().item()
        for number in model.model.layers:
            [units] = observed[f"units {number}"]
            rms = units.double().square().mean().sqrt()
            found[f"block {number}"]["dead_share"] = (units.abs().amax((0, 1)) < 1e-3 * rms).double().mean().item()
        for name, columns in found.items():
            for column, value in columns.items():
                layers.setdefault(name, {}).setdefault(column, []).append(value)
    return layers


def members(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        number = re.search(r"\.layers\.(\d+)\.", name)
        layer = f"block {number[1]}" if number else "embedding" if "embed" in name else "head"
        found.setdefault(layer, []).append(parameter)
    return found


def norm(tensors: Iterator[Tensor] | list[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def layers_in_layout(path: Path) -> None:
    """Train the run in ``path`` on this rank, as the loop does."""
    trainer = ready(path)
    weaken(trainer)
    with trainer.measures:
        for step in range(1, STEPS + 1):
            trainer.optimizer_step(step)
            trainer.measures.after_step(step)


def weaken(trainer: Any) -> None:
    """Set the same rows to 0 as in the reference, in the weights that the optimizer updates, too."""
    from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
    from scaletrain_cli.engine.optim.deepspeed_optimizer import use_master_weights

    composed = trainer.composed
    states = ShardedState(composed.engine, composed.model, trainer.checkpointer._mesh)
    for shard in states.shards:
        with states.weight(shard) as weight, torch.no_grad():
            flat = weight.view(-1)
            for placed in shard.slices:
                part = placed.slice
                if part.name == "model.layers.0.mlp.up_proj.weight":
                    spec, width = part.shard_spec, part.whole_shape[1]
                    assert spec is None or spec.dim == 0
                    rows = 24 if spec is None else 24 if spec.rank == 0 else 0
                    kept = max(0, min(part.stop, rows * width) - part.start)
                    flat[placed.offset : placed.offset + kept] = 0
    use_master_weights(composed.engine)


LAYOUTS = [
    Row(1, data=2, accumulation=2),
    Row(3, data=2),
    *(
        pytest.param(row, marks=pytest.mark.long)
        for row in (
            Row(0, data=2),
            Row(2, data=2, checkpointing="full"),
            Row(1, tensor=2, pipeline=2, accumulation=2),
            Row(1, pipeline=3, overrides=("model.tie_word_embeddings=true",), title="tied"),
            Row(0, tensor=2, sequence=2),
            Row(1, data=2, overrides=("layout.offload=optimizer",), title="offload"),
            Row(3, data=2, overrides=("layout.offload=optimizer+params",), title="offload both"),
        )
    ),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_layers_of_a_layout_are_those_of_one_process(row: Row, dataset: Path) -> None:
    spec = Row(**{**vars(row), "overrides": (*row.overrides, *OFTEN, CLIPPED)}).spec(dataset)
    run = begun_run(spec)
    on_ranks(spec.world_size, layers_in_layout, run.path, connected=False)
    layers = read_series(layers_file(run, 1))
    expected = reference(dataset, row.reference)
    assert layers.keys() == {f"layer {name}" for name in expected}
    for name, columns in expected.items():
        own = layers[f"layer {name}"]
        assert list(own.steps) == [1, 2, 3]
        assert own.mean.keys() == columns.keys(), name
        for column, values in columns.items():
            assert list(own.mean[column]) == pytest.approx(values, rel=1e-5), (name, column)
    assert layers["layer block 0"].mean["dead_share"][0] == 0.25
