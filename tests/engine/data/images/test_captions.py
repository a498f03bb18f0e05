"""Captions have the token ids that transformers' CLIP tokenizer gives them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import pre_tokenizers

from scaletrain_cli.engine.data.images.captions import caption_tokenizer
from scaletrain_cli.errors import UsageError
from tests.engine.data.images.pictures import Pictures, reader

CAPTIONS = [
    "a photo of a red square",
    "A  Photo\tof the BLUE circle's edge, 12 px!",
    "",
    "naïve café ☕ 猫",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen",
]
POSITIONS = 16


def small_tokenizer(**special: str) -> Any:
    """Return a tokenizer of the kind of CLIP's with all bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("p", "h"), ("o", "t"), ("ph", "ot"), ("phot", "o</w>"), ("o", "f</w>"), ("r", "e"), ("re", "d</w>")]
    words = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges)]
    vocab = {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>", "<pad>"])}
    return transformers.CLIPTokenizerFast(vocab=vocab, merges=merges, **special)


@pytest.mark.parametrize("special", [{}, {"pad_token": "<pad>"}])
def test_ids_are_those_of_transformers(tmp_path: Path, special: dict[str, str]) -> None:
    theirs = small_tokenizer(**special)
    theirs.save_pretrained(tmp_path)
    expected = theirs(CAPTIONS, padding="max_length", truncation=True, max_length=POSITIONS)["input_ids"]
    ours = caption_tokenizer(tmp_path / "tokenizer.json", POSITIONS, len(theirs))
    found = ours.encode(CAPTIONS)
    assert found.tolist() == expected
    assert (found[-1, 0], found[-1, -1]) == (ours.start, ours.end)  # it was cut
    assert found[2].tolist() == [ours.start, ours.end] + [ours.padding] * (POSITIONS - 2)
    assert ours.padding == theirs.pad_token_id
    assert pickle.loads(pickle.dumps(ours)).encode(CAPTIONS).tolist() == expected


def test_a_tokenizer_without_files_beside_it_has_the_tokens_of_clip(tmp_path: Path) -> None:
    theirs = small_tokenizer()
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = caption_tokenizer(tmp_path / "tokenizer.json", POSITIONS, len(theirs))
    assert (ours.start, ours.end, ours.padding) == (theirs.bos_token_id, theirs.eos_token_id, theirs.eos_token_id)


def test_padding_and_truncation_that_a_tokenizer_file_states_have_no_effect(tmp_path: Path) -> None:
    theirs = small_tokenizer()
    expected = theirs(CAPTIONS, padding="max_length", truncation=True, max_length=POSITIONS)["input_ids"]
    theirs.backend_tokenizer.enable_truncation(5)
    theirs.backend_tokenizer.enable_padding(length=40)
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert caption_tokenizer(tmp_path / "tokenizer.json", POSITIONS, 1000).encode(CAPTIONS).tolist() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot be read as a tokenizer"),
        (lambda path: path.write_text("{}"), "cannot be read as a tokenizer"),
        (
            lambda path: path.write_text(path.read_text().replace("<|startoftext|>", "<s>")),
            r"has no token <\|startoftext\|>",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_a_clear_error(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    small_tokenizer().backend_tokenizer.save(str(path))
    change(path)
    with pytest.raises(UsageError, match=message):
        caption_tokenizer(path, POSITIONS, 1000)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    small_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"522 tokens and model\.text_config\.vocab_size is 500"):
        caption_tokenizer(tmp_path / "tokenizer.json", POSITIONS, 500)


def test_a_batch_has_the_caption_of_each_of_its_images(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    captions = caption_tokenizer(tmp_path / "tokenizer.json", POSITIONS, 1000)
    read, source = reader(captions=captions, labeled=False), Pictures()
    batch = pickle.loads(pickle.dumps(read.without_groups())).batch(1)
    assert batch.targets is None
    texts = [str(source.read(index).caption) for index in batch.numbers.flatten().tolist()]
    assert batch.tokens[0].tolist() == captions.encode(texts).tolist()
    (micro,) = batch.micro_batches()
    assert micro.inputs == (micro.images, micro.tokens)


def test_a_tokenizer_with_another_end_than_the_model_is_a_clear_error(tmp_path: Path) -> None:
    """The features of a caption would be those of its first token."""
    theirs = small_tokenizer(pad_token="<pad>")
    theirs.save_pretrained(tmp_path)
    path, end = tmp_path / "tokenizer.json", theirs.eos_token_id
    assert caption_tokenizer(path, POSITIONS, 1000, end).end == end
    with pytest.raises(UsageError, match=f"ends captions with <.endoftext.>, number {end}, .*looks for number 49407"):
        caption_tokenizer(path, POSITIONS, 50000, 49407)
    with pytest.raises(UsageError, match=f"takes the largest token, number {end + 1}, as the end") as found:
        caption_tokenizer(path, POSITIONS, 1000, 2)  # <pad> is larger
    assert "eos_token_id to" not in str(found.value)  # with a number 2 at the end, that would change nothing
