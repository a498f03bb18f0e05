"""The tokenizer that a spec names: a tokenizer.json, or a file of another library, converted and compared with it.

A SentencePiece model: Unigram and BPE, with its normalization. Fields and defaults are those of
sentencepiece_model.proto. A tiktoken file: byte-pair encoding by rank, with one token per line, in base64, with its
rank. Its split pattern and special tokens are in no file: those of known encodings are here, written for the regular
expressions of ``tokenizers``.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.tokenizers.files import (
    GENERIC_CLASSES,
    TokenizerError,
    declared_tokens,
    json_object,
    load_tokenizer,
    parsed_tokenizer,
    require_stated_ends,
    tokenizer_file,
    with_files_beside,
)
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import TOKEN_FILES
from scaletrain_cli.spec.data import TokenizerSpec

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
    merges = []
    for number, piece, score in pieces:
        for place in range(1, len(piece)):
            left, right = piece[:place], piece[place:]
            if left in known and right in known:
                merges.append((-score, number, known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


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


_CONVERSION = "conversion/v1"  # raised with every change of what a conversion yields
# What tokenizers treat differently: scripts, spaces, line ends, digits, marks, contractions, code, emoji, combining.
_SAMPLE = (
    "Hello world!",
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 or 1e-9; they'LL say: WE'RE fine, don't?",
    " leading space",
    "trailing space ",
    "two  spaces   three    four\tand\ttabs",
    "line\nends\r\nand\n\n\nblank lines \n  with indent\n\t\tand tabs\n",
    "def f(x: int) -> int:\n    return {'a': [x ** 2, 0x1F, 3.14]}  # comment\n",
    '<div class="a">&amp; http://example.org/a?b=c&d=%20#e</div> user@example.org C:\\path\\file',
    "Füße, naïve café, Ångström, İstanbul, ﬁne ﬂow, ①②③, x² + y³ ≠ ½, ㎏, ＦＵＬＬ",
    "Е́сли бы Ελληνικά עברית العربية हिन्दी ภาษาไทย 日本語のテキスト 中文，文本。 한국어 텍스트",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 and cafe\N{COMBINING ACUTE ACCENT}, zero\N{ZERO WIDTH SPACE}width, "
    "no\N{NO-BREAK SPACE}break, \N{IDEOGRAPHIC SPACE}wide",
    "1234567890 00 1 12 123 1234 12345 ١٢٣ १२३ ٣.١٤",
    "camelCase snake_case SCREAMING_CASE kebab-case x1y2 ABCdefGHI",
    "…—–''\"\"«» ,,, ... !!! ?!? --- === *** ### ((()))",
)
_RANDOM_TEXTS, _PIECES_PER_TEXT = 200, 30

_HERE = Path()

_Ids = Callable[[str], Sequence[int]]


def tokenizer_content(section: TokenizerSpec, folder: Path = _HERE, kept: Path | None = None) -> str:
    """Return the tokenizer of a spec as the content of a tokenizer.json, converted if it is one of another library.

    ``folder``: the base of a relative path. ``kept``: a folder in which a conversion, which takes seconds, is kept.
    Raises UsageError for a file that cannot be read, and for one whose tokens would differ from those of its library.
    """
    assert section.path is not None
    content = tokenizer_file(str(folder / expand_home(section.path)), section.tokenizer_class)
    if section.kind == "file":
        tokenizer = parsed_tokenizer(content, section.path)
        require_stated_ends(str(folder / expand_home(section.path)), section.tokenizer_class)
        return str(tokenizer.to_str(pretty=True))
    _require_no_class(section, folder)
    path = None if kept is None else kept / f"tokenizer-{tokenizer_identity(section, folder)[:24]}.json"
    if path is not None:
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8")
    converted = _converted(content, section)
    converted = with_files_beside(converted.encode(), folder / expand_home(section.path), settings=False).decode()
    if path is not None:
        with contextlib.suppress(OSError):  # this user may not write there: converted again next time
            write_whole(path, converted)
    return converted


def _require_no_class(section: TokenizerSpec, folder: Path = _HERE) -> None:
    """Raise TokenizerError for a SentencePiece model to which the files beside it give another class of tokenizers."""
    assert section.path is not None
    beside = (folder / expand_home(section.path)).parent
    name = json_object(beside / TOKEN_FILES[0]).get("tokenizer_class")
    name = name or json_object(beside / "config.json").get("model_type")  # by which AutoTokenizer takes a class
    if section.kind == "sentencepiece" and name is not None and str(name).removesuffix("Fast") not in GENERIC_CLASSES:
        raise TokenizerError(section.path, Reason("tokenizers.library-differs", {"class": name, "folder": str(beside)}))


def given_tokenizer(section: TokenizerSpec) -> Any:
    """Return the tokenizer of a spec, without truncation and padding, as ``tokenizer_content``. Raises UsageError."""
    from tokenizers import Tokenizer

    assert section.path is not None
    if section.kind == "file":
        return load_tokenizer(section.path, section.tokenizer_class)
    return Tokenizer.from_str(tokenizer_content(section))


def tokenizer_identity(section: TokenizerSpec, folder: Path = _HERE) -> str:
    """Return a text that is another one for another tokenizer. Raises UsageError if its file cannot be read."""
    if section.path is None:
        return section.model_dump_json(include={"kind", "vocab_size", "path"})
    digest = hashlib.sha256(tokenizer_file(str(folder / expand_home(section.path)), section.tokenizer_class))
    if section.kind != "file":
        settings = section.model_dump_json(exclude={"path", "vocab_size"})
        digest.update(f"{_CONVERSION} {settings}".encode())
        digest.update("\n".join(declared_tokens(folder / expand_home(section.path))).encode())
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _converted(content: bytes, section: TokenizerSpec) -> str:
    """Return the content of the tokenizer.json of a file of another library. Raises UsageError."""
    try:
        if section.kind == "sentencepiece":
            tokenizer = from_sentencepiece(content)
            theirs: _Ids = require("sentencepiece", "data").SentencePieceProcessor(model_proto=content).encode
        else:
            tokenizer, theirs = _tiktoken(content, section)
    except NotConvertibleError as error:
        raise TokenizerError(section.path, error.reason) from error
    for text in _texts_to_compare(tokenizer):
        if tokenizer.encode(text, add_special_tokens=False).ids != list(theirs(text)):
            params = {"library": section.kind, "text": json.dumps(text[:80])}
            raise TokenizerError(section.path, Reason("tokenizers.ids-differ", params))
    return str(tokenizer.to_str(pretty=True))


def _tiktoken(content: bytes, section: TokenizerSpec) -> tuple[Any, _Ids]:
    """Return the converted tokenizer, and that of the library."""
    ranks, pattern, special = _tiktoken_parts(content, section)
    tokenizer = from_tiktoken(ranks, pattern, special)
    library = require("tiktoken", "data")
    try:
        theirs = library.Encoding("given", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise NotConvertibleError(Reason("tokenizers.pattern-invalid", {"error": str(error)})) from error
    return tokenizer, theirs.encode_ordinary


def _tiktoken_parts(content: bytes, section: TokenizerSpec) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Return ranks, split pattern, and special tokens with their ids."""
    ranks = ranks_of(content)
    if section.encoding is not None:
        encoding = ENCODINGS[section.encoding]
    else:
        encoding = Encoding(section.pattern or "", {}, section.special_tokens)
    return ranks, encoding.pattern, special_tokens(encoding, ranks)


