"""Tiny models of each family of transformers with random weights, and ours with the same weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.loss import logits_of
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.hugging_face import from_config, read_config
from scaletrain_cli.spec.model_consistency import model_inconsistencies
from scaletrain_cli.spec.presets import derived_dimensions
from tests.model_sizes import model_sizes

SIZES: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **model_sizes(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=64, positions=64),
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 3.0, 6.0]}
_UNROUNDED_YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 16, "rope_theta": 1000.0},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 10000.0},
    "original_max_position_embeddings": 16,
}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2},
    "router_aux_loss_coef": 0.0,  # which transformers does not add
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "router_aux_loss_coef": 0.0}
# Longer than every window and than the original context of each scaling.
LENGTH = 24
# By name: model_type and settings of the transformers config; windows of 8 tokens.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama dynamic": ("llama", {"rope_scaling": _DYNAMIC, "max_position_embeddings": 16}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {
            **{"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 24},
            **{"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi4-mini": (
        "phi3",
        {
            **{"rope_scaling": _LONGROPE, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75},
            **{"tie_word_embeddings": True},
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 8, "num_hidden_layers": 4, "rope_scaling": _UNROUNDED_YARN}),
    "deepseek v2": (
        "deepseek_v2",
        {
            **{**_LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
            **{"routed_scaling_factor": 1.5, "rope_scaling": _YARN},
        },
    ),
    "deepseek v3": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_shared_experts": 2, "rope_scaling": _YARN},
    ),
    "deepseek dense": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 2, "rope_interleave": False},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
            **{"rope_parameters": _UNROUNDED_YARN, "swiglu_limit": 1.0},
        },
    ),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]}),
    "qwen2_moe windows": (
        "qwen2_moe",
        {
            **{**_EXPERTS, "shared_expert_intermediate_size": 16, "norm_topk_prob": True, "qkv_bias": False},
            **{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True},
    ),
}


def reference(name: str, folder: Path, **changes: Any) -> nn.Module:
    """Save and return a random model of a family, in fp32 and for evaluation."""
    kind, settings = FAMILIES[name]
    sizes = {**SIZES, **settings, **changes}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        sizes |= changes
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that every setting shows
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(folder)
    return model


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    found = derived_dimensions({**from_config(read_config(folder)), "seq_len": LENGTH, **changes})
    spec = ModelSpec.model_validate(found)
    assert list(model_inconsistencies(spec)) == []
    return spec


def loaded(spec: ModelSpec, folder: Path) -> CausalLM:
    model = outline(spec)
    materialize(model, HuggingFaceFolder(folder, outline(spec)), torch.device("cpu"))
    return model


def tokens_of(length: int = LENGTH, rows: int = 2) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: CausalLM, tokens: Tensor, context: TokenContext | None = None) -> Tensor:
    if context is None:
        context = TokenContext(torch.arange(tokens.shape[1]), torch.arange(tokens.shape[0]))
    hidden = model.embed(tokens, context)
    hidden = model.final_norm(model.transform(hidden, model.with_masks(context, hidden)))
    return logits_of(hidden, model.lm_head.weight, model.lm_head.softcap)
