"""The rules of Gopher against their definition (arXiv 2112.11446, appendix A.1.1 and table A1), computed by hand.

Where datatrove's filters differ from the paper, a test says so: with sequences that occur once, with words in several
repeated sequences, and with whitespace among the characters.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scaletrain_cli.data.steps import Removed
from tests.data.steps.sections import rule, run, section, step

QUALITY = {
    **{"min_words": None, "max_words": None, "min_mean_word_length": None, "max_mean_word_length": None},
    **{"max_hashes_per_word": None, "max_ellipses_per_word": None, "max_bullet_lines": None},
    **{"max_ellipsis_lines": None, "min_alphabetic_words": None, "min_stop_words": None},
}
REPETITION = {key: None for key in section("gopher_repetition").model_dump() if key.startswith("max_")}
PROSE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "and we have to be with that which we had before us in the spring of hope or in the winter of despair and light."
)


def test_the_defaults_are_those_of_the_paper() -> None:
    found = section("gopher_quality").model_dump()
    assert [found[key] for key in QUALITY] == [50, 100_000, 3, 10, 0.1, 0.1, 0.9, 0.3, 0.8, 2]
    assert found["stop_words"] == ("the", "be", "to", "of", "and", "that", "have", "with")
    table = [0.30, 0.30, 0.20, 0.20, 0.20, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10]
    found = section("gopher_repetition").model_dump()
    assert [found[key] for key in REPETITION] == table


@pytest.mark.parametrize(
    ("key", "limit", "stays", "removed", "measured"),
    [
        ("min_words", 3, "one, 2 three", "one -- two", 2),
        ("max_words", 2, "one — … two", "one two three", 3),
        ("min_mean_word_length", 3, "ab cdef", "ab cde", 2.5),
        ("max_mean_word_length", 4, "abcd -------- abcd", "abcd abcde", 4.5),
        ("max_hashes_per_word", 0.25, "#tag of the text", "#tag #of the text", 0.5),
        ("max_ellipses_per_word", 0.25, "and … so on", "and... so on…", 2 / 3),
        ("max_bullet_lines", 0.5, "• one\n\ntwo\n  - three\nfour", "• one\n- two\nthree", 2 / 3),
        ("max_ellipsis_lines", 0.5, "one...\n\ntwo", "one...  \n\n\ntwo…\nthree", 2 / 3),
        ("min_alphabetic_words", 0.5, "one 2 | четыре", "one 2 | |", 0.25),
        ("min_stop_words", 2, "The end, of it", "The the othello", 1),
    ],
)
def test_quality_rules_remove_beyond_a_limit(key: str, limit: float, stays: str, removed: str, measured: float) -> None:
    one = step("gopher_quality", **{**QUALITY, key: limit})
    assert rule(one, stays) is None
    assert run(one, removed) == Removed(f"gopher_quality.{key}", pytest.approx(measured), limit)


def test_prose_passes_all_quality_rules_and_the_first_broken_one_is_named() -> None:
    one = step("gopher_quality", min_words=40)
    assert rule(one, PROSE) is None
    assert rule(one, PROSE.upper()) is None
    assert rule(one, "") == "min_words"
    assert rule(one, "Größe und Länge der Wörter " * 20) == "min_stop_words"
    assert rule(step("gopher_quality", **QUALITY), "") is None


@pytest.mark.parametrize(
    ("key", "limit", "stays", "removed", "measured"),
    [
        ("max_duplicate_lines", 0.25, "a\n\nb\nc\n a ", "a\nb\na", 1 / 3),
        ("max_duplicate_line_characters", 0.25, "ab\nab\nabcd", "abc\nabc\nabc", 6 / 9),
        ("max_duplicate_paragraphs", 0.25, "a\na\n\nb\na\n\nc\n \nd\n\nc", "a\nb\n\n\na\nb\n\nc", 1 / 3),
        ("max_duplicate_paragraph_characters", 0.25, "a\nb\n\na\nb\n\n" + 6 * "c", "ab\n\nab", 0.5),
        ("max_top_2gram", 0.7, "of it, and of it", "of it so of it", 8 / 10),
        ("max_top_3gram", 0.5, "a b c x a b d", "a b c x a b c", 6 / 7),
        ("max_top_4gram", 0.7, "a b c d x y z u v a b c d", "a b c d x a b c d", 8 / 9),
        # Of 5 equal words in a row twice, the second time counts; 7 in a row count as 7, not as 5.
        ("max_duplicate_5grams", 0.46, "a b c d e x a b c d e", "a b c d e f g a b c d e f g", 7 / 14),
        ("max_duplicate_10grams", 0.4, "a b c d e f g h i x a b c d e f g h i", 2 * "a b c d e f g h i j ", 0.5),
    ],
)
def test_a_repetition_rule_removes_just_beyond_its_limit(
    key: str, limit: float, stays: str, removed: str, measured: float
) -> None:
    one = step("gopher_repetition", **{**REPETITION, key: limit})
    assert rule(one, stays) is None
    assert run(one, removed) == Removed(f"gopher_repetition.{key}", pytest.approx(measured), limit)


def test_a_sequence_that_occurs_once_is_no_repetition() -> None:
    """datatrove counts one occurrence of the top sequence, so that it removes every short text."""
    for text in ("one two", "one two three", "a text of six words only"):
        assert rule(step("gopher_repetition"), text) is None


def test_prose_passes_all_repetition_rules_and_boilerplate_does_not() -> None:
    plain = "The keys of a step are hashed with those of the step before, so that a changed step runs again alone."
    assert rule(step("gopher_repetition"), plain) is None
    assert rule(step("gopher_repetition"), PROSE) == "max_top_4gram"  # Dickens, who repeats on purpose
    assert rule(step("gopher_repetition"), "") is None
    assert rule(step("gopher_repetition"), "Sign in\n" * 4) == "max_duplicate_lines"
    assert rule(step("gopher_repetition"), "buy it now " * 10) == "max_top_2gram"


def shares(words: list[str]) -> dict[str, float]:
    """The rules of table A1 for sequences, from their definition, with every sequence of every length."""
    found, total = {}, sum(map(len, words))
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        if n < 5:
            most = max(counts.values(), default=0)
            marked = [
                {j for i, g in enumerate(grams) if g == top for j in range(i, i + n)}
                for top in counts
                if counts[top] == most > 1
            ]
            covered = max((sum(len(words[j]) for j in one) for one in marked), default=0)
        else:
            again = {j for i, gram in enumerate(grams) if gram in grams[:i] for j in range(i, i + n)}
            covered = sum(len(words[j]) for j in again)
        found[f"max_top_{n}gram" if n < 5 else f"max_duplicate_{n}grams"] = covered / total if total else 0.0
    return found


@given(st.lists(st.sampled_from("a bb a ccc dd".split()), max_size=40))
@example("a a a a a a a a a a a a".split())
@example("a b c d e f g h i j k l a b c d e f g h i j k l".split())
def test_sequences_are_measured_as_all_of_them_would_be(words: list[str]) -> None:
    text = " ".join(words)
    for key, measured in shares(words).items():
        for limit in (measured, max(measured - 1e-9, 0)):
            settings: dict[str, Any] = {**REPETITION, key: min(limit, 1.0)}
            result = run(step("gopher_repetition", **settings), text)
            assert isinstance(result, Removed) == (measured > limit)
            if isinstance(result, Removed):
                assert result.measured == pytest.approx(measured)