def token_ids(content: bytes, section: TokenizerSpec) -> dict[str, int]:
    """Return ids of tokens of a file of another library, among them the largest, and those of all special tokens.

    Quick for tiktoken, which is not converted. Raises TokenizerError, and UsageError if a library is missing.
    """
    assert section.path is not None
    _require_no_class(section)
    try:
        if section.kind == "sentencepiece":
            ids = dict(from_sentencepiece(content).get_vocab())
        else:
            ranks, _, special = _tiktoken_parts(content, section)
            ids = {"": max(ranks.values()), **special}
    except NotConvertibleError as error:
        raise TokenizerError(section.path, error.reason) from error
    added = [text for text in dict.fromkeys(declared_tokens(expand_home(section.path))) if text not in ids]
    return ids | {text: max(ids.values()) + number for number, text in enumerate(added, start=1)}


def _texts_to_compare(tokenizer: Any) -> Iterator[str]:
    """Yield texts of many kinds, and words of the vocabulary in random order, which is always the same."""
    yield from _SAMPLE
    yield "\n".join(_SAMPLE)
    draw = random.Random(0)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    pieces = sorted(number for name, number in tokenizer.get_vocab().items() if name not in special)
    for _ in range(_RANDOM_TEXTS):
        text = tokenizer.decode(draw.choices(pieces, k=_PIECES_PER_TEXT)).replace("\ufffd", "")
        if not any(name in text for name in special):
            yield text
