"""The rules of C4 (JMLR 21/140, section 2.2) and FineWeb (arXiv 2406.17557, section 3.6) against their definitions."""

from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.steps import Kept, Removed
from scaletrain_cli.data.steps.quality_filters import sentences_in
from scaletrain_cli.errors import UsageError
from tests.data.steps.sections import rule, run, section, step, text_after

LOOSE: dict[str, Any] = {"min_sentences": None}
FINEWEB: dict[str, Any] = {"min_punctuated_lines": None, "max_duplicate_line_characters": None, "max_short_lines": None}


def test_the_defaults_are_those_of_the_papers() -> None:
    found = section("c4")
    assert (found.min_words_per_line, found.min_sentences, found.max_word_length) == (3, 5, 1000)  # type: ignore[attr-defined]
    found = section("fineweb")
    limits = [getattr(found, key) for key in (*FINEWEB, "short_line_length", "max_newlines_per_word")]
    assert limits == [0.12, 0.1, 0.67, 30, None]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("A line that ends with a full stop.", None),
        ('He said: "That is all."', None),
        ("Is this a question?", None),
        ("A headline without a mark", "end_marks"),
        ("And then it went on...", "end_marks"),
        ("And then it went on…", "end_marks"),
        ("Too short.", "min_words_per_line"),
        ("A line with " + 1001 * "x" + " in it.", "max_word_length"),
        ("A line with " + 1000 * "x" + " in it.", None),
        ("Please enable JavaScript to go on.", "line_phrases"),
        ("We have a Privacy Policy for you.", "line_phrases"),
        ("This site uses cookies for that.", "line_phrases"),
    ],
)
def test_a_line_of_c4_is_dropped_by_its_rule(line: str, key: str | None) -> None:
    result = run(step("c4", **LOOSE), f"This line is kept.\n{line}\n")
    assert result == Kept(f"This line is kept.\n{line}" if key is None else "This line is kept.", result.counts)  # type: ignore[union-attr]
    assert result.counts == ({} if key is None else {f"c4.{key}": 1})  # type: ignore[union-attr]


def test_citations_leave_a_line_of_c4_before_its_end_is_looked_at() -> None:
    text = "It was founded in 1990.[12]\nIt has many members[edit] today.[citation needed]"
    assert text_after(step("c4", **LOOSE), text) == "It was founded in 1990.\nIt has many members today."
    assert text_after(step("c4", **LOOSE, remove_citations=False, end_marks=None), text) == text


@pytest.mark.parametrize("text", ["See Lorem Ipsum.", "if (x) { return; }"])
def test_a_phrase_anywhere_in_the_page_removes_it(text: str) -> None:
    """datatrove does not look at lines that another rule has dropped; the paper speaks of pages."""
    one = step("c4", **LOOSE)
    assert rule(one, f"This is a good line of text.\n{text} and no mark at its end") == "document_phrases"


def test_a_page_with_a_word_of_the_list_is_removed(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("Darn\n\ndouble darn\nrotten  apple\n")
    one = step("c4", **LOOSE, end_marks=None, bad_words=str(tmp_path / "words.txt"))
    assert run(one, "Well, DARN! That is it") == Removed("c4.bad_words", 1, 0)
    assert run(one, "A double-darn rotten apple") == Removed("c4.bad_words", 3, 0)
    assert rule(one, "The darning of an apple, rotten") is None
    for text, expected in (("", "has no words"), (None, "cannot be read")):
        (tmp_path / "words.txt").write_text(text) if text is not None else (tmp_path / "words.txt").unlink()
        with pytest.raises(UsageError, match=rf"words\.txt: {expected}"):
            step("c4", bad_words=str(tmp_path / "words.txt"))


def test_a_page_of_c4_needs_five_sentences_in_the_lines_that_are_left() -> None:
    lines = ["This is the first one. This is the second.", "Is this the third? It is not the last!"]
    assert run(step("c4"), "\n".join(lines)) == Removed("c4.min_sentences", 4, 5)
    assert rule(step("c4"), "\n".join([*lines, "This line ends it."])) is None
    assert rule(step("c4"), "\n".join([*lines, "This line has no mark at its end"])) == "min_sentences"
    assert rule(step("c4"), "") == "min_sentences"


def test_a_page_of_mc4_needs_three_long_lines() -> None:
    long = "The words of this line are many " * 7 + "and end."
    one = step("c4", min_sentences=None, min_paragraphs=3)
    assert len(long) >= 200
    assert rule(one, "\n".join([long, long, "A short line here.", long])) is None
    assert run(one, "\n".join([long, "A short line here.", long])) == Removed("c4.min_paragraphs", 2, 3)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        *(("One sentence", 1), ("One. Two! Three? Four", 4), ("It costs 3.50 in all. Good.", 2)),
        *(("He said e.g. that it works.", 1), ('"Stop!" she said. "Now?" He did.', 3), ("Wait... what? Yes.", 2)),
        ("First.) [Second.] Third", 3),
    ],
)
def test_sentences_end_before_whitespace_and_no_small_letter(line: str, count: int) -> None:
    assert sentences_in(line) == count


@pytest.mark.parametrize(
    ("key", "limit", "stays", "removed", "measured"),
    [
        ("min_punctuated_lines", 0.25, "a.\n\nb\nc", "a.\nb\nc\nd", 0.25),
        ("max_duplicate_line_characters", 0.25, "ab\nab\nabcde", "ab\nab\nabcd", 0.25),
        ("max_short_lines", 0.5, f"{30 * 'x'}\n{30 * 'x'}\nshort", f"{29 * 'x'}\n\n{30 * 'x'}", 0.5),
        ("max_newlines_per_word", 0.5, "a b\nc d\n", "a\nb\n c", 2 / 3),
    ],
)
def test_fineweb_removes_from_its_limit_on(key: str, limit: float, stays: str, removed: str, measured: float) -> None:
    one = step("fineweb", **{**FINEWEB, key: limit})
    assert rule(one, stays) is None
    assert run(one, removed) == Removed(f"fineweb.{key}", pytest.approx(measured), limit)


def test_an_empty_page_has_no_line_with_punctuation() -> None:
    assert run(step("fineweb"), " \n\n") == Removed("fineweb.min_punctuated_lines", 0.0, 0.12)
