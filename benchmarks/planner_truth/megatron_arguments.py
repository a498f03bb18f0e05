"""The model that Megatron-LM builds from its command line, with Megatron-LM's defaults for missing arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner_truth.mapping import Unmapped, padded_vocab, transformer

_VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "nemotron_2_256k": 256000,
    "Llama2Tokenizer": 32000,
}


def whole_or_none(args: Mapping[str, Any], name: str) -> int | None:
    """Return the argument as an integer; None if it was not given."""
    return int(args[name]) if name in args else None


def model_section(args: Mapping[str, Any], family: str, tensor: int) -> dict[str, Any]:
    """Return the model section from arguments by their names with underscores. Raises Unmapped."""
    hidden, heads, layers = int(args["hidden_size"]), int(args["num_attention_heads"]), int(args["num_layers"])
    gated = bool(args.get("swiglu"))
    ffn = whole_or_none(args, "ffn_hidden_size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    norm = "rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm"
    positions = {"rope": "rotary", "none": "none"}.get(str(args.get("position_embedding_type")), "learned")
    model = transformer(
        "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole_or_none(args, "num_query_groups") if args.get("group_query_attention") else None,
        ffn=ffn,
        vocab=padded_vocab(_vocabulary(args, family), tensor, int(args.get("make_vocab_size_divisible_by", 128))),
        seq_len=int(args["seq_length"]),
        tied=not args.get("untie_embeddings_and_output_weights"),
        gated_mlp=gated,
        norm=norm,
        norm_bias=norm == "layernorm",
        bias=not args.get("disable_bias_linear"),
        position_embedding="rotary" if args.get("use_rotary_position_embeddings") else positions,
        qk_norm=bool(args.get("qk_layernorm")),
        hidden_dropout=float(args.get("hidden_dropout", 0.1)),
        attention_dropout=float(args.get("attention_dropout", 0.1)),
    )
    model["max_position_embeddings"] = int(args.get("max_position_embeddings", args["seq_length"]))
    if "kv_channels" in args:
        model["head_dim"] = int(args["kv_channels"])
    return model | _latent_attention(args) | _experts(args, layers, ffn)


def _vocabulary(args: Mapping[str, Any], family: str) -> int:
    kind = str(args.get("tokenizer_type") or ("BertWordPieceLowerCase" if family == "bert" else "GPT2BPETokenizer"))
    if "vocab_size" in args:
        return int(args["vocab_size"])
    if "nemotron_2_256k" in str(args.get("tokenizer_model")):
        kind = "nemotron_2_256k"
    if kind not in _VOCABULARIES:
        raise Unmapped(f"vocabulary of {kind} is not known")
    return _VOCABULARIES[kind] + int(args.get("vocab_extra_ids", 0))


def _latent_attention(args: Mapping[str, Any]) -> dict[str, Any]:
    if not args.get("multi_latent_attention"):
        return {}
    return {
        "kv_lora_rank": int(args.get("kv_lora_rank", 32)),
        "q_lora_rank": int(args.get("q_lora_rank", 0)),
        "head_dim": int(args.get("qk_head_dim", 128)),
        "qk_rope_head_dim": int(args.get("qk_pos_emb_head_dim", 64)),
        "v_head_dim": int(args.get("v_head_dim", 128)),
    }


def _experts(args: Mapping[str, Any], layers: int, ffn: int) -> dict[str, Any]:
    if not args.get("num_experts"):
        return {}
    pattern = str(args.get("moe_layer_freq", "1"))
    dense = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)", pattern)
    if pattern != "1" and (dense is None or int(dense[1]) + int(dense[2]) != layers):
        raise Unmapped("experts in every other layer")
    return {
        "num_experts": int(args["num_experts"]),
        "num_experts_per_tok": int(args.get("moe_router_topk", 2)),
        "moe_intermediate_size": int(args.get("moe_ffn_hidden_size", ffn)),
        "shared_expert_intermediate_size": int(args.get("moe_shared_expert_intermediate_size", 0)),
        "first_k_dense_replace": int(dense[1]) if dense else 0,
    }
