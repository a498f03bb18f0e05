import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from scaletrain_cli.engine.compose import wrap_blocks
from scaletrain_cli.engine.optim.optimizers import parameter_groups
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.training import LayoutSpec, OptimizerSpec
from tests.engine.fresh_model import build_model
from tests.model_sizes import model_sizes

LLAMA = {
    **model_sizes(
        hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, seq_len=32, positions=32
    ),
    "family": "llama",
}
GPT = {**LLAMA, "family": "gpt", "num_key_value_heads": 4, "intermediate_size": 256, "tie_word_embeddings": True}
MODELS = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 32},
    "gpt": GPT,
}
every_model = pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS.keys())


def spec(dims: dict) -> ModelSpec:
    return ModelSpec.model_validate(dims)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(512, (rows, 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@every_model
def test_the_loss_of_a_new_model_is_that_of_a_uniform_guess(dims: dict) -> None:
    loss = build_model(spec(dims), seed=0)(*batch())
    assert loss.item() == pytest.approx(math.log(512), rel=0.01)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (build_model(spec(LLAMA), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@every_model
@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("selective", {}),
        ("selective", {"selective_scope": "attention"}),
        ("full", {}),
        ("full", {"activation_offload": True}),
        ("none", {"activation_offload": True}),
    ],
)
def test_recomputing_or_offloading_activations_changes_no_bit(dims: dict, mode: str, keys: dict) -> None:
    plain, recomputed = build_model(spec(dims), seed=0), build_model(spec(dims), seed=0)
    wrap_blocks(recomputed, LayoutSpec(**keys), mode)
    for model in (plain, recomputed):
        model(*batch()).backward()
    gradients = zip(plain.parameters(), recomputed.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)


@every_model
def test_weights_do_not_go_to_the_host_with_the_activations(dims: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[torch.Tensor] = []

    class Watched(save_on_cpu):
        def __init__(self, **keys: bool) -> None:
            super().__init__(**keys)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: gone.append(tensor) or pack(tensor)

    monkeypatch.setattr("scaletrain_cli.engine.compose.save_on_cpu", Watched)
    model = build_model(spec(dims), seed=0)
    wrap_blocks(model, LayoutSpec(activation_offload=True), "none")
    model(*batch())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert gone
    assert not weights & {tensor.untyped_storage().data_ptr() for tensor in gone}


@every_model
def test_norms_and_biases_do_not_decay(dims: dict) -> None:
    model = build_model(spec(dims), seed=0)
    decayed, others = parameter_groups(model, OptimizerSpec(weight_decay=0.1))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    undecayed = {id(parameter) for parameter in others["params"]}
    named = {name for name, parameter in model.named_parameters() if id(parameter) in undecayed}
    assert named == {n for n, _ in model.named_parameters() if "norm" in n or "ln_" in n or n.endswith("bias")}


@every_model
def test_embeddings_have_no_weight_decay_if_the_spec_says_so(dims: dict) -> None:
    model = build_model(spec(dims), seed=0)
    _, usual = parameter_groups(model, OptimizerSpec())
    decayed, others = parameter_groups(model, OptimizerSpec(decay_embeddings=False))
    moved = {id(parameter) for parameter in others["params"]} - {id(parameter) for parameter in usual["params"]}
    embeddings = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    assert moved == {id(parameter) for name, parameter in model.named_parameters() if name.endswith(embeddings)}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
def test_compiled_and_recomputed_blocks_make_one_graph_that_computes_the_same() -> None:
    from torch._dynamo.testing import CompileCounter

    plain, compiled = build_model(spec(LLAMA), seed=0), build_model(spec(LLAMA), seed=0)
    counter = CompileCounter()
    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=counter)):
        wrap_blocks(compiled, LayoutSpec(), "full", compiled=True)
    for model in (plain, compiled):
        model(*batch()).backward()
    assert counter.frame_count == 1  # one graph serves all blocks
    gradients = zip(plain.parameters(), compiled.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in gradients)
