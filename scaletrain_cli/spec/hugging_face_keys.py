"""Keys of a Hugging Face config.json: used, without effect, or refused by name; all others are ignored and named.

The tables have every key that transformers reads (a test compares them with its source), so a key that is not in them
cannot change what transformers computes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
