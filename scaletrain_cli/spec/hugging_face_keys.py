"""Keys of a Hugging Face config.json: used, known not to change the model, or rejected by name.

An unknown key is rejected too, because it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.spec.presets import SourceError

# Keys of every config: names, versions, token ids, outputs, and settings of generation and of other tasks.
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
# Same results in another order or precision; a context length that only custom code reads.
_SAME_RESULT = frozenset({"pretraining_tp", "reorder_and_upcast_attn", "quantization_config", "n_ctx"})
_NOT_BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1, 1.0),
}


@dataclass(frozen=True)
class KnownKeys:
    """Keys of a config: ``used`` become spec keys, ``irrelevant`` have no effect, ``only`` may have these values or be
    null.
    """

    used: frozenset[str]
    irrelevant: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] | None = None


def rejections(config: Mapping[str, Any], known: KnownKeys) -> Iterator[str]:
    """Yield the reasons why a config cannot be imported, one line for each key."""
    for key, value in config.items():
        if key.startswith("_") or key in known.used or key in known.irrelevant:
            continue
        if key in _ABOUT_THE_FILE or key in _SAME_RESULT:
            continue
        only = {**_NOT_BOTH_WAYS, **(known.only or {})}
        if key not in only:
            yield f"has the unsupported key {key[:80]}. Remove it if it does not change the model"
        elif value is not None and value not in only[key]:
            allowed = " or ".join(map(_shown, only[key])) or "null"
            yield f"has {key} = {_shown(value)}, but only {allowed} is supported"


def _shown(value: Any) -> str:
    return (str(value).lower() if isinstance(value, bool) else str(value))[:80]


def require_known(config: Mapping[str, Any], known: KnownKeys, where: str = "") -> None:
    """Raise SourceError if a config cannot be imported. ``where``: the name of a section of config.json."""
    if problems := list(rejections(config, known)):
        raise SourceError("hf_config", "; ".join(f"{where} {problem}".strip() for problem in problems[:5]))
