"""Tokenizers of other libraries as a tokenizer.json.

A SentencePiece model: Unigram and BPE, with its normalization. Fields and defaults are those of
sentencepiece_model.proto. A tiktoken file: byte-pair encoding by rank, with one token per line, in base64, with its
rank. Its split pattern and special tokens are in no file: those of known encodings are here, written for the regular
expressions of ``tokenizers``.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how pieces write a space
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE_AFTER_OTHERS = re.compile(f"[^{_SPACE}]{_SPACE}")


class NotConvertibleError(Exception):
    """The tokenizer has no equal tokenizer.json."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def from_sentencepiece(content: bytes) -> Any:
    """Return the Tokenizer with the pieces of a model. Raises NotConvertibleError, and UsageError without protobuf."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    model = require("sentencepiece.sentencepiece_model_pb2", "data").ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's own error is in a module that moves
        raise NotConvertibleError(Reason("tokenizers.not-sentencepiece", {"error": str(error)})) from error
    trained, rules = model.trainer_spec, model.normalizer_spec
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    unknown = next((number for number, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    if unknown is None:
        raise NotConvertibleError(Reason("tokenizers.not-sentencepiece", {"error": "it has no unknown piece"}))
    if trained.treat_whitespace_as_suffix or not rules.escape_whitespaces or _UNUSED in kinds:
        raise NotConvertibleError(Reason("tokenizers.spaces", {}))
    if trained.model_type == _UNIGRAM:
        kind: Any = models.Unigram(pieces, unknown, byte_fallback=trained.byte_fallback)
    elif trained.model_type == _BPE:
        kind = models.BPE(
            {piece: number for number, (piece, _) in enumerate(pieces)},
            _merges([(number, *pair) for number, pair in enumerate(pieces) if kinds[number] == _NORMAL]),
            unk_token=pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    else:
        raise NotConvertibleError(Reason("tokenizers.model-type", {"type": trained.model_type}))
    tokenizer = Tokenizer(kind)
    has_symbols = _USER_DEFINED in kinds
    _add_normalization(tokenizer, rules, dummy_prefix=rules.add_dummy_prefix and not has_symbols)
    _add_splits(tokenizer, [piece for piece, _ in pieces], dummy_prefix=rules.add_dummy_prefix and has_symbols)
    of_bytes = [decoders.ByteFallback()] if trained.byte_fallback else []
    steps = [decoders.Replace(_SPACE, " "), *of_bytes, decoders.Fuse()]
    if rules.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    special = [piece for (piece, _), kind in zip(pieces, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    symbols = [piece for (piece, _), kind in zip(pieces, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in symbols])
    return tokenizer


def _merges(pieces: Sequence[tuple[int, str, float]]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make another one, the best one first; that is what the library joins next."""
    known = {piece: number for number, piece, _ in pieces}
    found = []
    for number, piece, score in pieces:
        for place in range(1, len(piece)):
            left, right = piece[:place], piece[place:]
            if left in known and right in known:
                found.append((-score, number, known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_normalization(tokenizer: Any, rules: Any, *, dummy_prefix: bool) -> None:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        mapped = normalizers.Precompiled(rules.precompiled_charsmap)
        # tokenizers maps a cluster of characters by its first one, the library maps each character
        if mapped.normalize_str("\r") == mapped.normalize_str("\n") == " ":
            steps.append(normalizers.Replace("\r\n", "  "))
        steps.append(mapped)
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)


def _add_splits(tokenizer: Any, pieces: Sequence[str], *, dummy_prefix: bool) -> None:
    """Let words be looked up one by one, if no piece goes beyond a word; that is faster, and changes no token."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if dummy_prefix:
        steps.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if not any(_SPACE_AFTER_OTHERS.search(piece) for piece in pieces):
        steps.append(pre_tokenizers.Split(Regex(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+"), "isolated"))
    if steps:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


_CL100K = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
)


@dataclass(frozen=True)
class Encoding:
    """``special``: the ids of special tokens; ``following``: those that follow the last rank, in order."""

    pattern: str
    special: Mapping[str, int]
    following: Sequence[str] = ()


# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py, and the tokenizers of Llama 3 and Qwen.
ENCODINGS: dict[str, Encoding] = {
    "gpt2": Encoding(_GPT2, {"<|endoftext|>": 50256}),
    "p50k_base": Encoding(_GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": Encoding(
        _CL100K,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": Encoding(_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "llama3": Encoding(_CL100K, {}, (*_LLAMA_3, *(f"<|reserved_special_token_{number}|>" for number in range(2, 247)))),
    "qwen": Encoding(
        _CL100K.replace("{1,3}", ""),
        {},
        (*("<|endoftext|>", "<|im_start|>", "<|im_end|>"), *(f"<|extra_{number}|>" for number in range(205))),
    ),
}


def ranks_of(content: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a file. Raises NotConvertibleError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise NotConvertibleError(Reason("tokenizers.not-tiktoken", {"line": number})) from error
    single = {bytes([value]) for value in range(256)}
    if not single <= ranks.keys() or len(set(ranks.values())) != len(ranks):
        raise NotConvertibleError(Reason("tokenizers.tiktoken-incomplete"))
    return ranks


def from_tiktoken(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> Any:
    """Return the Tokenizer with these ranks, split pattern and special tokens. Raises NotConvertibleError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    # The character that stands for each byte in byte-level BPE (GPT-2): itself if it is visible.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(value) if value in visible else chr(next(others)) for value in range(256)]
    vocabulary = {_written(token, letters): rank for token, rank in ranks.items()}
    taken = set(vocabulary.values())
    if clash := next((name for name, number in special.items() if number in taken), None):
        raise NotConvertibleError(Reason("tokenizers.special-id-taken", {"token": clash, "id": special[clash]}))
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _parts_before(token, ranks, rank) if len(token) > 1 else ()
        if len(parts) == 2:  # other tokens are found whole alone
            merges.append((_written(parts[0], letters), _written(parts[1], letters)))
    try:
        splits = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # tokenizers raises nothing narrower
        raise NotConvertibleError(Reason("tokenizers.pattern-invalid", {"error": str(error)})) from error
    tokenizer = Tokenizer(models.BPE({**vocabulary, **special}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer


def special_tokens(encoding: Encoding, ranks: Mapping[bytes, int]) -> dict[str, int]:
    first = max(ranks.values()) + 1
    return {**encoding.special, **{name: first + place for place, name in enumerate(encoding.following)}}


def _parts_before(token: bytes, ranks: Mapping[bytes, int], most: int) -> list[bytes]:
    """Return the parts that a token is joined from when its own rank comes: two, if it can be joined at all."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        joined = [(ranks.get(parts[place] + parts[place + 1], most), place) for place in range(len(parts) - 1)]
        rank, place = min(joined)
        if rank >= most:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _written(token: bytes, letters: Sequence[str]) -> str:
    return "".join(letters[value] for value in token)
