"""A tokenizer.json with the files beside it gives the tokens of transformers' AutoTokenizer, or is refused by name."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.tokenizers.files import TokenizerError, load_tokenizer, parsed_tokenizer, special_tokens
from scaletrain_cli.data.tokenizers.load import given_tokenizer, tokenizer_content, tokenizer_identity
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resource_checks.files import token_ids_of, tokenizer_problem
from scaletrain_cli.spec.data import TokenizerSpec
from tests.engine.checkpoint.test_export import spec_of
from tests.engine.model.test_safetensors import LLAMA
from tests.tokenizer_kinds import LEGACY, TEXTS, added_token, tokenizer_json, write_tokenizer

GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
CHATML = ("<|endoftext|>", "<|im_start|>")
SP = ("<s>", "</s>")
OF_BERT = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NAMES_OF_BERT = {f"{name.strip('[]').lower()}_token": name for name in (*OF_BERT, "[UNK]")}
GPT_2 = {"tokenizer_class": "GPT2TokenizerFast", **dict.fromkeys(("bos_token", "eos_token", "unk_token"), CHATML[0])}
BERT = {"tokenizer_class": "BertTokenizerFast", **NAMES_OF_BERT}


def with_prefix_space(tokenizer: str) -> str:
    document = json.loads(tokenizer)
    document["pre_tokenizer"]["add_prefix_space"] = True
    return json.dumps(document)


def decoder(first: int, *tokens: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + place): token for place, token in enumerate(tokens)}}


END, NOTE = added_token("<|im_end|>"), added_token("<note>", lstrip=True, rstrip=True, special=False)
WORD = added_token("word", single_word=True, normalized=True, special=False)
# By name: kind of tokenizer, its special tokens, tokenizer_config.json, and files beside it.
FOLDERS: dict[str, tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "bytes": ("bytes", CHATML, GENERIC, {}),
    "bytes, declared": ("bytes", CHATML, {**GENERIC, **decoder(400, END, NOTE, WORD), "eos_token": "<|im_end|>"}, {}),
    "bytes, flags": ("bytes", CHATML, {**GENERIC, **decoder(0, added_token(CHATML[0], lstrip=True))}, {}),
    "bytes, of the vocabulary": ("bytes", CHATML, {**GENERIC, **decoder(67, added_token("b", special=False))}, {}),
    "bytes, named": (
        "bytes",
        CHATML,
        {**GENERIC, "eos_token": "<|im_end|>", "pad_token": {"__type": "AddedToken", **END}},
        {},
    ),
    "bytes, additional": ("bytes", CHATML, {**GENERIC, "additional_special_tokens": ["<|im_end|>", "<note>"]}, {}),
    "bytes, extra": ("bytes", CHATML, {**GENERIC, "extra_special_tokens": {"image_token": "<image>"}}, {}),
    "bytes, map": (
        *("bytes", CHATML, {**GENERIC, "eos_token": CHATML[0]}),
        {"special_tokens_map": {"eos_token": END, "additional_special_tokens": ["<note>", "<x>"]}},
    ),
    "bytes, map beside declared": (
        *("bytes", CHATML, {**GENERIC, **decoder(400, END)}),
        {"special_tokens_map": {"eos_token": "<other>"}},
    ),
    "bytes, added": (
        *("bytes", CHATML, {**GENERIC, "eos_token": "<|im_end|>"}),
        {"added_tokens": {"<note>": 401, "<|im_end|>": 400}},
    ),
    "gpt 2": ("bytes", CHATML, GPT_2, {}),
    "gpt 2, prefix space": ("bytes", CHATML, {**GPT_2, "add_prefix_space": True}, {}),
    "gpt 2, no prefix space": ("bytes with prefix space", CHATML, GPT_2, {}),
    "prefix space of tokenizer.json": ("bytes with prefix space", CHATML, {**GENERIC, "add_prefix_space": True}, {}),
    "llama 3": ("split", CHATML, {**GENERIC, **decoder(400, *map(added_token, ("<|a|>", "<|b|>", "<|eot_id|>")))}, {}),
    "tekken": ("split", CHATML, {**GENERIC, "add_prefix_space": True, "add_bos_token": True}, {}),
    "qwen": ("split", CHATML, {**GENERIC, **decoder(400, END), "errors": "replace", "add_prefix_space": False}, {}),
    "metaspace": ("metaspace", SP, {**GENERIC, **NAMED, "legacy": False, "add_prefix_space": True}, {}),
    "metaspace, declared": ("metaspace", SP, {**GENERIC, **NAMED, **decoder(700, END, NOTE, WORD)}, {}),
    "unigram": ("unigram", SP, {**GENERIC, **NAMED, "do_lower_case": True, "sp_model_kwargs": {}}, {}),
    "unigram, declared": ("unigram", SP, {**GENERIC, **NAMED, **decoder(400, END, NOTE)}, {}),
    "bert, lower case": ("wordpiece", OF_BERT, BERT, {}),
    "bert, cased": ("wordpiece", OF_BERT, {**BERT, "do_lower_case": False}, {}),
    "bert, accents": ("wordpiece", OF_BERT, {**BERT, "do_lower_case": False, "strip_accents": True}, {}),
    "bert, Chinese": ("wordpiece", OF_BERT, {**BERT, "tokenize_chinese_chars": False}, {}),
    "wordpiece of another class": ("wordpiece", OF_BERT, {**GENERIC, **NAMES_OF_BERT, "do_lower_case": True}, {}),
}


def written(folder: Path, name: str) -> Path:
    kind, special, config, files = FOLDERS[name]
    tokenizer = tokenizer_json(kind.partition(" ")[0], special)
    if kind.endswith("prefix space"):
        tokenizer = with_prefix_space(tokenizer)
    return write_tokenizer(folder, tokenizer, config, config={"model_type": "llama"}, **files)


def with_declared(texts: list[str]) -> list[str]:
    """The texts, and some with tokens that the folders declare, at borders of words and beside spaces."""
    marks = ("<|im_end|>", "<note>", "<x>", "<image>", "<|eot_id|>", "word", "b", *CHATML, *SP)
    return [*texts, *(f"{left}{mark}{right}" for mark in marks for left, right in (("a ", " c"), ("a", "c"), ("", "")))]


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = written(tmp_path, name)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(path))
    for text in with_declared(TEXTS):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
    added = {number: token.content for number, token in ours.get_added_tokens_decoder().items()}
    assert added == {number: token.content for number, token in theirs.added_tokens_decoder.items()}
    named = {name: text for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert special_tokens(tmp_path) == {name: text for name, text in named.items() if name != "image_token"}


@pytest.mark.parametrize("name", FOLDERS)
def test_everything_that_reads_a_tokenizer_has_the_same_tokens(name: str, tmp_path: Path) -> None:
    path, section = written(tmp_path, name), TokenizerSpec(kind="file", path=str(tmp_path / "tokenizer.json"))
    expected = load_tokenizer(str(path)).to_str()
    assert given_tokenizer(section).to_str() == expected
    assert json.loads(tokenizer_content(section)) == json.loads(expected)
    spec = spec_of(LLAMA)
    ids = token_ids_of(path, spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": section})}))
    assert ids == load_tokenizer(str(path)).get_vocab()
    (tmp_path / "plain").mkdir()
    plain = TokenizerSpec(kind="file", path=str(tmp_path / "plain" / "tokenizer.json"))
    (tmp_path / "plain" / "tokenizer.json").write_bytes(path.read_bytes())
    changes = load_tokenizer(str(plain.path)).to_str() != expected
    assert (tokenizer_identity(plain) != tokenizer_identity(section)) == changes


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another id": ("bytes", {**GENERIC, **decoder(500, END)}, r"<\|im_end\|> as token 500, .* 400"),
    "a renamed token": ("bytes", {**GENERIC, **decoder(1, END)}, r"<\|im_end\|> as token 1, .* 400"),
    "split special tokens": ("bytes", {**GENERIC, "split_special_tokens": True}, "split_special_tokens = true"),
    "prefix space of another class": ("bytes", {**GENERIC, "add_prefix_space": True}, "add_prefix_space = true"),
    "prefix space of a split": ("split", {**GPT_2, "add_prefix_space": True}, "add_prefix_space = true"),
    "prefix space of Llama": (
        "metaspace",
        {"tokenizer_class": "LlamaTokenizerFast", **NAMED, "add_prefix_space": False},
        "add_prefix_space = false",
    ),
    "Mistral's pattern": ("split", {**GENERIC, "fix_mistral_regex": True}, "fix_mistral_regex = true"),
    "no token": ("bytes", {**GENERIC, **decoder(400, {"content": 7})}, "the token 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_applied_are_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, config, message = REFUSED[name]
    path = write_tokenizer(tmp_path, tokenizer_json(kind, SP if kind == "metaspace" else CHATML), config)
    with pytest.raises(TokenizerError, match=f"data.tokenizer.path = {path}: tokenizer_config.json .*{message}"):
        load_tokenizer(str(path))
    spec = spec_of(LLAMA)
    section = TokenizerSpec(kind="file", path=str(path))
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": section})})
    assert tokenizer_problem(path, spec) is not None


def form_of(class_name: str) -> dict[str, Any]:
    """The normalizer and the pre_tokenizer of a class of transformers 5."""
    import transformers

    whole = json.loads(getattr(transformers, class_name)().backend_tokenizer.to_str())
    return {key: whole[key] for key in ("normalizer", "pre_tokenizer")}


DIGITS = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        ],
    },
}
BY_BYTES = ("GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "Qwen2Tokenizer")


@pytest.mark.parametrize("class_name", ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", *BY_BYTES])
def test_a_class_that_splits_texts_in_another_way_than_its_tokenizer_json_is_refused(
    class_name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    by_bytes = class_name in BY_BYTES
    document = json.loads(tokenizer_json("bytes", CHATML) if by_bytes else tokenizer_json("metaspace", SP))
    names = {"eos_token": CHATML[0]} if by_bytes else NAMED
    model = {"config": {"model_type": "llama"}}  # of SmolLM2, whose tokenizer.json has DIGITS and GPT2Tokenizer
    config = {**names, "tokenizer_class": class_name}
    without_splits = [(config, form_of(class_name) | {"pre_tokenizer": None})]  # of the first Gemma
    for settings, form in (
        *(without_splits if class_name == "GemmaTokenizer" else ()),
        (config, form_of(class_name)),
        ({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, DIGITS if by_bytes else LEGACY),
    ):
        path = write_tokenizer(tmp_path, json.dumps(document | form), settings, **model)
        theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(path))
        for text in TEXTS:
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text, add_special_tokens=False).ids == expected, text
    plain = parsed_tokenizer(path.read_bytes(), "").to_str()
    path = write_tokenizer(tmp_path, json.dumps(document | (DIGITS if by_bytes else LEGACY)), config, **model)
    with pytest.raises(TokenizerError, match=f"the class {class_name}, with which .* in another way"):
        load_tokenizer(str(path))
    stated = TokenizerSpec(kind="file", path=str(path), tokenizer_class="PreTrainedTokenizerFast")
    assert given_tokenizer(stated).to_str() == plain
    assert json.loads(tokenizer_content(stated)) == json.loads(plain)
    spec = spec_of({**LLAMA, "vocab_size": 800})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": stated})})
    assert tokenizer_problem(path, spec) is None
    if class_name == "LlamaTokenizer":  # for which transformers 5 reads tokenizer.json
        write_tokenizer(tmp_path, json.dumps(document | LEGACY), config, config={"model_type": "mistral"})
        load_tokenizer(str(path))
        write_tokenizer(tmp_path, tokenizer_json("split", CHATML), {"tokenizer_class": class_name}, **model)
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    "model_type", ["gpt2", "starcoder2", "olmo", "cohere2", "gemma3_text", "qwen3", "llama", "phi3"]
)
@pytest.mark.parametrize("config", [{}, None], ids=["no class", "no file"])
def test_a_folder_that_states_no_class_has_that_of_its_model(
    model_type: str, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    accepted = []
    for form in ({}, form_of("GPT2Tokenizer"), form_of("GPTNeoXTokenizer"), form_of("Qwen2Tokenizer"), DIGITS):
        document = json.loads(tokenizer_json("split", (*CHATML, "<unk>"))) | form
        path = write_tokenizer(tmp_path, json.dumps(document), config, config={"model_type": model_type})
        with contextlib.suppress(TokenizerError):
            ours = load_tokenizer(str(path))
            theirs = AutoTokenizer.from_pretrained(tmp_path)
            for text in TEXTS:
                expected = theirs(text, add_special_tokens=False)["input_ids"]
                assert ours.encode(text, add_special_tokens=False).ids == expected, text
            accepted.append(form)
    assert len(accepted) == {"llama": 5, "phi3": 5, "gemma3_text": 0, "cohere2": 0}.get(model_type, 1)


@pytest.mark.parametrize(("name", "unknown"), [("T5Tokenizer", 2), ("XLMRobertaTokenizer", 3), ("XGLMTokenizer", 3)])
def test_a_class_that_builds_a_unigram_tokenizer_anew_is_refused_unless_it_builds_the_same(
    name: str, unknown: int, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    document = json.loads(tokenizer_json("unigram", SP))
    special = ["<pad>", "</s>", "<unk>"] if unknown == 2 else ["<s>", "<pad>", "</s>", "<unk>"]
    words = [word for word in document["model"]["vocab"] if word[0] not in ("<pad>", "<unk>", *SP)]
    document["model"] |= {"vocab": [*([text, 0.0] for text in special), *words], "unk_id": unknown}
    document |= {"added_tokens": [], "post_processor": None}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    by_words = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
    lower, other = {"normalizer": {"type": "Lowercase"}}, {"model": {**document["model"], "unk_id": 0}}
    for changes, is_same in (
        ({"pre_tokenizer": by_words}, name != "XGLMTokenizer"),
        ({"pre_tokenizer": metaspace}, False),
        ({"pre_tokenizer": by_words, **lower}, False),
        ({"pre_tokenizer": by_words, **other}, False),
    ):
        path = write_tokenizer(tmp_path, json.dumps(document | changes), {"tokenizer_class": name})
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(str(path), "PreTrainedTokenizerFast")
        encoded = [(theirs(text, add_special_tokens=False)["input_ids"], ours.encode(text).ids) for text in TEXTS]
        assert all(one == other for one, other in encoded) == is_same
        with contextlib.nullcontext() if is_same else pytest.raises(TokenizerError, match=f"the class {name}, with"):
            assert load_tokenizer(str(path)).to_str() == ours.to_str()


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_settings_of_llama_with_which_transformers_4_and_5_split_texts_as_the_file_says(
    scheme: str, tmp_path: Path
) -> None:
    document = json.loads(tokenizer_json("metaspace", SP)) | form_of("LlamaTokenizer")
    document["pre_tokenizer"]["prepend_scheme"] = scheme
    accepted = set()
    for prefix, legacy in itertools.product((None, False, True), repeat=2):
        config = {**NAMED, "tokenizer_class": "LlamaTokenizer", "add_prefix_space": prefix, "legacy": legacy}
        path = write_tokenizer(tmp_path, json.dumps(document), config)
        with contextlib.suppress(TokenizerError):
            load_tokenizer(str(path))
            accepted.add((prefix, legacy))
    assert (
        accepted
        == {
            "first": {(None, None), (None, False), (True, False)},
            "always": {(None, True)},
            "never": {(False, None), (False, False), (False, True)},
        }[scheme]
    )


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
def test_ends_of_texts_that_transformers_4_and_5_read_in_two_ways_are_refused(key: str, tmp_path: Path) -> None:
    section = TokenizerSpec(kind="file", path=str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_json("metaspace", SP)
    config = {"tokenizer_class": "LlamaTokenizer", **NAMED, "add_bos_token": False, "add_eos_token": False}
    write_tokenizer(tmp_path, tokenizer, config)
    tokenizer_content(section)
    write_tokenizer(tmp_path, tokenizer, {**config, key: True})
    with pytest.raises(TokenizerError, match=f"{key} = true"):
        tokenizer_content(section)
    write_tokenizer(tmp_path, tokenizer, {**config, **GENERIC, key: True})  # a class that does not read the key
    tokenizer_content(section)
    document = json.loads(tokenizer)
    start, text, end = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, None
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    single = [start, text] if key == "add_bos_token" else [text, end]
    tokens = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in (("<s>", 1), ("</s>", 2))}
    document["post_processor"] = {
        **{"type": "TemplateProcessing", "single": single, "pair": [text, text], "special_tokens": tokens}
    }
    write_tokenizer(tmp_path, json.dumps(document), {**config, key: True})
    tokenizer_content(section)
    write_tokenizer(tmp_path, json.dumps(document), config)
    with pytest.raises(TokenizerError, match=f"{key} = false"):
        tokenizer_content(section)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, tokenizer_json("bytes", CHATML), GENERIC)
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(UsageError, match=r"special_tokens_map\.json"):
        load_tokenizer(str(path))
