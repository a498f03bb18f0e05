from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.parallel.mesh import Axis, build_mesh
from scaletrain_cli.engine.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from tests.engine.ranks import on_ranks

_SPEC = """
schema: scaletrain/v1
name: tied
model: {family: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
        intermediate_size: 32, vocab_size: 64, seq_len: 8, tie_word_embeddings: true}
data: {source: python-stdlib, tokenizer: {vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 2, steps: 2, optimizer: {lr: 1.0e-2}}
layout: {pipeline_parallel: 2, zero_stage: 1}
cluster: {gpu: cpu, gpus_per_node: 2}
"""


def _tied_weight_after_a_step(overrides: list[str]) -> tuple[Tensor, Tensor]:
    spec = parse_spec(_SPEC, file="tied.yaml", base_dir=Path(), overrides=overrides)
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    composed = compose(spec, layout, mesh, device)
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    batches = [
        MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), torch.arange(8), torch.arange(2), None)
        for part in tokens.split(2)
    ]
    weight = composed.model.token_embedding.weight
    assert isinstance(weight, Tensor)
    begun = weight.detach().clone()
    build_stepper(composed, mesh, device, spec.training).train(batches)
    return begun, weight.detach().clone()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])  # DeepSpeed keeps gradients elsewhere in each
def test_a_tied_embedding_stays_one_weight_on_the_first_and_the_last_stage(precision: str) -> None:
    scale = ["training.loss_scale.initial=1024"] if precision == "fp16" else []
    (begun, first), (_, last) = on_ranks(2, _tied_weight_after_a_step, [f"training.precision={precision}", *scale])
    assert not torch.equal(begun, first)
    assert torch.equal(first, last)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_sharded_layers_use_what_zero3_replaces(layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    cut = layer(nn.Linear(4, 4, bias=False), Axis(size=2, rank=0))
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, weight, bias=None: torch.full((1,), 7.0))
    assert cut(torch.ones(1, 4)).item() == 7.0
