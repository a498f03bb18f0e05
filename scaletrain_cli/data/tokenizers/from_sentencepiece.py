"""A SentencePiece model as a tokenizer.json: Unigram and BPE, with its normalization.

Fields and defaults are those of sentencepiece_model.proto.
"""

import re
from collections.abc import Sequence
from typing import Any

from scaletrain_cli.data.sources.libraries import require
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


def converted(content: bytes) -> Any:
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
