"""The step contamination against a plain implementation of its definition (GPT-3, appendix C; PaLM, section 8)."""

import gzip
import json
import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.data.steps import Kept, Removed
from scaletrain_cli.errors import UsageError
from tests.data.steps.sections import run, step, text_after

ITEM = "Which of these planets is, by its mass, the largest one in our whole Solar System today?"  # 17 words
SHORT = "How many moons does the planet Mars have in all?"  # 10 words


def words(count: int, seed: int = 0) -> str:
    choose = random.Random(seed)
    return " ".join("".join(choose.choices(string.ascii_lowercase, k=6)) for _ in range(count))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    rows = [{"question": ITEM, "choices": ["a", "b"], "id": 1}, {"question": SHORT, "choices": None}]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return [str(tmp_path / "*.jsonl")]


def test_a_match_is_found_whatever_its_case_and_punctuation(files: list[str]) -> None:
    one = step("contamination", files=files, fields=["question", "choices"], action="drop")
    part = " ".join(ITEM.split()[2:15])
    for text in (ITEM, part, part.upper(), part.replace(" ", ' "\n- '), f"{words(50)} {part} {words(50)}"):
        assert run(one, text) == Removed("contamination.ngram", 5 if text is ITEM else 1, 0)
    for text in (" ".join(ITEM.split()[3:15]), part.replace("mass", "size"), "", "?!", words(5)):
        assert run(one, text) == Kept(text)


def test_an_item_shorter_than_the_ngram_matches_as_a_whole(files: list[str]) -> None:
    one = step("contamination", files=files, fields=["question"], action="drop")
    assert run(one, f"{words(3)} {SHORT} {words(3)}") == Removed("contamination.ngram", 1, 0)
    assert run(one, SHORT.replace("in all", "")) == Kept(SHORT.replace("in all", ""))
    longer = step("contamination", files=files, fields=["question"], action="drop", min_item_words=11)
    assert run(longer, SHORT) == Kept(SHORT)


def test_a_match_is_cut_with_its_margin_up_to_the_end_of_words(files: list[str]) -> None:
    one = step("contamination", files=files, fields=["question"], margin=200)
    before, after = words(100, 1), words(100, 2)
    result = run(one, f"{before}\n{ITEM}\n{after}")
    assert isinstance(result, Kept)
    left, right = result.text.split("\n")
    # 200 characters are 28 words of 6 letters and a space, and the larger part of one more, which goes as a whole.
    assert left == " ".join(before.split()[:-29])
    assert right == " ".join(after.split()[29:])
    cut = len(before) + len(ITEM) + len(after) + 2 - len(result.text)
    assert result.counts == {"contamination.cut": 1, "contamination.matches": 5, "contamination.characters": cut}


def test_short_pieces_are_dropped_and_many_pieces_remove_the_document(files: list[str]) -> None:
    def one(**keys: int) -> Callable[[str], Kept | Removed]:
        built = step("contamination", files=files, fields=["question"], margin=0, **keys)
        return lambda text: run(built, text)

    assert one(min_piece=10)(f"{words(1)} {ITEM} {words(3)}").text == words(3)  # type: ignore[union-attr]
    assert one(min_piece=30)(f"{words(1)} {ITEM} {words(3)}") == Removed("contamination.min_piece", 20, 30)
    assert one()(ITEM) == Removed("contamination.min_piece", 0, 200)
    many = f" {ITEM} ".join(words(40, seed) for seed in range(11))
    assert one()(many) == Removed("contamination.max_pieces", 11, 10)
    assert one(max_pieces=11)(many).text.count("\n") == 10  # type: ignore[union-attr]


def test_a_share_drops_documents_with_enough_of_one_item(files: list[str]) -> None:
    """PaLM counts an item as seen if 70 % of its 8-grams are: here by one document. The item has 10 of them."""
    keys = {"files": files, "fields": ["question"], "ngram": 8, "action": "drop"}
    parts = ITEM.split()
    for seen in range(9, 18):
        text = f"{words(4)} {' '.join(parts[:seen])}"
        share = (seen - 7) / 10
        expected = (
            Removed("contamination.min_matching_share", pytest.approx(share), 0.7) if share >= 0.7 else Kept(text)
        )
        assert run(step("contamination", **keys, min_matching_share=0.7), text) == expected
    halves = f"{' '.join(parts[:12])} or {' '.join(SHORT.split()[:8])}"  # 5 of 10, and 1 of 3 of another item
    result = run(step("contamination", **keys, min_matching_share=0.1), halves)
    assert result == Removed("contamination.min_matching_share", pytest.approx(0.5), 0.1)


def test_matches_are_those_of_a_plain_search_among_all_items(tmp_path: Path) -> None:
    choose = random.Random(5)
    items = [choose.choices("abcdefgh", k=choose.randint(1, 9)) for _ in range(60)]
    (tmp_path / "eval.txt").write_text("\n".join(" ".join(item) for item in items))
    one = step("contamination", files=[str(tmp_path / "eval.txt")], ngram=5, min_item_words=3, action="drop")
    sought = {tuple(item[i : i + 5]) for item in items if len(item) >= 5 for i in range(len(item) - 4)}
    sought |= {tuple(item) for item in items if 3 <= len(item) < 5}
    found = 0
    for _ in range(300):
        text = choose.choices("abcdefgh", k=choose.randint(0, 12))
        number = sum(tuple(text[i : i + n]) in sought for n in (3, 4, 5) for i in range(len(text) - n + 1))
        expected = Removed("contamination.ngram", number, 0) if number else Kept(" ".join(text))
        assert run(one, " ".join(text)) == expected
        found += bool(number)
    assert 20 < found < 280


def test_compressed_and_plain_files_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": ITEM}))
    (tmp_path / "b.txt").write_text(f"{words(3)}\n{SHORT}\n")
    one = step("contamination", files=[str(tmp_path / "*")], margin=0, min_piece=1)
    assert text_after(one, f"x {ITEM} y {SHORT} z") == "x\ny\nz"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.txt", None, "matches no file"),
        ("eval.csv", "a,b", r"must be a \.txt or \.jsonl file"),
        ("eval.jsonl", '{"text": "a"}\n[1]', r"eval\.jsonl:2: each line must be a JSON object"),
        ("eval.jsonl", '{"text": "a"}\n{', r"eval\.jsonl:2: each line must be a JSON object"),
        ("eval.jsonl", '{"question": "a", "id": 1}', r"eval\.jsonl:1: the row has none of the fields text; it has id"),
        ("eval.jsonl", '{"text": 5}', r"eval\.jsonl:1: the field text must be text"),
        ("eval.txt", "only three words", "no item of the evaluation files has 8 words"),
        ("eval.txt", b"\xff\xfe", r"eval\.txt: cannot be read"),
        ("eval.jsonl.gz", b"\x1f\x8b\x08", r"eval\.jsonl\.gz: cannot be read"),
    ],
)
def test_an_evaluation_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: str | bytes | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=expected):
        step("contamination", files=[str(tmp_path / name)])
