from functools import partial

import pytest
import torch

from scaletrain_cli.engine.compose import wrap_blocks
from scaletrain_cli.engine.metrics.memory_measurement import watching_activations
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.plan.memory.activations import Recomputation, stage_activation_bytes, token_activations
from scaletrain_cli.plan.memory.block_activations import BlockKernels
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.training import LayoutSpec
from tests.plan.specs import model_of

BATCH, LENGTH, LAYERS = 2, 64, 4
WAYS = [Recomputation(mode) for mode in ("none", "selective", "full")]
WAYS += [Recomputation("selective", every=3), Recomputation("selective", "attention")]


def small(family: str, **dims: int) -> ModelSpec:
    preset = {"llama": "llama-7b", "gpt": "gpt2"}[family]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    return model_of(preset, **{**sizes, **dims}, vocab_size=64, seq_len=LENGTH)


def model(spec: ModelSpec, again: Recomputation, dtype: torch.dtype, *, compiled: bool = False) -> CausalLM:
    made = outline(spec).to_empty(device="cpu").to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layout = LayoutSpec.model_validate({"selective_scope": again.scope, "selective_every": again.every})
    wrap_blocks(made, layout, again.mode, compiled=compiled)
    return made


@pytest.mark.parametrize("again", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "dims"), [("llama", {"num_key_value_heads": 2}), ("gpt", {})])
def test_blocks_save_as_planned(family: str, dims: dict[str, int], dtype: torch.dtype, again: Recomputation) -> None:
    spec = small(family, **dims)
    made, tokens = model(spec, again, dtype), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with watching_activations(made) as saved:
        made(tokens, tokens).backward()
    per_token = token_activations(spec, BlockKernels(dtype.itemsize))
    planned = stage_activation_bytes(per_token, BATCH * LENGTH, LAYERS, again, 1)
    assert saved.bytes == pytest.approx(planned, rel=0.05)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize(
    ("family", "dims", "again"),
    [
        ("llama", {"num_key_value_heads": 2, "qk_norm": True}, Recomputation("none")),
        pytest.param(
            "llama", {"num_key_value_heads": 2}, Recomputation("selective", "attention"), marks=pytest.mark.long
        ),
        pytest.param("gpt", {}, Recomputation("none"), marks=pytest.mark.long),
    ],
)
def test_a_compiled_block_saves_less_and_that_is_planned(
    family: str, dims: dict[str, int], again: Recomputation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is saved is decided as for inductor, before it would spend seconds on C++.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    spec, batch = small(family, **dims, hidden_size=64, num_hidden_layers=1), 8
    made, tokens = model(spec, again, torch.bfloat16, compiled=True), torch.zeros(batch, LENGTH, dtype=torch.int64)
    with watching_activations(made) as saved:
        made(tokens, tokens).backward()
    per_token = token_activations(spec, BlockKernels(2, compiled=True))
    planned = stage_activation_bytes(per_token, batch * LENGTH, 1, again, 1)
    assert saved.bytes == pytest.approx(planned, rel=0.05)


def test_watching_changes_no_gradient_and_counts_the_first_pass_alone() -> None:
    made = model(small("llama", num_key_value_heads=4), Recomputation("selective"), torch.float32)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 64
    made(tokens, tokens).backward()
    plain = [parameter.grad for parameter in made.parameters()]
    made.zero_grad()
    with watching_activations(made) as saved:
        made(tokens, tokens).backward()
        first = saved.bytes
        made(tokens.repeat(2, 1), tokens.repeat(2, 1))
    assert all(torch.equal(p.grad, before) for p, before in zip(made.parameters(), plain, strict=True))
    assert saved.bytes == first
    assert "transform" not in vars(made)
