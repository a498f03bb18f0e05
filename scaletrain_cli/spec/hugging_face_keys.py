"""The keys of a Hugging Face config.json: taken over, known to change nothing, or refused by name.

A key that is none of these is refused too: it may change what the model computes, and would do so in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Of every config: names, versions, token ids, outputs, and settings of generation and of other tasks.
_ABOUT_THE_FILE = frozenset(
    (
        "architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id "
        "chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
        "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task "
        "forced_bos_token_id forced_eos_token_id "
        "gradient_checkpointing id2label is_decoder label2id length_penalty max_length min_length "
        "model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
        "output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type "
        "remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens "
        "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
        "transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache"
    ).split()
)
# The same sums in another order or precision; a context length that only code of its own reads.
_SAME_RESULT = frozenset({"pretraining_tp", "reorder_and_upcast_attn", "quantization_config", "n_ctx"})
_NOT_BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
}
_LLAMA_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
}
_WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
# What the router and the latent attention of DeepSeek add. The planner sizes the model, for which they do not count;
# the engine refuses the whole architecture.
_DEEPSEEK_PLANNED = frozenset(
    (
        "aux_loss_alpha ep_size n_group num_mtp_layers num_nextn_predict_layers qk_head_dim rope_interleave "
        "routed_scaling_factor scoring_func seq_aux topk_group topk_method"
    ).split()
)


@dataclass(frozen=True)
class KnownKeys:
    """``used`` become keys of the spec, ``irrelevant`` change nothing, ``only`` may have these values, or be null."""

    used: frozenset[str]
    irrelevant: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] | None = None


def known_keys(kind: str, taken: frozenset[str]) -> KnownKeys:
    """Those of a ``model_type`` that we train or plan; ``taken`` are the keys that its dimensions come from."""
    if kind == "gpt2":
        heads = frozenset(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels"))
        only: dict[str, tuple[Any, ...]] = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        }
        dropouts = frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"})
        return KnownKeys(taken | dropouts, heads | {"summary_first_dropout"}, only)
    llama_only = dict(_LLAMA_ONLY)
    used, irrelevant = taken | _WINDOW | _ROPE | {"attention_dropout"}, frozenset[str]()
    if kind == "mixtral":
        llama_only["router_jitter_noise"] = (0, 0.0)
    if kind == "qwen3_moe":
        used |= {"decoder_sparse_step", "mlp_only_layers"}
    if kind.startswith("deepseek"):
        used |= {"n_shared_experts"}
        irrelevant = _DEEPSEEK_PLANNED
        llama_only |= {"moe_layer_freq": (1,)}
    return KnownKeys(used, irrelevant, llama_only)


# Of vision networks the sizes are planned and no engine of ours trains them: only what changes a size counts.
VISION_KEYS: dict[str, KnownKeys] = {
    "resnet": KnownKeys(
        frozenset(),
        frozenset({"hidden_act", "stage_names", "out_features", "out_indices"}),
        {"downsample_in_first_stage": (False,), "downsample_in_bottleneck": (False,)},
    ),
    "convnext": KnownKeys(
        frozenset(),
        frozenset(
            "hidden_act initializer_range layer_norm_eps drop_path_rate num_stages stage_names out_features "
            "out_indices".split()
        ),
    ),
    "vit": KnownKeys(
        frozenset(),
        frozenset(
            "hidden_act hidden_dropout_prob attention_probs_dropout_prob initializer_range layer_norm_eps "
            "encoder_stride pooler_output_size pooler_act".split()
        ),
    ),
    "clip": KnownKeys(
        frozenset(), frozenset("initializer_factor logit_scale_init_value text_config_dict vision_config_dict".split())
    ),
}
CLIP_TOWER = KnownKeys(
    frozenset(),
    frozenset("hidden_act layer_norm_eps attention_dropout dropout initializer_range initializer_factor".split())
    | {"projection_dim"},  # that of the whole model counts
)


def refusals(config: Mapping[str, Any], known: KnownKeys) -> Iterator[str]:
    """Yield why a config cannot be taken over, one line for each key."""
    for key, value in config.items():
        if key.startswith("_") or key in known.used or key in known.irrelevant:
            continue
        if key in _ABOUT_THE_FILE or key in _SAME_RESULT:
            continue
        only = {**_NOT_BOTH_WAYS, **(known.only or {})}
        if key not in only:
            yield f"has the key {key[:80]}, which is not known here. Remove it if it changes nothing in the model"
        elif value is not None and value not in only[key]:
            allowed = " or ".join(map(_shown, only[key])) or "null"
            yield f"has {key} = {_shown(value)}, and this model is built with {allowed} alone"


def _shown(value: Any) -> str:
    return (str(value).lower() if isinstance(value, bool) else str(value))[:80]
