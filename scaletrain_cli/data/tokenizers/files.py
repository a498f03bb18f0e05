"""Read a tokenizer of Hugging Face with what the files beside it state, or train one on texts.

The files are read as AutoTokenizer of transformers 4.57 and 5 reads them for a tokenizer.json. A setting that the two
apply in different ways is refused, and so is a class that splits texts in another way than tokenizer.json.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import TOKEN_FILES

# More text does not improve a tokenizer, and takes memory in proportion.
_MOST_CHARACTERS_TO_LEARN_FROM = 500_000_000
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes, without "Fast", that build their pre-tokenizer with add_prefix_space, false by default; the others of
# transformers 4 apply the key to byte-level tokenizers, those of transformers 5 do not.
_BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer", "RobertaTokenizer", "BartTokenizer")
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
_OF_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "MPNetTokenizer")
# Classes for which transformers 4 replaces the post_processor by add_bos_token and add_eos_token.
_WITH_ENDS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
# Model types for which transformers 5 reads tokenizer.json as it is, whatever the class (MistralCommonBackend and
# TokenizersBackend in TOKENIZER_MAPPING_NAMES of its tokenization_auto.py).
_READ_AS_IT_IS = ("mistral", "mixtral", "jamba", "olmo2", "phi3", "nemotron", "llava", "stablelm", "glm4", "granite")
# The class, without "Fast", that AutoTokenizer takes for a model type where tokenizer_config.json states none.
_CLASS_OF_TYPE = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
}
# The normalizer and the pre_tokenizer of classes of transformers 5 that read neither from tokenizer.json: see __init__
# in its tokenization_*.py. ByteLevel's add_prefix_space and Metaspace's prepend_scheme come from the settings; of
# unigram tokenizers only a normalizer of type Precompiled comes from tokenizer.json.
_NFC, _BYTES = {"type": "NFC"}, {"type": "ByteLevel", "use_regex": True}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
_UNDERLINED = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS: list[dict[str, Any]] = [{"type": "WhitespaceSplit"}, {**_METASPACE, "prepend_scheme": "always", "split": True}]
_FORMS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "T5Tokenizer": (..., _WORDS),
    "XLMRobertaTokenizer": (..., _WORDS),
    "CodeLlamaTokenizer": (None, [_METASPACE]),
    "LlamaTokenizer": (None, [_METASPACE]),
    "GemmaTokenizer": (_UNDERLINED, []),  # it also splits at spaces, of which its normalizer leaves none
    "GPT2Tokenizer": (None, [_BYTES]),
    "CodeGenTokenizer": (None, [_BYTES]),
    "GPTNeoXTokenizer": (_NFC, [_BYTES]),
    "CohereTokenizer": (_NFC, [{"type": "Digits", "individual_digits": True}, _BYTES]),
    "Qwen2Tokenizer": (
        _NFC,
        [
            {"type": "Split", "pattern": {"Regex": _QWEN_2}, "behavior": "Isolated", "invert": False},
            {**_BYTES, "use_regex": False},
        ],
    ),
}
_UNKNOWN = {"T5Tokenizer": 2, "XLMRobertaTokenizer": 3}  # the ids of their unknown token
_NOT_KNOWN: tuple[Any, list[dict[str, Any]]] = ("", [])  # the form of another class of unigram tokenizers
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ByteLevel": {"use_regex": True},
    "Metaspace": {"split": True, "prepend_scheme": "always"},
}
_UPPER_CASE = "p{Lu}"  # in the pattern that fix_mistral_regex gives, not in the one that it replaces


class TokenizerError(UsageError):
    """A file cannot be used as a tokenizer (exit 2). ``problem`` does not name the file."""

    def __init__(self, path: str | Path | None, problem: Reason) -> None:
        super().__init__(Reason("tokenizers.unusable", {"path": str(path), "problem": problem}))
        self.problem = problem


def load_tokenizer(path: str, tokenizer_class: str | None = None) -> Any:
    """Return the tokenizer of ``tokenizer_file``, without truncation and padding. Raises UsageError."""
    return parsed_tokenizer(tokenizer_file(path, tokenizer_class), path)


def parsed_tokenizer(content: bytes, path: str) -> Any:
    """Return the tokenizer with the content of a tokenizer.json, as ``load_tokenizer`` does. Raises UsageError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(Reason("engine.tokenizer-invalid", {"path": path, "error": str(error)})) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokens_before(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before each text, such as that of <s>."""
    letter = tokenizer.encode("a")
    tokens: list[int] = letter.ids[: [*letter.special_tokens_mask, 0].index(0)]
    return tokens


def with_start(ids: list[int], before: list[int]) -> list[int]:
    """Return ``tokens_before`` and the tokens of a text, which were encoded alone and may begin with them already."""
    return ids if ids[: len(before)] == before else [*before, *ids]


def without_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens of a prompt, without the end of a text that some tokenizers put behind it."""
    return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids


def train_tokenizer(texts: Iterator[str], vocab_size: int, special_tokens: list[str]) -> Any:
    """Return a byte-level BPE tokenizer (GPT-2 report, section 2.2) that was trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(texts), trainer)
    return tokenizer


def _beginning(texts: Iterator[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total > _MOST_CHARACTERS_TO_LEARN_FROM:
            return


def tokenizer_file(path: str, tokenizer_class: str | None = None) -> bytes:
    """Return the content of a tokenizer.json with what the files beside it state.

    ``tokenizer_class``: instead of that in tokenizer_config.json. Raises UsageError.
    """
    try:
        content = expand_home(path).read_bytes()
    except OSError as error:
        params = {"path": path, "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.tokenizer-unreadable", params)) from error
    return with_files_beside(content, expand_home(path), tokenizer_class)


def with_files_beside(
    content: bytes, path: Path, tokenizer_class: str | None = None, *, settings: bool = True
) -> bytes:
    """Return a tokenizer.json with the tokens and settings that the files beside it state; as it is if it has them.

    A file of another library is returned as it is. ``settings``: False for a converted tokenizer, which splits texts as
    its library does. Raises UsageError.
    """
    beside = [json_object(path.parent / name) for name in TOKEN_FILES]
    if (name := tokenizer_class or _class_name(path.parent)) is None and not any(beside):
        return content
    beside[0]["tokenizer_class"] = name
    beside.append({"model_type": json_object(path.parent / "config.json").get("model_type")})
    return _with_files_beside(content, path, json.dumps(beside), settings)


def _class_name(folder: Path) -> str | None:
    """Return the class that tokenizer_config.json states, or that AutoTokenizer takes for the model in the folder."""
    stated = json_object(folder / TOKEN_FILES[0]).get("tokenizer_class")
    return stated or _CLASS_OF_TYPE.get(str(json_object(folder / "config.json").get("model_type")))


@lru_cache(maxsize=4)
def _with_files_beside(content: bytes, path: Path, beside: str, settings: bool) -> bytes:
    config, special, added, model = json.loads(beside)
    try:
        document = json.loads(content)
        old, words = document.setdefault("added_tokens", []), document["model"]["vocab"]
    except (ValueError, LookupError, TypeError, AttributeError):  # reported where the content is used
        return content
    try:
        vocabulary = words if isinstance(words, dict) else {word[0]: number for number, word in enumerate(words)}
        tokens = _added(old, vocabulary, _declared(config, special, added, old), path)
        changed = (settings and _apply_settings(document, config | model, path)) or tokens != old
        if changed and isinstance(words, dict) and max(words.values(), default=0) >= len(words):
            # The library tokenizers numbers added tokens anew as it loads them, in the gaps of such a vocabulary.
            words |= {token["content"]: token["id"] for token in tokens}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TokenizerError(path, Reason("tokenizers.files-not-valid", {"error": str(error)})) from error
    return json.dumps(document | {"added_tokens": tokens}, ensure_ascii=False).encode() if changed else content


def class_to_state(path: Path) -> str | None:
    """Return the class to state for the tokens of a tokenizer.json where that of its folder would have others."""
    try:
        tokenizer_file(str(path))
    except TokenizerError as error:
        return GENERIC_CLASSES[0] + "Fast" if error.problem.code == "tokenizers.class-differs" else None
    except UsageError:  # reported where the tokenizer is used
        return None
    return None


def declared_tokens(path: Path) -> list[str]:
    """Return the texts of the tokens that the files beside a tokenizer state. Raises UsageError."""
    config, special, added = (json_object(path.parent / name) for name in TOKEN_FILES)
    try:
        return [token["content"] for _, token in _declared(config, special, added, [])]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TokenizerError(path, Reason("tokenizers.files-not-valid", {"error": str(error)})) from error


def _declared(
    config: dict[str, Any], special: dict[str, Any], added: dict[str, Any], old: Sequence[dict[str, Any]]
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the tokens that the files state, with their ids where they have some, in the order of transformers.

    ``old``: added_tokens of tokenizer.json, which count more than added_tokens.json.
    """
    decoder = config.get("added_tokens_decoder")
    named = _named(config, special)
    values = [named.get(name) for name in _SPECIAL]
    for tokens in (
        config.get("additional_special_tokens"),
        named.get("additional_special_tokens"),
        named.get("extra_special_tokens"),
    ):
        values += tokens.values() if isinstance(tokens, dict) else tokens or ()
    stated = [_with_flags(value, is_special=True) for value in values if value]
    names = {token["content"] for token in stated}
    if decoder is not None:
        numbered = {
            int(number): _with_flags(token, is_special=token["content"] in names) for number, token in decoder.items()
        }
    else:
        known = {token["id"] for token in old}
        numbered = {
            number: _with_flags(text, is_special=text in names) for text, number in added.items() if number not in known
        }
    yield from sorted(numbered.items())
    texts = {token["content"] for token in (*old, *numbered.values())}
    yield from ((None, token) for token in stated if token["content"] not in texts)


def _named(config: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens by name; special_tokens_map.json counts only without added_tokens_decoder."""
    return config if config.get("added_tokens_decoder") is not None else config | special


def _with_flags(token: Any, *, is_special: bool) -> dict[str, Any]:
    """Return a token, a text or an object, as tokenizer.json has it without its id; the defaults are AddedToken's."""
    stated = {"content": token} if isinstance(token, str) else token
    if not isinstance(stated["content"], str):
        raise TypeError(f"the token {stated['content']} is no text")
    special = bool(stated.get("special") or is_special)
    flags = {**dict.fromkeys(_FLAGS, False), "normalized": not special}
    flags |= {name: bool(stated[name]) for name in _FLAGS if name in stated}
    return {"content": stated["content"], **flags, "special": special}


def _added(
    old: Sequence[dict[str, Any]],
    vocabulary: Mapping[str, int],
    declared: Iterable[tuple[int | None, dict[str, Any]]],
    path: Path,
) -> list[dict[str, Any]]:
    """Return added_tokens of tokenizer.json with declared tokens, whose flags replace those of the same text.

    Raises TokenizerError if a token gets another id than the files state.
    """
    added = {token["content"]: token for token in old}
    for stated, token in declared:
        text = token["content"]
        if text in added:
            number = added[text]["id"]
        elif text in vocabulary:
            number = vocabulary[text]
        else:  # as the library tokenizers numbers it
            number = max([len(vocabulary), *(token["id"] + 1 for token in added.values())])
        if stated not in (None, number):
            params = {"token": text, "stated": stated, "id": number}
            raise TokenizerError(path, Reason("tokenizers.id-differs", params))
        added[text] = {"id": number, **token}
    return sorted(added.values(), key=lambda token: int(token["id"]))


def _apply_settings(document: dict[str, Any], config: dict[str, Any], path: Path) -> bool:
    """Apply the settings of tokenizer_config.json that change tokens; return True if that changes tokenizer.json.

    Raises TokenizerError for one that cannot be applied, or that transformers 4 and 5 apply in different ways.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    splitter, normalizer = document.get("pre_tokenizer") or {}, document.get("normalizer") or {}
    _require(config, "split_special_tokens", False, path)
    if _UPPER_CASE not in json.dumps(splitter):
        _require(config, "fix_mistral_regex", False, path)
    before = json.dumps([splitter, normalizer])
    if normalizer.get("type") == "BertNormalizer" and name in _OF_BERT:
        normalizer["lowercase"] = config.get("do_lower_case", True)
        normalizer["strip_accents"] = config.get("strip_accents")
        normalizer["handle_chinese_chars"] = config.get("tokenize_chinese_chars", True)
    is_byte_level = splitter.get("type") == "ByteLevel"
    if is_byte_level and name in _BYTE_LEVEL:
        if (value := config.get("add_prefix_space", False)) is not None:
            splitter["add_prefix_space"] = bool(value)
    elif is_byte_level or name not in GENERIC_CLASSES:
        states = [state for part in (splitter, normalizer) for state in _prefix_spaces(part)]
        if states:
            _require(config, "add_prefix_space", any(states), path)
    model = document["model"]
    is_unigram = model.get("type") == "Unigram" and name not in (*GENERIC_CLASSES, "None")
    if (is_unigram or name in _FORMS) and config["model_type"] not in _READ_AS_IT_IS:
        _require_form(name, splitter, normalizer, config, path)
        if name in _UNKNOWN and (model.get("unk_id") != _UNKNOWN[name] or model.get("byte_fallback")):
            raise _class_differs(name, path)
    return json.dumps([splitter, normalizer]) != before


def _require_form(
    name: str, splitter: dict[str, Any], normalizer: dict[str, Any], config: dict[str, Any], path: Path
) -> None:
    """Raise TokenizerError if transformers 4 or 5 would split texts in another way than tokenizer.json."""
    parts = [
        {**_DEFAULTS.get(part["type"], {}), **part} for part in splitter.get("pretokenizers") or [splitter] if part
    ]
    if normalizer == _UNDERLINED:
        parts = [part for part in parts if part.get("pattern") != {"String": " "}]
    own_normalizer, own_parts = _FORMS.get(name, _NOT_KNOWN)
    prefix, legacy = config.get("add_prefix_space"), config.get("legacy")
    if name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        if any(part["type"] == "ByteLevel" for part in parts):  # as with DeepSeek: then transformers 5 reads the file
            return
        scheme = "never" if prefix is False else "always" if legacy else "first"
        own_parts = [{**_METASPACE, "prepend_scheme": scheme}]
        if prefix and legacy is not False:  # transformers 4 puts a space before each text between special tokens
            own_parts = []
    if own_normalizer is ...:
        own_normalizer = normalizer if normalizer.get("type") == "Precompiled" else None
    same = own_normalizer == (normalizer or None) and len(parts) == len(own_parts)
    if not same or any({**part, **own} != part for own, part in zip(own_parts, parts, strict=True)):
        raise _class_differs(name, path)


def _class_differs(name: str, path: Path) -> TokenizerError:
    return TokenizerError(path, Reason("tokenizers.class-differs", {"class": name, "folder": str(path.parent)}))


def _prefix_spaces(part: dict[str, Any]) -> Iterator[bool]:
    """Yield for each component of a pre-tokenizer or normalizer that may put a space before a text whether it does."""
    for step in part.get("pretokenizers") or part.get("normalizers") or [part]:
        if step.get("type") in ("ByteLevel", "Metaspace"):
            yield step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        elif step.get("type") in ("Prepend", "Replace") and "▁" in (step.get("prepend"), step.get("content")):
            yield step["type"] == "Prepend"


def _require(config: dict[str, Any], key: str, allowed: bool, path: Path) -> None:
    """Raise TokenizerError if a setting is given and is not what tokenizer.json has."""
    if config.get(key) not in (None, allowed):
        params = {"key": key, "given": str(config[key]).lower(), "allowed": str(allowed).lower()}
        raise TokenizerError(path, Reason("tokenizers.setting-differs", params))


def require_stated_ends(path: str, tokenizer_class: str | None = None) -> None:
    """Raise UsageError if transformers 4 and 5 would put different tokens around a text.

    The post_processor of tokenizer.json counts in transformers 5, and the settings for some classes in transformers 4.
    """
    config = json_object(expand_home(path).parent / TOKEN_FILES[0])
    if str(tokenizer_class or _class_name(expand_home(path).parent)).removesuffix("Fast") not in _WITH_ENDS:
        return
    processor = json.loads(tokenizer_file(path)).get("post_processor") or {}
    parts = processor.get("processors", [processor])
    single: Sequence[Any] = next((part["single"] for part in parts if part.get("type") == "TemplateProcessing"), [{}])
    for key, place in (("add_bos_token", 0), ("add_eos_token", -1)):
        _require(config, key, "SpecialToken" in single[place], expand_home(path))


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by name, such as eos_token, that the files beside a tokenizer state.

    Raises UsageError for a file that cannot be read.
    """
    named = _named(*(json_object(folder / name) for name in TOKEN_FILES[:2]))
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name in _SPECIAL if isinstance(text := texts.get(name), str)}


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is no file. Raises UsageError for one that cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(Reason("tokenizers.file-unreadable", {"path": str(path), "error": str(error)})) from error
    return document if isinstance(document, dict) else {}
