"""The transformer architectures of Hugging Face that are read and written: their keys, defaults and fixed settings.

One entry of ``ARCHITECTURES`` is everything this package knows of a ``model_type``. A key of config.json is used,
without effect, or refused by name; all others are ignored and named. The tables have every key that transformers reads
(a test compares them with its source), so a key that is not in them cannot change what transformers computes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scaletrain_cli.spec.presets import SourceError

# Keys of every config: names, versions, token ids, outputs, and settings of generation and of other tasks.
_ABOUT_THE_FILE = frozenset(
    "architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id "
    "gradient_checkpointing id2label is_decoder label2id length_penalty max_length min_length "
    "model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
    "output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type "
    "remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache".split()
)
# Same results in another order or precision; a context length that only custom code reads.
_SAME_RESULT = frozenset({"pretraining_tp", "reorder_and_upcast_attn", "quantization_config", "n_ctx"})
# Read for each architecture, by its modules, its masks or its cache.
_ONLY_WITH: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
    "sliding_window": (),
    "layer_types": (),
    "attention_chunk_size": (),
    "is_causal": (True,),
    "kv_sharing_modes": (),
    "per_layer_config": ({},),
}


@dataclass(frozen=True)
class KnownKeys:
    """Keys of a config: ``used`` become spec keys, ``irrelevant`` have no effect, ``only`` may have these values or be
    null.
    """

    used: frozenset[str]
    irrelevant: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] | None = None

    @property
    def all_only(self) -> dict[str, tuple[Any, ...]]:
        """``only`` with the keys that limit every architecture, unless this one uses them."""
        both = {**_ONLY_WITH, **(self.only or {})}
        return {key: values for key, values in both.items() if key not in self.used | self.irrelevant}

    def __contains__(self, key: str) -> bool:
        """Return False for a key that is ignored because transformers does not read it."""
        tables = (self.used, self.irrelevant, self.all_only, _ABOUT_THE_FILE, _SAME_RESULT)
        return key.startswith("_") or any(key in table for table in tables)


def _refusals(config: Mapping[str, Any], known: KnownKeys) -> Iterator[str]:
    """Yield the reasons why a config cannot be imported, one line for each key."""
    only = known.all_only
    for key, value in config.items():
        if key in only and value is not None and value not in only[key]:
            allowed = " or ".join(map(_shown, only[key])) or "null"
            yield f"has {key} = {_shown(value)}, but only {allowed} is supported"


def _shown(value: Any) -> str:
    return (str(value).lower() if isinstance(value, bool) else str(value))[:80]


def check_keys(config: Mapping[str, Any], known: KnownKeys, ignored: list[str], where: str = "") -> None:
    """Add the keys without effect to ``ignored``. Raises SourceError if a key has a value that is not supported.

    ``where``: the name of a section of config.json.
    """
    ignored += [f"{where}.{key}"[:80].removeprefix(".") for key in config if key not in known]
    if problems := list(_refusals(config, known)):
        raise SourceError("; ".join(f"{where} {problem}".strip() for problem in problems[:5]))


# Settings that an architecture either fixes, or lets its models choose (``varies``), or does not have.
TRAITS = tuple(
    "qkv_bias attention_bias bias qk_norm qk_norm_scope fused_projections query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping attention_sinks sliding_window layer_types "
    "rope_local_base_freq partial_rotary_factor scale_embedding norm_position zero_centered_norm swiglu_limit "
    "hidden_activation norm_topk_prob scoring_func topk_method n_group topk_group routed_scaling_factor "
    "router_bias first_k_dense_replace decoder_sparse_step mlp_only_layers shared_expert_intermediate_size "
    "shared_expert_gate kv_lora_rank rope_interleave".split()
)
# Settings of a mixture of experts, which a model without layers of experts does not have.
OF_EXPERTS = frozenset(
    "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size first_k_dense_replace "
    "norm_topk_prob scoring_func topk_method n_group topk_group routed_scaling_factor router_bias "
    "router_aux_loss_coef router_z_loss_coef capacity_factor decoder_sparse_step mlp_only_layers "
    "shared_expert_gate swiglu_limit".split()
)
_SILU = {"silu": "silu", "swish": "silu"}
_GELU_TANH = {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
_LLAMA_KEYS = {"norm_eps": "rms_norm_eps", "num_experts": "num_local_experts"}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_DEEPSEEK_KEYS = {"norm_eps": "rms_norm_eps", "num_experts": "n_routed_experts", "head_dim": "qk_nope_head_dim"}
_DEEPSEEK_KEYS |= {"router_aux_loss_coef": "aux_loss_alpha"}  # read by DeepSeek's own code, and not by transformers
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "norm_position": "pre_and_post",
    "zero_centered_norm": True,
    "scale_embedding": True,
}
_GEMMA_DEFAULTS = {
    "norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_KEYS = frozenset({"query_pre_attn_scalar", "final_logit_softcapping", "hidden_activation"})
_QWEN_EXPERTS = frozenset({"norm_topk_prob", "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"})
_QWEN_BLOCKS = frozenset({"norm_topk_prob", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"})
_QWEN_WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
# Sums of other keys. The layers that predict more than the next token are not trained.
_DEEPSEEK_IRRELEVANT = frozenset("num_mtp_layers num_nextn_predict_layers qk_head_dim".split())
_DEEPSEEK_ROUTER = frozenset({"n_group", "topk_group", "routed_scaling_factor"})
_DEEPSEEK_VARIES = _DEEPSEEK_ROUTER | {"first_k_dense_replace", "shared_expert_intermediate_size", "kv_lora_rank"}
_DEEPSEEK_ATTENTION = {"norm_eps": 1e-6, "head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
_DEEPSEEK_ATTENTION |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
# The DeepSeek classes of transformers have no balance loss. A config.json states one as aux_loss_alpha, DeepSeek's key.
_DEEPSEEK_DEFAULTS = {**_DEEPSEEK_ATTENTION, "router_aux_loss_coef": 0.0}
LATENT_KEYS = frozenset("first_k_dense_replace kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim".split())
_DEEPSEEK_USED = _DEEPSEEK_ROUTER | LATENT_KEYS | {"n_shared_experts", "moe_intermediate_size"}
_DEEPSEEK_ALIASES = {"router_aux_loss_coef": "aux_loss_alpha"}
# Read by DeepSeek's own code, with which the weights were trained, and not by transformers.
_DEEPSEEK_ONLY: dict[str, tuple[Any, ...]] = {"moe_layer_freq": (1,), "attention_bias": (False,)}
_GPT2_HEADS = frozenset(  # of tasks other than the next token
    (
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
        "summary_last_dropout classifier_dropout hidden_dropout num_labels"
    ).split()
)


@dataclass(frozen=True)
class Architecture:
    """One ``model_type`` of Hugging Face. Its keys have every key that transformers reads for it.

    ``fixed``: settings of each of its models, by spec key. ``varies``: the TRAITS that its models may choose, all
    others have the default of the spec. ``renamed``: names in config.json, by spec key. ``defaults``: values of
    transformers for missing keys, where they differ from those of this package. ``aliases``: other names of keys.
    ``used``: further keys of config.json that become settings; ``irrelevant``: keys without effect; ``only``: keys that
    may have these values, or be null.
    ``layer_types``: the pattern of layers if config.json has none. ``experts``: its MLPs are mixtures of experts.
    ``shared_experts``: their number if config.json does not state it.
    ``default_rope``: the settings of rotary positions if config.json has none.
    ``derive``: returns further settings from config.json; these replace what the keys give.
    ``model_class`` is empty if models are read but not written.
    """

    model_class: str
    family: str = "llama"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    varies: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=lambda: _LLAMA_KEYS)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    irrelevant: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=lambda: _SILU | _GELU_TANH)
    layer_types: tuple[str, ...] = ()
    experts: bool = False
    shared_experts: int = 0
    ropes: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None


_DENSE = frozenset({"hidden_activation"})
_EXPERTS_ALIAS = {"num_experts": "num_local_experts"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        varies=_DENSE | {"bias", "attention_bias"},
        defaults={"norm_eps": 1e-6, "max_position_embeddings": 2048},  # files of the first LLaMA do not state it
        used=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        varies=_DENSE | {"sliding_window"},
        defaults={"norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        used=frozenset({"sliding_window"}),
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        fixed={"qkv_bias": True},
        varies=_DENSE | {"sliding_window", "layer_types"},
        defaults={"norm_eps": 1e-6, "sliding_window": 4096},
        used=_QWEN_WINDOW,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        varies=_DENSE | {"sliding_window", "layer_types", "attention_bias"},
        defaults={"norm_eps": 1e-6, "head_dim": 128, "sliding_window": 4096},
        used=_QWEN_WINDOW | {"attention_bias"},
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        fixed={**_GEMMA, "norm_position": "pre"},
        varies=frozenset({"attention_bias"}),
        defaults={"norm_eps": 1e-6, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
        used=frozenset({"attention_bias"}),
        irrelevant=frozenset({"hidden_activation"}),  # published files have it, and transformers 4 reads it
        only={"use_bidirectional_attention": (False,)},
        activations={**_GELU_TANH, "gelu": "gelu_pytorch_tanh"},  # as transformers reads the first files
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        fixed=_GEMMA,
        varies=frozenset(
            "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window layer_types "
            "attention_bias".split()
        ),
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        used=_GEMMA_KEYS | {"attn_logit_softcapping", "sliding_window", "layer_types", "attention_bias"},
        irrelevant=frozenset({"hidden_act"}),  # published files have it, and vLLM reads it
        only={"use_bidirectional_attention": (False,)},
        activations=_GELU_TANH,
        layer_types=("sliding_attention", "full_attention"),
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        fixed={**_GEMMA, "qk_norm": True},
        varies=frozenset(
            "query_pre_attn_scalar final_logit_softcapping sliding_window layer_types attention_bias "
            "rope_local_base_freq".split()
        ),
        defaults={
            **{**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262_208},
            **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
            "max_position_embeddings": 131_072,
        },
        used=_GEMMA_KEYS
        | {"rope_local_base_freq", "sliding_window", "sliding_window_pattern", "layer_types", "attention_bias"},
        irrelevant=frozenset({"hidden_act"}),
        # transformers' Gemma 3 reads attn_logit_softcapping and does not use it
        only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
        activations=_GELU_TANH,
        layer_types=(*["sliding_attention"] * 5, "full_attention"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        fixed={"fused_projections": True},
        varies=_DENSE | {"sliding_window", "partial_rotary_factor"},
        used=frozenset({"sliding_window", "partial_rotary_factor", "original_max_position_embeddings"}),
        only={"resid_pdrop": (0, 0.0), "embd_pdrop": (0, 0.0)},
        ropes=("longrope",),
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        fixed={"norm_position": "post", "qk_norm": True, "qk_norm_scope": "projection"},
        varies=_DENSE | {"attention_bias"},
        used=frozenset({"attention_bias"}),
    ),
    "olmo3": Architecture(
        "Olmo3ForCausalLM",
        fixed={"norm_position": "post", "qk_norm": True, "qk_norm_scope": "projection"},
        varies=_DENSE | {"attention_bias", "sliding_window", "layer_types", "rope_local_base_freq"},
        defaults={"sliding_window": 4096, "rope_theta": 500_000.0, "max_position_embeddings": 2048},
        used=frozenset({"attention_bias", "sliding_window", "layer_types"}),
        layer_types=(*["sliding_attention"] * 3, "full_attention"),
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        fixed={"norm_topk_prob": True},
        varies=frozenset({"sliding_window"}),
        defaults={"rope_theta": 1e6, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
        used=frozenset({"sliding_window"}),
        aliases=_EXPERTS_ALIAS,
        only={"router_jitter_noise": (0, 0.0)},
        activations=_SILU,
        experts=True,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        fixed={"shared_expert_gate": True},
        renamed={"norm_eps": "rms_norm_eps"},
        varies=_QWEN_EXPERTS | {"qkv_bias", "sliding_window", "layer_types", "shared_expert_intermediate_size"},
        defaults={
            **{"norm_eps": 1e-6, "sliding_window": 4096, "qkv_bias": True, "num_experts": 60},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        },
        used=_QWEN_WINDOW | _QWEN_BLOCKS | {"qkv_bias", "shared_expert_intermediate_size"},
        activations=_SILU,
        experts=True,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        fixed={"qk_norm": True},
        varies=_QWEN_EXPERTS | {"sliding_window"},
        defaults={
            **{"norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 4},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
        used=_QWEN_BLOCKS | {"sliding_window", "use_sliding_window"},
        renamed={"norm_eps": "rms_norm_eps"},
        aliases={"num_local_experts": "num_experts"},
        only={"attention_bias": (False,)},
        activations=_SILU,
        experts=True,
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2ForCausalLM",
        fixed={"norm_topk_prob": False},
        varies=_DEEPSEEK_VARIES | {"topk_method"},
        renamed=_DEEPSEEK_KEYS,
        defaults={**_DEEPSEEK_DEFAULTS, "num_experts": 64, "moe_intermediate_size": 1407},
        used=_DEEPSEEK_USED | {"topk_method"},
        aliases={"num_experts": "n_routed_experts", **_DEEPSEEK_ALIASES},
        irrelevant=_DEEPSEEK_IRRELEVANT,
        # with norm_topk_prob, DeepSeek's own code normalizes weights, and transformers does not
        only={**_DEEPSEEK_ONLY, "scoring_func": ("softmax",), "norm_topk_prob": (False,), "mlp_bias": (False,)},
        activations=_SILU,
        experts=True,
        shared_experts=2,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        varies=_DEEPSEEK_VARIES | {"norm_topk_prob", "rope_interleave"},
        renamed=_DEEPSEEK_KEYS,
        defaults={
            **{**_DEEPSEEK_DEFAULTS, "num_key_value_heads": 128, "first_k_dense_replace": 3, "norm_topk_prob": True},
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        },
        used=_DEEPSEEK_USED | {"rope_interleave", "norm_topk_prob"},
        aliases={"num_local_experts": "n_routed_experts", **_DEEPSEEK_ALIASES},
        irrelevant=_DEEPSEEK_IRRELEVANT,
        only={**_DEEPSEEK_ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        activations=_SILU,
        experts=True,
        shared_experts=1,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        fixed={
            **{"bias": True, "attention_bias": False, "attention_sinks": True},
            **{"router_bias": True, "norm_topk_prob": True},
        },
        varies=frozenset({"sliding_window", "layer_types", "swiglu_limit"}),
        defaults={
            **{"num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201_088},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072},
            **{"num_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 128},
            "rope_theta": 150_000.0,
        },
        used=frozenset({"sliding_window", "layer_types", "swiglu_limit"}),
        aliases=_EXPERTS_ALIAS,
        only={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
        activations=_SILU,
        layer_types=("sliding_attention", "full_attention"),
        experts=True,
        default_rope={
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        family="gpt",
        renamed=_GPT2_KEYS,
        aliases={key: _GPT2_KEYS[key] for key in _GPT2_KEYS if key not in ("intermediate_size", "norm_eps")},
        defaults={"tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        used=frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
        irrelevant=_GPT2_HEADS,
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
}
