"""The tokenizer that a spec names: a tokenizer.json, or a file of another library, converted and compared with it."""

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.tokenizers import conversion
from scaletrain_cli.data.tokenizers.conversion import NotConvertibleError
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
    found = _converted(content, section)
    found = with_files_beside(found.encode(), folder / expand_home(section.path), settings=False).decode()
    if path is not None:
        with contextlib.suppress(OSError):  # this user may not write there: converted again next time
            write_whole(path, found)
    return found


def _require_no_class(section: TokenizerSpec, folder: Path = _HERE) -> None:
    """Raise TokenizerError for a SentencePiece model to which the files beside it give another class of tokenizers."""
    assert section.path is not None
    beside = (folder / expand_home(section.path)).parent
    name = json_object(beside / TOKEN_FILES[0]).get("tokenizer_class")
    name = name or json_object(beside / "config.json").get("model_type")  # by which AutoTokenizer takes a class
    if section.kind == "sentencepiece" and name is not None and str(name).removesuffix("Fast") not in GENERIC_CLASSES:
        raise TokenizerError(section.path, Reason("tokenizers.library-differs", {"class": name, "folder": str(beside)}))


def given_tokenizer(section: TokenizerSpec, kept: Path | None = None) -> Any:
    """Return the tokenizer of a spec, without truncation and padding, as ``tokenizer_content``. Raises UsageError."""
    from tokenizers import Tokenizer

    assert section.path is not None
    if section.kind == "file":
        return load_tokenizer(section.path, section.tokenizer_class)
    return Tokenizer.from_str(tokenizer_content(section, kept=kept))


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
            tokenizer = conversion.from_sentencepiece(content)
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
    tokenizer = conversion.from_tiktoken(ranks, pattern, special)
    library = require("tiktoken", "data")
    try:
        theirs = library.Encoding("given", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise NotConvertibleError(Reason("tokenizers.pattern-invalid", {"error": str(error)})) from error
    return tokenizer, theirs.encode_ordinary


def _tiktoken_parts(content: bytes, section: TokenizerSpec) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Return ranks, split pattern, and special tokens with their ids."""
    ranks = conversion.ranks_of(content)
    if section.encoding is not None:
        encoding = conversion.ENCODINGS[section.encoding]
    else:
        encoding = conversion.Encoding(section.pattern or "", {}, section.special_tokens)
    return ranks, encoding.pattern, conversion.special_tokens(encoding, ranks)


def token_ids(content: bytes, section: TokenizerSpec) -> dict[str, int]:
    """Return ids of tokens of a file of another library, among them the largest, and those of all special tokens.

    Quick for tiktoken, which is not converted. Raises TokenizerError, and UsageError if a library is missing.
    """
    assert section.path is not None
    _require_no_class(section)
    try:
        if section.kind == "sentencepiece":
            ids = dict(conversion.from_sentencepiece(content).get_vocab())
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
