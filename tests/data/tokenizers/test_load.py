"""Tokenizers of other libraries as a tokenizer.json: the same tokens as their library, or a refusal."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
from tokenizers import Tokenizer

from scaletrain_cli.data.prepared import find_prepared, prepare_data
from scaletrain_cli.data.tokenizers.files import TokenizerError
from scaletrain_cli.data.tokenizers.load import ENCODINGS, token_ids, tokenizer_content, tokenizer_identity
from scaletrain_cli.launch.resource_checks.files import tokenizer_problem
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.data import TokenizerSpec
from tests.spec.samples import SPEC, load
from tests.tokenizer_kinds import tokenizer_json

WORDS = ("river", "mountain", "don't", "ünïcode", "日本語", "Москва", "x_y", "(a+b)")
SOURCE = Path(json.decoder.__file__).read_text(encoding="utf-8")
LINES = [
    *(f"Line {n} has {n * n} words, it's {w} in {w}land; {w.upper()} — {w}, Füße." for n in range(60) for w in WORDS),
    *(line for line in SOURCE.splitlines() if line.strip()),
]
UNSEEN = [
    *(" leading", "trailing  ", "a\tb\n\n c\r\nd   e", "ﬁ ① Ａ", "🙂👩‍👧 ʘ", "Жизнь 한국어 עברית", "", "   ", "\n"),
    *("IT'S 123456 'LL we'll", "if x:\n        y = z[0]  # no\n", "é é", "¡¿«»…"),
]


def model(folder: Path, **options: Any) -> TokenizerSpec:
    written = io.BytesIO()
    options = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **options)
    path = folder / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return TokenizerSpec(kind="sentencepiece", path=str(path))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {
            "model_type": "bpe",
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<tool>", "\t\t"],
            "remove_extra_whitespaces": False,
        },
        {
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
        },
        {"model_type": "bpe", "split_by_whitespace": False},
    ],
)
def test_a_sentencepiece_model_gives_the_tokens_of_its_library(options: dict[str, Any], tmp_path: Path) -> None:
    section = model(tmp_path, **options)
    ours = Tokenizer.from_str(tokenizer_content(section))
    theirs = sentencepiece.SentencePieceProcessor(model_file=section.path)
    texts, decoded = [*UNSEEN, *LINES[::7], "\n".join(LINES[:40]), "a <tool> b\t\tc"], 0
    for text in texts:
        assert ours.encode(text).ids == theirs.encode(text)
        if 0 not in theirs.encode(text):  # the unknown piece has other texts
            decoded += 1
            assert ours.decode(theirs.encode(text)).strip() == theirs.decode(theirs.encode(text)).strip()
    assert decoded > 20
    assert ours.token_to_id("</s>") == theirs.eos_id()


def ranks(vocabulary: int) -> dict[bytes, int]:
    """Return the ranks that tiktoken's own teaching module learns."""
    from tiktoken._educational import bpe_train

    found = bpe_train("\n".join(LINES[::3]), vocabulary, ENCODINGS["gpt2"].pattern, visualise=None)
    return dict(found)


@pytest.fixture(scope="module")
def learned() -> dict[bytes, int]:
    return ranks(400)


def written(folder: Path, learned: dict[bytes, int]) -> str:
    path = folder / "a.tiktoken"
    rows = sorted(learned.items(), key=lambda item: item[1])
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in rows), encoding="ascii")
    return str(path)


@pytest.mark.parametrize("encoding", ["cl100k_base", "o200k_base", "p50k_base", "gpt2"])
def test_known_encodings_are_those_of_tiktoken(
    encoding: str, learned: dict[bytes, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiktoken_ext.openai_public
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(module, loader, lambda *_, **__: learned)
    given = getattr(module, encoding)()
    given.pop("explicit_n_vocab", None)
    theirs = tiktoken.Encoding(**given)
    section = TokenizerSpec(kind="tiktoken", path=written(tmp_path, learned), encoding=encoding)  # type: ignore[arg-type]
    ours = Tokenizer.from_str(tokenizer_content(section))
    for text in (*UNSEEN, *LINES, "\n".join(LINES)):
        assert ours.encode(text).ids == theirs.encode_ordinary(text)
        assert ours.decode(theirs.encode_ordinary(text), skip_special_tokens=False) == text
    for name, number in given["special_tokens"].items():
        assert ours.encode(f"a{name}", add_special_tokens=False).ids[-1] == number


def test_own_patterns_and_special_tokens_of_tiktoken_files(learned: dict[bytes, int], tmp_path: Path) -> None:
    path = written(tmp_path, learned)
    section = TokenizerSpec(
        kind="tiktoken", path=path, pattern=r"\w+|\W", special_tokens=("<|endoftext|>", "<|other|>")
    )
    ours = Tokenizer.from_str(tokenizer_content(section))
    theirs = tiktoken.Encoding("a", pat_str=r"\w+|\W", mergeable_ranks=learned, special_tokens={})
    assert [ours.encode(text).ids for text in LINES] == [theirs.encode_ordinary(text) for text in LINES]
    assert [ours.token_to_id(name) for name in section.special_tokens] == [400, 401]
    assert max(token_ids(Path(path).read_bytes(), section).values()) == 401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "model of type 3; convertible are 1"),
        ({"treat_whitespace_as_suffix": True}, "spaces at the end of words"),
        ({"user_defined_symbols": ["<tool>"]}, "other tokens as a tokenizer.json than sentencepiece does"),
    ],
)
def test_sentencepiece_models_that_would_give_other_tokens_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_content(
            model(tmp_path, normalization_rule_name="identity", **options, remove_extra_whitespaces=False)
        )


