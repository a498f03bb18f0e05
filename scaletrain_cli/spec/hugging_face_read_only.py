"""Architectures of Hugging Face whose config.json is read and not written.

Most have blocks that the engine does not build: ``planned_architecture`` names them, and such a run is planned, but
cannot be submitted. What changes neither parameters nor FLOPs nor memory is then irrelevant.
"""

from dataclasses import replace
from typing import Any

from scaletrain_cli.spec.hugging_face_architectures import ARCHITECTURES, LATENT_KEYS, Architecture
from scaletrain_cli.spec.presets import SourceError

# The language model in a multimodal config.json: its default model_type, and the value of tie_word_embeddings.
TEXT_PARTS: dict[str, tuple[str, bool]] = {"gemma3": ("gemma3_text", True), "llama4": ("llama4_text", False)}
# Keys of a multimodal config.json about images, of which the language model has none.
ABOUT_IMAGES = frozenset(
    "vision_config boi_token_index eoi_token_index image_token_index image_token_id boi_token_id eoi_token_id "
    "mm_tokens_per_image initializer_range".split()
)

_LLAMA4_LAYERS = frozenset("attention_chunk_size interleave_moe_layer_step moe_layers no_rope_layers".split())
_LLAMA4_USED = _LLAMA4_LAYERS | {"intermediate_size_mlp", "use_qk_norm", "no_rope_layer_interval", "layer_types"}
_MAMBA_TRAINING = frozenset(
    "use_mamba_kernels use_mambapy use_associative_scan rescale_prenorm_residual time_step_min time_step_max "
    "time_step_floor time_step_limit time_step_rank mamba_ssm_cache_dtype num_logits_to_keep residual_in_fp32 "
    "mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_dt_limit num_nextn_predict_layers "
    "mtp_layers_block_type mtp_hybrid_override_pattern expand mamba_expand moe_shared_expert_overlap rms_norm_eps "
    "layer_norm_epsilon sliding_window".split()
)
_PATTERN = {"M": "mamba", "E": "experts", "*": "attention", "-": "mlp"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention", "moe": "experts"}
_BLOCK_NAMES |= {name: name for name in ("mamba", "attention", "mlp", "experts")}


_GLM_EXPERTS = frozenset(
    "first_k_dense_replace norm_topk_prob n_group topk_group routed_scaling_factor num_experts_per_tok".split()
)
_V32_KEYS = frozenset("index_topk index_n_heads index_head_dim n_group topk_group routed_scaling_factor".split())


def _deepseek_v32(config: dict[str, Any]) -> dict[str, Any]:
    """Return the indexer and the router of a DeepSeek-V3.2. Raises SourceError for other kinds of layers."""
    layers, dense = _whole(config, "num_hidden_layers", 61), config.get("first_k_dense_replace", 3)
    usual = {"layer_types": ["indexed_attention"] * layers}
    if isinstance(dense, int):
        usual["mlp_layer_types"] = ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense)
    for key, kinds in usual.items():
        if config.get(key) not in (None, kinds):
            raise SourceError(
                f"has {key} = {str(config[key])[:80]}, but only {kinds[0]} and its usual order is supported"
            )
    kept = _V32_KEYS | LATENT_KEYS | {"moe_intermediate_size", "norm_topk_prob"}
    return {key: config[key] for key in sorted(kept & config.keys())}


