"""Contradictions between the dimensions of a transformer."""

from collections.abc import Iterator

from scaletrain_cli.spec.hybrid import parts_of
from scaletrain_cli.spec.model import MOST_LAYERS, ModelSpec


def model_inconsistencies(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each dimension of a transformer that contradicts another one."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % kv_heads:
        yield "num_key_value_heads", f"must divide num_attention_heads = {heads}; use {divisors(heads)}."
    yield from _rotary_inconsistencies(model)
    yield from _block_inconsistencies(model)
    yield from _attention_inconsistencies(model)
    if model.positions == "learned" and model.seq_len > model.max_position_embeddings:
        yield "seq_len", f"must not exceed max_position_embeddings = {model.max_position_embeddings}."
    if not model.kv_lora_rank and (model.q_lora_rank or model.qk_rope_head_dim or model.v_head_dim):
        yield "kv_lora_rank", "must be at least 1 when q_lora_rank, qk_rope_head_dim or v_head_dim is set."
    if model.norm_bias and model.norm_kind == "rmsnorm":
        yield "norm_bias", "must be false with rmsnorm, which has no bias."
    if model.zero_centered_norm and model.norm_kind != "rmsnorm":
        yield "zero_centered_norm", "must be false with layernorm."
    if model.first_k_dense_replace > model.num_hidden_layers:
        yield "first_k_dense_replace", f"must not exceed num_hidden_layers = {model.num_hidden_layers}."
    if not model.num_experts and (model.shared_expert_intermediate_size or model.first_k_dense_replace):
        yield (
            "num_experts",
            "must be at least 1 when shared_expert_intermediate_size or first_k_dense_replace is set.",
        )
    if model.num_experts == 0 and model.swiglu_limit is not None:
        yield "num_experts", "must be at least 1 when swiglu_limit is set."
    if model.has_pattern and model.num_hidden_layers > MOST_LAYERS:
        yield (
            "num_hidden_layers",
            f"must not exceed {MOST_LAYERS} with decoder_sparse_step, mlp_only_layers or block_types.",
        )
    elif (model.adapter is not None or model.quantization != "none") and model.num_hidden_layers > MOST_LAYERS:
        yield "num_hidden_layers", f"must not exceed {MOST_LAYERS} with adapter or quantization."
    if any(block >= model.num_hidden_layers for block in model.mlp_only_layers):
        yield "mlp_only_layers", f"must be numbers below num_hidden_layers = {model.num_hidden_layers}."
    if model.bias_update_speed and model.adapter is not None:
        yield "bias_update_speed", "must be 0 with an adapter, which leaves the router as it is."
    if model.shared_expert_gate and not model.shared_expert_intermediate_size:
        yield "shared_expert_gate", "must be false without shared_expert_intermediate_size."
    if model.num_experts == 0 and (model.num_experts_per_tok or model.moe_intermediate_size):
        yield "num_experts", "must be at least 1 when num_experts_per_tok or moe_intermediate_size is set."
    if model.num_experts == 0 and (model.capacity_factor or model.router_z_loss_coef or model.norm_topk_prob):
        yield "num_experts", "must be at least 1 when capacity_factor, router_z_loss_coef or norm_topk_prob is set."
    if model.num_experts and not 1 <= model.num_experts_per_tok <= model.num_experts:
        yield "num_experts_per_tok", f"must be between 1 and num_experts = {model.num_experts}."
    if model.num_experts:
        yield from _group_inconsistencies(model)


def _group_inconsistencies(model: ModelSpec) -> Iterator[tuple[str, str]]:
    groups = model.n_group
    if model.num_experts % groups:
        yield "n_group", f"must divide num_experts = {model.num_experts}; use {divisors(model.num_experts)}."
        return
    members = model.num_experts // groups
    if model.topk_group > groups:
        yield "topk_group", f"must not exceed n_group = {groups}."
    elif model.num_experts_per_tok > model.topk_group * members:
        yield ("num_experts_per_tok", f"must not exceed the {model.topk_group * members} experts in topk_group groups.")
    if model.topk_method == "noaux_tc" and groups > 1 and members == 1:
        yield "n_group", "must leave at least 2 experts in a group, whose scores are added."


def _block_inconsistencies(model: ModelSpec) -> Iterator[tuple[str, str]]:
    if not model.block_types:
        if model.mamba is not None:
            yield "mamba", "has no effect without block_types."
        return
    parts = [parts_of(kind) for kind in model.block_types]
    if any(block.mamba for block in parts) != (model.mamba is not None):
        yield "mamba", f"must be {'null' if model.mamba else 'set'} with these block_types."
    if any(block.experts for block in parts) != (model.num_experts > 0):
        yield "num_experts", f"must be {'0' if model.num_experts else 'at least 1'} with these block_types."
    for key in ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "kv_lora_rank", "adapter"):
        if getattr(model, key) != type(model).model_fields[key].default:
            yield key, "must be left out with block_types."
    if model.local_span is not None:
        yield "block_types", "must be empty with sliding_window or attention_chunk_size."
    if model.quantization != "none":
        yield "quantization", "must be none with block_types."
    if model.base_family != "llama":
        yield "block_types", "must be empty with family gpt."
    if model.mamba is not None and model.mamba.num_heads % model.mamba.groups:
        yield "mamba.groups", f"must divide num_heads = {model.mamba.num_heads}."


