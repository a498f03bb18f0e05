"""Adapters compute what PEFT computes, and their first values and masks do not depend on shards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.adapters import AdapterInitialization
from scaletrain_cli.engine.model.attention import KeyedDropout, TokenContext, dropout_key
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.adapter import AdapterSpec, adapted_modules, factor_shapes, is_adapter_parameter
from tests.engine.model.adapted_models import (
    GPT,
    LLAMA,
    MIXTRAL,
    QWEN2_MOE,
    TIED,
    NoBase,
    as_peft,
    fill_alike,
    lora,
    ours,
    pairs,
    save_hugging_face,
    with_peft,
)

CPU = torch.device("cpu")
ALL = {"target_modules": "all-linear"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ENDS = ["q_proj", "embed_tokens", "lm_head"]
EXPERTS = {"target_modules": ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
SHARED = {**EXPERTS, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj", "shared_expert_gate"]}
FUSED = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}


@pytest.mark.parametrize(
    ("spec", "adapter", "targets"),
    [
        pytest.param(LLAMA, lora(), ALL, id="llama"),
        pytest.param(LLAMA, lora(rslora=True), ALL, id="llama-rslora"),
        pytest.param(LLAMA, lora(dora=True), ALL, id="llama-dora"),
        pytest.param(LLAMA, lora(targets=ENDS), {"target_modules": ENDS}, id="llama-embedding-and-head"),
        pytest.param(TIED, lora(targets=ENDS), {"target_modules": ENDS}, id="tied-embedding-and-head"),
        pytest.param(GPT, lora(), FUSED, id="gpt"),
        pytest.param(GPT, lora(dora=True), FUSED, id="gpt-dora"),
        pytest.param(MIXTRAL, lora(targets=["all-linear", "experts.*"]), EXPERTS, id="mixtral-experts"),
        pytest.param(QWEN2_MOE, lora(targets=["all-linear", "experts.*"]), SHARED, id="qwen2-moe-experts"),
    ],
)
def test_peft_computes_the_same(spec: ModelSpec, adapter: AdapterSpec, targets: dict[str, Any], tmp_path: Path) -> None:
    theirs = with_peft(save_hugging_face(spec, tmp_path), adapter, **targets)
    model = ours(spec, adapter, tmp_path)
    for name, parameter, other in pairs(model, theirs):
        if name.endswith("magnitude_vector"):
            torch.testing.assert_close(parameter, other)  # the first value, norms of the weight's rows
    fill_alike(model, theirs)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2))
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)

    loss = model(tokens, labels)
    reference = theirs(input_ids=tokens, labels=tokens).loss
    loss.backward()
    reference.backward()

    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    found = list(pairs(model, theirs))
    assert len(found) >= 6
    for name, parameter, other in found:
        difference = (as_peft(name, parameter.grad) - other.grad).abs().max()
        assert difference <= 1e-5 * other.grad.abs().max(), name


@pytest.mark.parametrize(
    ("spec", "adapter"),
    [
        (LLAMA, lora(dora=True)),
        (TIED, lora(targets=ENDS)),
        (GPT, lora(targets=["c_attn", "wpe"])),
        (QWEN2_MOE, lora(targets=["all-linear", "experts.*"])),
    ],
)
def test_names_and_shapes_are_those_of_the_spec(spec: ModelSpec, adapter: AdapterSpec, tmp_path: Path) -> None:
    save_hugging_face(spec, tmp_path)
    shapes, tied = dict(named_matrices(outline(spec))), spec.tie_word_embeddings

    found = {name: shape for name, shape in named_matrices(ours(spec, adapter, tmp_path)) if is_adapter_parameter(name)}

    expected: dict[str, tuple[int, ...]] = {}
    for module in adapted_modules(adapter, shapes, tied=tied):
        expected |= factor_shapes(adapter, module)
    assert found == expected


def test_a_shard_of_a_first_value_is_that_part_of_the_whole() -> None:
    source = AdapterInitialization(NoBase(), 5, CPU, {})
    name, shape = "model.layers.0.self_attn.o_proj.lora_A.weight", (8, 32)

    whole = source.read(name, shape, None)

    assert whole.abs().max() <= 32**-0.5
    assert whole.std() == pytest.approx((3 * 32) ** -0.5, rel=0.1)  # of a uniform distribution
    for rank in range(4):
        spec = ShardSpec(1, 4, rank)
        assert torch.equal(source.read(name, shape, spec), spec.take(whole))


def test_a_rank_with_some_channels_drops_those_of_the_whole() -> None:
    context = TokenContext(torch.arange(6), torch.tensor([3, 9]))
    whole, x = KeyedDropout(0.3), torch.ones(2, 6, 22)
    whole.key = dropout_key(1, "model.layers.0.self_attn.o_proj.lora_dropout")

    dropped = whole(x, context)

    assert 0 < (dropped == 0).float().mean() < 0.6
    for first, last in ((0, 11), (11, 22), (5, 6)):
        part = KeyedDropout(0.3, first_channel=first)
        part.key = whole.key
        assert torch.equal(part(x[..., first:last], context), dropped[..., first:last])


def test_dropout_of_an_adapter_is_off_in_evaluation_and_keyed_in_training(tmp_path: Path) -> None:
    save_hugging_face(LLAMA, tmp_path)
    model, plain = (ours(LLAMA, lora(dropout=p), tmp_path) for p in (0.5, 0.0))
    with torch.no_grad():
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                if name.endswith("lora_B.weight"):
                    parameter.fill_(0.05)
    tokens = torch.arange(32).view(2, 16)

    first, second = (model(tokens, tokens).item() for _ in range(2))
    expected = plain(tokens, tokens).item()

    assert first == second != expected
    assert model.eval()(tokens, tokens).item() == expected