def _llama4(config: dict[str, Any]) -> dict[str, Any]:
    """Return chunks, dense blocks and widths of a Llama 4. Raises SourceError for other patterns of layers."""
    layers = _whole(config, "num_hidden_layers", 48)
    every = _whole(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or set(rotated) - {0, 1}:
        raise SourceError(f"has no_rope_layers = {str(rotated)[:80]}, which is no 0 or 1 for each layer")
    kinds = ["chunked_attention" if turned else "full_attention" for turned in rotated[:layers]]
    if config.get("layer_types") not in (None, kinds):
        raise SourceError("has layer_types that differ from chunked_attention where no_rope_layers is 1")
    step = _whole(config, "interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, layers, step))
    if not isinstance(sparse, list) or not sparse or not all(isinstance(layer, int) for layer in sparse):
        raise SourceError(f"has moe_layers = {str(sparse)[:80]}, which are no numbers of layers")
    width = _whole(config, "intermediate_size", 8192)
    chunk = config.get("attention_chunk_size", 8192)
    settings: dict[str, Any] = {
        "intermediate_size": _whole(config, "intermediate_size_mlp", 16384),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "attention_chunk_size": chunk if 1 in rotated[:layers] else None,
        "rope_scaling": None,
    }
    if settings["attention_chunk_size"] is not None:
        settings["layer_types"] = shortest(kinds)
    if sparse == list(range(step - 1, layers, step)):
        settings["decoder_sparse_step"] = step
    else:
        settings["mlp_only_layers"] = [layer for layer in range(layers) if layer not in sparse]
    if config.get("use_qk_norm", True):
        settings |= {"qk_norm": True, "qk_norm_scope": "unweighted"}
    return settings


def _nemotron_h(config: dict[str, Any]) -> dict[str, Any]:
    """Return blocks and state-space layers of a Nemotron-H. Raises SourceError for unknown kinds of blocks."""
    pattern, named = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(named, list):
        kinds = [_BLOCK_NAMES.get(str(name)) for name in named]
    elif isinstance(pattern, str):
        kinds = [_PATTERN.get(letter) for letter in pattern]
    else:
        raise SourceError("has neither hybrid_override_pattern nor layers_block_type")
    if not kinds or None in kinds:
        raise SourceError(f"has unknown blocks in {str(named or pattern)[:80]}")
    biases = {key for key in ("use_bias", "mlp_bias", "mamba_proj_bias", "attention_bias") if config.get(key)}
    if biases:
        raise SourceError(f"has {min(biases)} = true, but only false is supported")
    if config.get("mlp_hidden_act", "relu2") != "relu2":
        raise SourceError(f"has mlp_hidden_act = {str(config['mlp_hidden_act'])[:80]}, but not relu2")
    settings: dict[str, Any] = {
        "block_types": shortest([str(kind) for kind in kinds]),
        "num_hidden_layers": len(kinds),
        "head_dim": config.get("attention_head_dim", config.get("head_dim", 128)),
        "norm_eps": config.get("layer_norm_epsilon", config.get("rms_norm_eps", 1e-5)),
        "mamba": {
            "num_heads": _whole(config, "mamba_num_heads", 128),
            "head_dim": _whole(config, "mamba_head_dim", 64),
            "state_size": _whole(config, "ssm_state_size", 128),
            "groups": _whole(config, "mamba_n_groups" if "mamba_n_groups" in config else "n_groups", 8),
            "conv_kernel": _whole(config, "mamba_d_conv" if "mamba_d_conv" in config else "conv_kernel", 4),
            "conv_bias": config.get("use_conv_bias", True),
            "chunk_size": _whole(config, "chunk_size", 128),
        },
    }
    if "mamba" not in kinds:
        del settings["mamba"]
    if "experts" in kinds:
        settings |= {
            "num_experts": _whole(config, "n_routed_experts", 8),
            "num_experts_per_tok": _whole(config, "num_experts_per_tok", 2),
            "moe_intermediate_size": _whole(config, "moe_intermediate_size", 7688),
            "shared_expert_intermediate_size": _whole(config, "moe_shared_expert_intermediate_size", 7688),
            **{"norm_topk_prob": config.get("norm_topk_prob", True), "scoring_func": "sigmoid"},
            **{"topk_method": "noaux_tc", "router_aux_loss_coef": config.get("router_aux_loss_coef") or 0.0},
        }
        groups = ("n_group", "topk_group", "routed_scaling_factor")
        settings |= {key: config[key] for key in groups if key in config}
    return settings


def _jamba(config: dict[str, Any]) -> dict[str, Any]:
    """Return blocks and state-space layers of a Jamba (arXiv:2403.19887)."""
    layers, hidden = _whole(config, "num_hidden_layers", 32), _whole(config, "hidden_size", 4096)
    experts = _whole(config, "num_experts", 16)
    attends = (_whole(config, "attn_layer_period", 8), config.get("attn_layer_offset", 4))
    routes = (_whole(config, "expert_layer_period", 2), config.get("expert_layer_offset", 1))

    def kind(layer: int) -> str:
        mixer = "attention" if layer % attends[0] == attends[1] else "mamba"
        return f"{mixer}+{'experts' if experts > 1 and layer % routes[0] == routes[1] else 'mlp'}"

    rank = config.get("mamba_dt_rank", "auto")
    settings: dict[str, Any] = {
        "block_types": shortest([kind(layer) for layer in range(layers)]),
        "mamba": {
            "num_heads": _whole(config, "mamba_expand", 2) * hidden,
            "state_size": _whole(config, "mamba_d_state", 16),
            "conv_kernel": _whole(config, "mamba_d_conv", 4),
            "conv_bias": config.get("mamba_conv_bias", True),
            "proj_bias": config.get("mamba_proj_bias", False),
            "dt_rank": -(-hidden // 16) if rank == "auto" else rank,
        },
    }
    if experts > 1:
        settings |= {"num_experts": experts, "num_experts_per_tok": _whole(config, "num_experts_per_tok", 2)}
        settings["router_aux_loss_coef"] = config.get("router_aux_loss_coef")
    return settings


def _falcon(config: dict[str, Any]) -> dict[str, Any]:
    """Return heads, norms and positions of a Falcon, whose 40B and 180B have a block of their own."""
    heads, hidden = _whole(config, "num_attention_heads", 71), _whole(config, "hidden_size", 4544)
    newer = config.get("new_decoder_architecture", False)
    shared = 1 if config.get("multi_query", True) else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if newer else 1)
    alone = not newer and not config.get("parallel_attn", True)
    return {
        "num_key_value_heads": _whole(config, "num_kv_heads", heads) if newer else shared,
        "intermediate_size": _whole(config, "ffn_hidden_size", 4 * hidden),
        "norm_position": "pre" if alone or norms == 2 else "shared",
        "position_embedding": "alibi" if config.get("alibi") else "rotary",
        "bias": bool(config.get("bias", False)),
    }


def _glm4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the biases of a GLM-4, which its output projection does not have, and the shared experts of a GLM-4.5."""
    settings: dict[str, Any] = {"qkv_bias": config.get("attention_bias", config["model_type"] == "glm4")}
    if config["model_type"] == "glm4_moe":
        wide = _whole(config, "moe_intermediate_size", 1408)
        settings |= {key: config[key] for key in _GLM_EXPERTS if key in config}
        settings |= {"moe_intermediate_size": wide, "qk_norm": config.get("use_qk_norm", False)}
        settings["shared_expert_intermediate_size"] = config.get("n_shared_experts", 1) * wide
    return settings


def _whole(config: dict[str, Any], key: str, default: int) -> int:
    """Return a number of config.json; null counts as missing. Raises SourceError if it is no whole number above 0."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(f"has {key} = {str(value)[:80]}, which is not a whole number above 0")
    return value


def shortest(kinds: list[str]) -> list[str]:
    """Return the shortest list that gives ``kinds`` if it is repeated."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


_DEEPSEEK_V3 = ARCHITECTURES["deepseek_v3"]
_SILU = {"silu": "silu"}
_PLAIN = dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_pytorch_tanh")
_SHARED_NORM = {"norm": "layernorm", "norm_position": "shared"}

READ_ONLY: dict[str, Architecture] = {
    "kimi_k2": replace(_DEEPSEEK_V3, model_class=""),  # DeepSeek-V3's blocks under another name
    "deepseek_v32": replace(
        _DEEPSEEK_V3,
        model_class="",
        fixed={**_DEEPSEEK_V3.fixed, "planned_architecture": "deepseek_v32"},
        defaults={**_DEEPSEEK_V3.defaults, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
        aliases={**_DEEPSEEK_V3.aliases, "num_experts": "n_routed_experts"},
        used=(_DEEPSEEK_V3.used - {"rope_interleave"}) | _V32_KEYS | {"mlp_layer_types", "layer_types"},
        only={**_DEEPSEEK_V3.only, "mlp_bias": (False,)},
        derive=_deepseek_v32,
    ),
    "llama4_text": Architecture(
        "",
        fixed={"planned_architecture": "llama4_text", "scoring_func": "sigmoid"},
        renamed={"norm_eps": "rms_norm_eps", "num_experts": "num_local_experts"},
        defaults={
            **{"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
            **{"head_dim": 128, "vocab_size": 202_048, "max_position_embeddings": 131_072, "rope_theta": 500_000.0},
            **{"num_experts": 16, "num_experts_per_tok": 1},
        },
        used=_LLAMA4_USED,
        irrelevant=frozenset("attn_temperature_tuning floor_scale attn_scale".split()),  # scores by position
        only={"attention_bias": (False,), "router_jitter_noise": (0, 0.0)},
        experts=True,
        derive=_llama4,
    ),
    "nemotron": Architecture(
        "",
        fixed={"planned_architecture": "nemotron", "norm": "layernorm", "gated_mlp": False},
        renamed={"norm_eps": "norm_eps"},
        varies=frozenset({"partial_rotary_factor", "hidden_activation"}),
        defaults={
            **{"hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 32, "num_attention_heads": 48},
            **{"vocab_size": 256_000, "max_position_embeddings": 4096, "hidden_activation": "relu2"},
            **{"partial_rotary_factor": 0.5, "initializer_range": 0.0134},
        },
        used=frozenset({"partial_rotary_factor"}),
        only={"attention_bias": (False,), "mlp_bias": (False,)},
        activations={"relu2": "relu2"},
    ),
    "nemotron_h": Architecture(
        "",
        fixed={
            **{"planned_architecture": "nemotron_h", "gated_mlp": False, "hidden_activation": "relu2"},
            "position_embedding": "none",
        },
        renamed={},
        defaults={
            **{"hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"vocab_size": 131_072, "max_position_embeddings": 4096},
        },
        used=frozenset(
            "hybrid_override_pattern layers_block_type attention_head_dim mamba_num_heads mamba_head_dim "
            "ssm_state_size n_groups mamba_n_groups conv_kernel mamba_d_conv use_conv_bias mamba_conv_bias "
            "chunk_size mamba_chunk_size n_routed_experts moe_shared_expert_intermediate_size n_group topk_group "
            "routed_scaling_factor use_bias mlp_bias mamba_proj_bias mlp_hidden_act attention_bias "
            "num_experts_per_tok norm_topk_prob moe_intermediate_size router_aux_loss_coef".split()
        ),
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        irrelevant=_MAMBA_TRAINING,
        only={
            **{"mamba_hidden_act": ("silu",), "hidden_dropout": (0, 0.0), "n_shared_experts": (1,)},
            "moe_latent_size": (),
        },
        activations={},
        derive=_nemotron_h,
    ),
    "jamba": Architecture(
        "",
        fixed={"planned_architecture": "jamba", "position_embedding": "none"},
        renamed={"norm_eps": "rms_norm_eps"},
        varies=frozenset({"hidden_activation"}),
        defaults={
            **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": 65_536},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262_144},
            "norm_eps": 1e-6,
        },
        used=frozenset(
            "attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset mamba_d_state "
            "mamba_d_conv mamba_dt_rank mamba_conv_bias mamba_proj_bias mamba_expand num_experts "
            "num_experts_per_tok router_aux_loss_coef".split()
        ),
        aliases={"num_local_experts": "num_experts"},
        irrelevant=frozenset(
            "use_mamba_kernels use_mambapy use_associative_scan layers_block_type layers_num_experts".split()
        ),
        derive=_jamba,
    ),
    "cohere": Architecture(  # Command R: attention and MLP beside each other, behind one norm
        "",
        fixed={"planned_architecture": "cohere", **_SHARED_NORM, "norm_bias": False, "qk_norm_scope": "projection"},
        renamed={"norm_eps": "layer_norm_eps", "qk_norm": "use_qk_norm"},
        varies=frozenset({"attention_bias"}),
        defaults={
            **{"hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40, "num_attention_heads": 64},
            **{"vocab_size": 256_000, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        },
        used=frozenset({"attention_bias"}),
        irrelevant=frozenset({"logit_scale"}),
        activations=_SILU,
    ),
    "cohere2": Architecture(
        "",
        fixed={"planned_architecture": "cohere2", **_SHARED_NORM, "norm_bias": False},
        renamed={"norm_eps": "layer_norm_eps"},
        varies=frozenset({"attention_bias", "sliding_window", "layer_types"}),
        defaults={
            **{"hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40, "num_attention_heads": 64},
            **{"vocab_size": 256_000, "max_position_embeddings": 8192, "tie_word_embeddings": True},
            "sliding_window": 4096,
        },
        used=frozenset({"attention_bias", "sliding_window", "layer_types", "sliding_window_pattern"}),
        irrelevant=frozenset({"logit_scale", "head_dim"}),
        activations=_SILU,
        layer_types=(*["sliding_attention"] * 3, "full_attention"),
    ),
    "falcon": Architecture(
        "",
        fixed={"planned_architecture": "falcon", "norm": "layernorm", "norm_bias": True, "gated_mlp": False},
        renamed={"norm_eps": "layer_norm_epsilon"},
        varies=frozenset({"hidden_activation"}),
        defaults={
            **{"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65_024},
            **{"max_position_embeddings": 2048, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
        },
        used=frozenset(
            "num_kv_heads multi_query new_decoder_architecture parallel_attn alibi bias ffn_hidden_size "
            "num_ln_in_parallel_attn".split()
        ),
        aliases={"n_embed": "hidden_size"},
        irrelevant=frozenset({"hidden_dropout", "classifier_dropout", "activation"}),
        activations={},
        derive=_falcon,
    ),
    "gpt_neox": Architecture(  # Pythia
        "",
        fixed={"planned_architecture": "gpt_neox", "norm": "layernorm", "gated_mlp": False, "bias": True},
        renamed={"norm_eps": "layer_norm_eps"},
        varies=frozenset({"hidden_activation", "partial_rotary_factor"}),
        defaults={
            **{"hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 44, "num_attention_heads": 64},
            **{"vocab_size": 50_432, "max_position_embeddings": 2048, "hidden_activation": "gelu_pytorch_tanh"},
            "partial_rotary_factor": 0.25,
        },
        used=frozenset({"partial_rotary_factor"}),
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        irrelevant=frozenset({"use_parallel_residual", "hidden_dropout", "classifier_dropout"}),
        only={"attention_bias": (True,)},
        activations=_PLAIN,
    ),
    "starcoder2": Architecture(
        "",
        fixed={"planned_architecture": "starcoder2", "norm": "layernorm", "gated_mlp": False},
        renamed={"norm_eps": "norm_epsilon", "bias": "use_bias"},
        varies=frozenset({"hidden_activation", "sliding_window"}),
        defaults={
            **{"hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30, "num_attention_heads": 24},
            **{"num_key_value_heads": 2, "vocab_size": 49_152, "max_position_embeddings": 4096, "bias": True},
            **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
        },
        used=frozenset({"sliding_window"}),
        irrelevant=frozenset({"residual_dropout", "embedding_dropout"}),
        activations=_PLAIN,
    ),
    "glm4": Architecture(
        "",
        fixed={"planned_architecture": "glm4", "norm_position": "pre_and_post"},
        renamed={"norm_eps": "rms_norm_eps"},
        varies=frozenset({"hidden_activation", "partial_rotary_factor"}),
        defaults={
            **{"hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40, "num_attention_heads": 32},
            **{"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_552, "max_position_embeddings": 131_072},
            **{"norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
        },
        used=frozenset({"attention_bias"}),
        derive=_glm4,
    ),
    "glm4_moe": Architecture(  # GLM-4.5 and 4.6
        "",
        fixed={"planned_architecture": "glm4_moe", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        renamed={"norm_eps": "rms_norm_eps", "num_experts": "n_routed_experts"},
        varies=frozenset({"hidden_activation", "partial_rotary_factor"}),
        defaults={
            **{"hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46, "num_attention_heads": 96},
            **{"num_key_value_heads": 8, "vocab_size": 151_552, "max_position_embeddings": 131_072, "num_experts": 128},
            **{"partial_rotary_factor": 0.5, "num_experts_per_tok": 8, "norm_topk_prob": True},
            **{"first_k_dense_replace": 1, "router_aux_loss_coef": 0.0},
        },
        used=_GLM_EXPERTS | {"attention_bias", "use_qk_norm", "n_shared_experts", "moe_intermediate_size"},
        aliases={"num_local_experts": "n_routed_experts"},
        irrelevant=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
        experts=True,
        derive=_glm4,
    ),
    "smollm3": replace(
        ARCHITECTURES["qwen2"],
        model_class="",
        fixed={"planned_architecture": "smollm3"},
        varies=frozenset("hidden_activation sliding_window layer_types attention_bias bias".split()),
        defaults={
            **{"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16},
            **{"num_key_value_heads": 4, "vocab_size": 128_256, "max_position_embeddings": 32_768, "norm_eps": 1e-6},
            **{"tie_word_embeddings": True, "rope_theta": 2e6},
        },
        used=ARCHITECTURES["qwen2"].used | {"attention_bias", "mlp_bias"},
        irrelevant=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    "granite": replace(
        ARCHITECTURES["llama"],
        model_class="",
        fixed={"planned_architecture": "granite"},
        irrelevant=frozenset("embedding_multiplier logits_scaling residual_multiplier attention_multiplier".split()),
    ),
    "minimax_m2": Architecture(
        "",
        fixed={
            **{"planned_architecture": "minimax_m2", "qk_norm": True, "qk_norm_scope": "projection"},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True},
        },
        defaults={
            **{"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48},
            **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200_064, "max_position_embeddings": 196_608},
            **{"norm_eps": 1e-6, "num_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5e6},
        },
        aliases={"num_experts": "num_local_experts"},
        irrelevant=frozenset({"rotary_dim"}),
        only={"router_jitter_noise": (0, 0.0)},
        experts=True,
    ),
}
