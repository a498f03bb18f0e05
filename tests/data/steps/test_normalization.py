import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.steps import Kept
from tests.data.marks import normalized_runs
from tests.data.steps.sections import run, step, text_after


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h", "a\nb\nc\nd\ne\nf\ng\nh"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("nul\x00 bell\x07 escape\x1b[0m delete\x7f c1\x9f", "nul bell escape[0m delete c1"),
        ("\ufeffmark of the byte order\ufeff", "mark of the byte order"),
        ("zero\u200bwidth\u2060 soft\u00adhyphen", "zerowidth softhyphen"),
        ("می\u200cخواهم 👩\u200d💻", "می\u200cخواهم 👩\u200d💻"),
        ("lone \ud800surrogate, \ufffe\U0010ffff", "lone surrogate, "),
        ("e\u0301 Å ﬁ", "é Å ﬁ"),
    ],
)
def test_what_carries_no_text_is_removed_and_the_rest_stays(given: str, expected: str) -> None:
    assert text_after(step("normalization"), given) == expected


def test_each_setting_can_be_turned_off() -> None:
    text = "a\r\nb\x0c\x00\ufeffe\u0301ﬁ²"
    off = {"unicode": "none", "control_characters": "keep", "zero_width": "keep", "line_ends": "keep"}
    assert run(step("normalization", **off), text) == Kept(text)
    assert text_after(step("normalization", **off | {"unicode": "NFKC"}), text) == "a\r\nb\x0c\x00\ufeff\u00e9fi2"
    assert text_after(step("normalization", **off | {"control_characters": "space"}), text) == text.replace("\x00", " ")
    assert text_after(step("normalization", **off | {"line_ends": "lf"}), text).startswith("a\nb\n\x00")
    assert text_after(step("normalization", **off | {"zero_width": "remove"}), text) == text.replace("\ufeff", "")


@given(st.text(st.characters(codec=None)))
def test_the_result_is_normalized_and_has_only_characters_of_text(text: str) -> None:
    result = text_after(step("normalization"), text)
    assert unicodedata.is_normalized("NFC", result)
    kinds = {character: unicodedata.category(character) for character in result}
    assert [character for character, kind in kinds.items() if kind in ("Cc", "Cs") and character not in "\n\t"] == []
    result.encode()


@given(st.text(st.characters(max_codepoint=127)))
def test_the_way_for_ascii_gives_what_the_way_for_all_texts_gives(text: str) -> None:
    for keys in ({}, {"control_characters": "space"}, {"line_ends": "keep"}, {"control_characters": "keep"}):
        one = step("normalization", **keys)
        assert text_after(one, text) + "é" == text_after(one, text + "é")


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_megabyte_of_combining_marks_is_never_normalized_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, marks = step("normalization", unicode=form), "\u0301\u0327\u0345\u0334"
    assert text_after(one, f"a{marks}") == unicodedata.normalize(form, f"a{marks}")
    runs = normalized_runs(monkeypatch)
    result = text_after(one, f"a{marks * 125_000} b")  # unicodedata alone: an hour
    assert len(runs) == 1
    assert max(runs) <= 30
    assert text_after(one, result) == result
    assert len(result) - 500_000 == pytest.approx(500_000 / 30, rel=0.01)


def test_a_text_in_its_form_is_the_same_object() -> None:
    text = "An ordinary text, größer.\n"
    assert run(step("normalization"), text).text is text  # type: ignore[union-attr]