def _rotary_inconsistencies(model: ModelSpec) -> Iterator[tuple[str, str]]:
    scaling = model.rope_scaling
    if scaling is not None:
        if model.positions != "rotary":
            yield "rope_scaling", f"has no effect on {model.positions} positions. Remove it."
        problems = scaling.problems_with(model.rotary_dim // 2, model.rope_theta, model.max_position_embeddings)
        yield from ((f"rope_scaling.{key}", message) for key, message in problems)
    if model.positions == "rotary" and (model.rotary_dim % 2 or not model.rotary_dim):
        key = "qk_rope_head_dim" if model.kv_lora_rank else "head_dim"
        if model.partial_rotary_factor < 1 and not model.kv_lora_rank:
            yield "partial_rotary_factor", f"must leave an even number of the {model.head_dim} channels of a head."
        else:
            yield key, "must be even, because rotary positions rotate pairs of channels."


def _attention_inconsistencies(model: ModelSpec) -> Iterator[tuple[str, str]]:
    kinds = set(model.layer_types)
    if model.index_topk and not model.kv_lora_rank:
        yield "index_topk", "must be 0 without latent attention (kv_lora_rank)."
    elif model.index_topk and not (model.index_n_heads and model.index_head_dim):
        yield "index_topk", "must be 0 without index_n_heads and index_head_dim."
    if model.attention_chunk_size is not None:
        if model.sliding_window is not None:
            yield "attention_chunk_size", "must be null with sliding_window."
        elif "chunked_attention" not in kinds:
            yield "attention_chunk_size", "has no effect without chunked_attention in layer_types."
        if "sliding_attention" in kinds:
            yield "layer_types", "must be chunked_attention and full_attention with attention_chunk_size."
        return
    if "chunked_attention" in kinds:
        yield "layer_types", "has chunked_attention, for which attention_chunk_size must be set."
    elif model.sliding_window is None:
        if model.layer_types:
            yield "layer_types", "has no effect without sliding_window. Remove it, or set sliding_window."
        if model.rope_local_base_freq is not None:
            yield "rope_local_base_freq", "has no effect without sliding_window. Remove it, or set sliding_window."
    elif kinds == {"full_attention"}:
        yield "sliding_window", "has no effect if every layer has full_attention. Remove it, or change layer_types."


def divisors(number: int) -> str:
    """Return the divisors of ``number`` as text: ``1, 2, 4 or 8``."""
    numbers = [str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return numbers[0] if len(numbers) == 1 else ", ".join(numbers[:-1]) + f" or {numbers[-1]}"
