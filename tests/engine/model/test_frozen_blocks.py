"""Frozen weights: the FLOPs of a pass and what it saves, against torch's counters on the engine's modules."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.plan.architecture import block_attention_flops
from scaletrain_cli.plan.block_graph import BlockTraining, backward_products, block_flops, block_graph
from scaletrain_cli.plan.memory.activations import token_activations
from scaletrain_cli.plan.memory.block_activations import BlockKernels, materializes_scores
from scaletrain_cli.plan.trained_stages import stage_flops_per_token, trained_stages
from scaletrain_cli.spec import ModelSpec
from tests.engine.fresh_model import build_model
from tests.model_sizes import model_sizes
from tests.plan.specs import model_of, spec_of

BATCH, LENGTH = 2, 64
PRECISIONS = (torch.float32, torch.bfloat16)
SIZES: dict[str, Any] = model_sizes(
    hidden=128, layers=2, heads=8, head_dim=16, intermediate=384, vocab=256, seq_len=LENGTH, positions=LENGTH
)
GEMMA = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": 4096}
LATENT = {"num_key_value_heads": 8, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS = {
    "llama": model_of("llama-7b", **SIZES, num_key_value_heads=2),
    "qk_norm": model_of("llama-7b", **SIZES, num_key_value_heads=8, qk_norm=True),
    "gemma2": model_of("gemma-2-2b", **GEMMA),
    "olmo2": model_of(
        "llama-7b", **SIZES, num_key_value_heads=2, norm_position="post", qk_norm=True, qk_norm_scope="projection"
    ),
    "sinks": model_of("llama-7b", **SIZES, num_key_value_heads=8, attention_sinks=True),
    "phi3": model_of("llama-7b", **SIZES, num_key_value_heads=2, fused_projections=True),
    "latent": model_of("llama-7b", **SIZES, **LATENT),
    "gpt": model_of("gpt2", **SIZES, num_key_value_heads=8, tie_word_embeddings=False),
}
# What trains in both blocks, by the last part of a module's name.
TRAINED = {
    "nothing": (),
    "attention output": ("o_proj", "attn.c_proj"),
    "queries": ("q_proj", "c_attn", "qkv_proj", "q_b_proj"),
    "sinks": ("self_attn",),
    "values": ("v_proj", "c_attn", "kv_a_proj_with_mqa"),
    "second norm": ("post_attention_layernorm", "ln_2"),
    "norm over queries": ("q_norm", "ln_1", "kv_a_layernorm"),
    "up": ("up_proj", "c_fc"),
    "down": ("down_proj", "mlp.c_proj"),
    "queries and down": ("q_proj", "c_attn", "down_proj", "mlp.c_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "attn.c_proj"),
    "everything": ("",),
    "norms": ("input_layernorm", "post_attention_layernorm", "ln_1", "ln_2"),
}


def trained_modules(model: ModelSpec, endings: tuple[str, ...]) -> frozenset[str]:
    graph = block_graph(model, bool(model.num_experts))
    names = [*(layer.name for layer in graph.linears), graph.attention_norm, graph.mlp_norm, *graph.head_norms]
    names += [norm for norm in graph.latent_norms if norm]
    names += [graph.after_attention, graph.after_mlp, graph.sinks]
    return frozenset(name for name in names if name and name.endswith(endings)) if endings else frozenset()


@cache
def model_in(model: ModelSpec, precision: torch.dtype) -> CausalLM:
    return build_model(model, seed=0).to(precision)


class Saved:
    """Bytes that a pass saves in storages which are no weights, and its FLOPs, forward and backward."""

    def __init__(self, model: ModelSpec, modules: frozenset[str], reached: bool, precision: torch.dtype) -> None:
        built = model_in(model, precision)
        built.zero_grad()  # of the pass before
        for name, parameter in built.named_parameters():
            within = name.split(".", 3)[-1].rpartition(".")[0]
            parameter.requires_grad_((".layers." in name or ".h." in name) and within in modules)
        weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
        kept: dict[int, tuple[int, torch.Tensor]] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        hidden = torch.randn(BATCH, LENGTH, model.hidden_size, dtype=precision).requires_grad_(reached)
        tokens = BATCH * LENGTH
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with FlopCounterMode(display=False) as forward, hooks:
            out = built.transform(hidden, TokenContext(torch.arange(LENGTH), torch.arange(BATCH)))
        self.forward = products(forward) / tokens
        self.saved = sum(size for size, _ in kept.values()) / tokens
        self.backward = 0.0
        if out.requires_grad:
            with FlopCounterMode(display=False) as backward:
                out.sum().backward()
            self.backward = products(backward) / tokens


def products(counted: FlopCounterMode) -> int:
    """FLOPs of matrix products, without attention, of which torch has no formula for CPUs."""
    return sum(flops for name, flops in counted.get_flop_counts()["Global"].items() if "mm" in str(name))


def blocks(modules: frozenset[str], reached: bool) -> list[BlockTraining]:
    first = BlockTraining(reached, modules)
    return [first, BlockTraining(reached or bool(modules), modules)]


# Unfused attention of which only some inputs have a gradient saves less than planned.
FEWER = {("gemma2", what, False) for what in ("queries", "values", "queries and down")}
CASES = [case for case in itertools.product(MODELS, TRAINED, (True, False)) if case not in FEWER]
CASES = [(name, what, reached) for name, what, reached in CASES if what != "sinks" or name == "sinks"]
# Of one family all are short; of the others these.
OF_OTHERS = ("everything", "queries", "values", "norm over queries", "sinks")


def is_short(name: str, what: str, reached: bool) -> bool:
    whole = what == "everything" and name in ("qk_norm", "gpt")
    return whole or name == "llama" or (what in OF_OTHERS and reached == (name == "gemma2"))


CASES = [case if is_short(*case) else pytest.param(*case, marks=pytest.mark.long) for case in CASES]


@pytest.mark.parametrize(("name", "what", "reached"), CASES)
def test_a_pass_saves_and_computes_what_is_planned(name: str, what: str, reached: bool) -> None:
    precisions = PRECISIONS if what == "everything" else [PRECISIONS[len(what) % 2]]
    for precision in precisions:
        require_planned(MODELS[name], trained_modules(MODELS[name], TRAINED[what]), reached, precision)


def require_planned(model: ModelSpec, modules: frozenset[str], reached: bool, precision: torch.dtype) -> None:
    measured = Saved(model, modules, reached, precision)
    planned = sum(
        token_activations(model, BlockKernels(precision.itemsize), training=one).saved
        for one in blocks(modules, reached)
    )
    # rotary tables are the same for all blocks; LayerNorm's statistics have 16 bits on a CPU
    tables = 2 * 4 * model.rotary_dim / BATCH if model.positions == "rotary" and measured.saved else 0
    assert planned == pytest.approx(measured.saved - tables, abs=16)
    flops_by_block = [block_flops(model, one, experts=False) for one in blocks(modules, reached)]
    core = 0 if materializes_scores(model) else block_attention_flops(model)  # its products are counted
    forward = sum(flops - core for flops, _ in flops_by_block)
    attended = [backward_products(model, one, experts=False).attention for one in blocks(modules, reached)]
    backward = sum(flops - 2 * core * mixed for (_, flops), mixed in zip(flops_by_block, attended, strict=True))
    assert (forward, backward) == (measured.forward, measured.backward)


def test_sinks_biases_of_experts_and_a_clamp_of_swiglu_save_nothing() -> None:
    experts = {**SIZES, "num_key_value_heads": 8, "num_experts": 4, "num_experts_per_tok": 2}
    own = {"attention_sinks": True, "bias": True, "router_bias": True, "swiglu_limit": 7.0}
    models = [model_of("llama-7b", **experts, **more) for more in ({}, own)]
    plain, more = (Saved(model, trained_modules(model, ("",)), True, torch.bfloat16).saved for model in models)
    assert more == pytest.approx(plain, abs=1)
    plain, more = (token_activations(model, BlockKernels(2)).saved for model in models)
    assert more == plain


@pytest.mark.parametrize("what", ["lm_head*", "model.norm.*", "*.1.mlp.down_proj.*"])
def test_the_head_has_a_backward_product_for_each_gradient_that_is_needed(what: str) -> None:
    changes = {f"model__{key}": value for key, value in {**SIZES, "num_key_value_heads": 2}.items()}
    spec = spec_of("llama-7b", **changes, training__trainable=[{"match": what}])
    (stage,) = trained_stages(spec)
    built = build_model(spec.transformer, seed=0)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(what.strip("*") in name)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        built(tokens, tokens).backward()
    core = 2 * block_attention_flops(spec.transformer)  # of two blocks; none has a backward pass through attention
    assert stage_flops_per_token(spec.transformer, stage) - core == products(counted) / (BATCH * LENGTH)