def test_files_that_are_no_tokenizers_are_named(learned: dict[bytes, int], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe not a model")
    for kind, message in (("sentencepiece", "is no model of SentencePiece"), ("tiktoken", "line 1 of a tiktoken file")):
        section = TokenizerSpec(kind=kind, path=str(tmp_path / "a"), encoding="gpt2")  # type: ignore[arg-type]
        with pytest.raises(TokenizerError, match=f"data.tokenizer.path = .*a: .*{message}"):
            tokenizer_content(section)
    path = written(tmp_path, {token: rank for token, rank in learned.items() if token != b"e"})
    with pytest.raises(TokenizerError, match="must have all single bytes"):
        tokenizer_content(TokenizerSpec(kind="tiktoken", path=path, encoding="gpt2"))
    path = written(tmp_path, learned)
    with pytest.raises(TokenizerError, match="is not valid"):
        tokenizer_content(TokenizerSpec(kind="tiktoken", path=path, pattern="(", special_tokens=("</s>",)))
    pattern = r"\p{L}{1,2}+|\P{L}+"  # possessive in one library alone
    section = TokenizerSpec(kind="tiktoken", path=path, pattern=pattern, special_tokens=("</s>",))
    with pytest.raises(TokenizerError, match="other tokens"):
        tokenizer_content(section)


def test_tokens_that_files_beside_a_model_of_another_library_declare_are_tokens(
    learned: dict[bytes, int], tmp_path: Path
) -> None:
    tiktoken_file = TokenizerSpec(kind="tiktoken", path=written(tmp_path, learned), encoding="gpt2")
    for section in (model(tmp_path, model_type="bpe", normalization_rule_name="identity"), tiktoken_file):
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        plain, before = Tokenizer.from_str(tokenizer_content(section)), tokenizer_identity(section)
        end = {"content": "<|im_end|>", "special": True, "normalized": False}
        settings = {"add_prefix_space": False, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}
        number = max(plain.get_vocab().values()) + 1
        config = {**settings, "added_tokens_decoder": {str(number): end}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = Tokenizer.from_str(tokenizer_content(section))
        assert ours.encode("a b<|im_end|>", add_special_tokens=False).ids == [*plain.encode("a b").ids, number]
        assert token_ids(Path(str(section.path)).read_bytes(), section)["<|im_end|>"] == number
        assert tokenizer_identity(section) != before


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False}},
        {"tokenizer_config.json": {"tokenizer_class": "T5TokenizerFast"}},
        {"tokenizer_config.json": {"bos_token": "<s>"}, "config.json": {"model_type": "llama"}},
    ],
)
def test_a_model_of_sentencepiece_that_transformers_reads_by_a_class_is_refused(
    files: dict[str, Any], tmp_path: Path
) -> None:
    section = model(tmp_path, model_type="bpe", normalization_rule_name="identity")
    tokenizer_content(section)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    for read in (tokenizer_content, lambda each: token_ids(Path(str(each.path)).read_bytes(), each)):
        with pytest.raises(TokenizerError, match=r"AutoTokenizer has those of the class .* state, (Llama|T5|llama)"):
            read(section)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # as in an export, whose tokenizer.json was converted
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_content(section)


def test_a_dataset_has_the_tokens_and_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    section = model(tmp_path, model_type="unigram")
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES), encoding="utf-8")
    data = DataSpec.model_validate({"source": str(text), "tokenizer": section.model_dump(), "validation_split": 0.001})
    (dataset,) = prepare_data(data, tmp_path / "runs", 1, lambda *_: None).values()
    theirs = sentencepiece.SentencePieceProcessor(model_file=section.path)
    documents = [[*theirs.encode(line), theirs.eos_id()] for line in LINES]
    found = [np.fromfile(dataset / "000000" / f"{split}.bin", "uint16").tolist() for split in ("train", "validation")]
    assert sorted(found[0] + found[1]) == sorted(token for one in documents for token in one)
    for tokens in found:  # documents of either split are whole and in order
        at = 0
        left = iter(documents)
        while at < len(tokens):
            one = next(each for each in left if tokens[at : at + len(each)] == each)
            at += len(one)
    kept = Tokenizer.from_file(str(dataset / "tokenizer.json"))
    assert kept.decode(theirs.encode(LINES[0])) == theirs.decode(theirs.encode(LINES[0]))
    assert find_prepared(data, tmp_path / "runs") == {data.all_sources[0].name: dataset}
    assert len(list((tmp_path / "runs").rglob("tokenizer-*.json"))) == 1


@pytest.mark.parametrize(
    ("end", "other"),
    [("<｜end▁of▁sentence｜>", ""), ("[EOS]", "<|im_end|>"), ("<|eos|>", ""), ("<eos>", "</s>")],
    ids=["DeepSeek", "Kimi", "Hunyuan", "Gemma"],
)
def test_text_ends_with_the_end_token_of_the_family(end: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("bytes", ("<begin>", end, *filter(None, [other]))), encoding="utf-8")
    spec = load(SPEC, f"data.tokenizer={{kind: file, path: {path}}}")
    assert tokenizer_problem(path, spec) is None
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES[:40]), encoding="utf-8")
    data = spec.data.model_copy(update={"source": str(text), "validation_split": 0.0})
    (dataset,) = prepare_data(data, tmp_path / "runs", 1, lambda *_: None).values()
    tokens = np.fromfile(dataset / "000000" / "train.bin", "uint16")
    assert (tokens == 1).sum() == 40
    assert tokens[-1] == 1
