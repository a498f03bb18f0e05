"""Tiny tokenizers of the kinds that published models have, built once per process, and the folders that hold them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_3 = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{- m.content + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
WITH_TOOLS = "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}" + CHATML
# The form of older files of Llama 2, in place of which transformers 5 builds another one.
LEGACY = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
}
_LINES = Path(json.decoder.__file__).read_text(encoding="utf-8").splitlines()
_ODD = (
    *(" leading", "trailing ", "a  b   c\td", "line\nends\r\n\n  indented", "IT'S 123456 don't WE'LL", "", " ", "\n"),
    *("Füße naïve café", "Ångström ﬁ ① Ａ", "日本語 한국어", "🙂👩‍👧", "a<x>b <x> c", "snake_case camelCase"),
    "3.14 1e-9 0x1F",
)
TEXTS = [*_ODD, *[line for line in _LINES if line.strip()][: 100 - len(_ODD)]]


@cache
def tokenizer_json(kind: str, special: tuple[str, ...] = ()) -> str:
    """Return a tokenizer.json of about 400 tokens, the first of which are ``special``."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": list(special), "show_progress": False}
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(**options | {"special_tokens": ["[UNK]", *special]})
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options | {"special_tokens": ["<unk>", *special], "unk_token": "<unk>"})
    elif kind == "metaspace":  # Llama 2: SentencePiece's BPE, with a token for each byte
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        of_bytes = [f"<0x{value:02X}>" for value in range(256)]
        trainer = trainers.BpeTrainer(**options | {"special_tokens": ["<unk>", *special, *of_bytes], "vocab_size": 700})
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "split":  # Llama 3 and tekken: an own pattern
            pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        _LINES if kind != "metaspace" else ["▁".join(line.split()) for line in _LINES], trainer
    )
    return str(tokenizer.to_str())


def added_token(content: str, **flags: bool) -> dict[str, Any]:
    """Return a token as ``added_tokens_decoder`` of tokenizer_config.json has it."""
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **usual, "special": True, **flags}


def write_tokenizer(folder: Path, tokenizer: str, tokenizer_config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write tokenizer.json, its config and JSON files by name without suffix; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    if tokenizer_config is not None:
        files["tokenizer_config"] = tokenizer_config
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json"
