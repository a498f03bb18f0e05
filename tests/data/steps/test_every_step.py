"""Every step is pure, raises no exception for any text, has an identity, and applies to the sources of ``only``."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from scaletrain_cli.data.steps import STEPS, Kept, Removed, Step, identity
from scaletrain_cli.data.steps.base import DocumentError
from scaletrain_cli.data.steps.identifiers import Identifiers
from scaletrain_cli.data.steps.normalization import Normalization
from scaletrain_cli.spec.preparation import QUALITY_RULES, AnyStep, preparation_inconsistencies
from scaletrain_cli.spec.preparation import STEPS as SECTIONS
from tests.data.steps.sections import run, section, step

ITEM = "the quick brown fox jumps over the lazy dog while nobody at all looks at it"
# Texts that look like what the steps search for, beside any text at all.
PARTS = st.sampled_from(
    "the and of a b a@b.co 81.2.69.142 +49 30 1234567 2001:4860:4860::8888 AKIAIOSFODNN7EXAMPLE eyJ [1] { . ! ... … # "
    "• - \n \n\n \r\n \t \x0b \ufeff \u00ad é e\u0301 ﬁ İ ß \ud800 \ufffe -----BEGIN PRIVATE KEY-----".split(" ")
)
TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=80),
    st.lists(st.one_of(PARTS, st.sampled_from(ITEM.split())), max_size=60).map(" ".join),
    st.lists(PARTS, max_size=30).map("".join),
)


def every_step(folder: Path) -> list[tuple[Step, Callable[[], Step]]]:
    (folder / "eval.txt").write_text(ITEM)
    files = {"files": [str(folder / "eval.txt")], "ngram": 5, "min_item_words": 3}
    makers: list[Callable[[], Step]] = [
        lambda: step("normalization"),
        lambda: step("normalization", unicode="NFKC", control_characters="space", zero_width="keep", line_ends="keep"),
        lambda: step("language", keep=["en", "de"], min_probability=0.1),
        *(lambda name=name: step(name) for name in QUALITY_RULES),  # type: ignore[misc]
        lambda: step("c4", min_sentences=None, min_words_per_line=1),
        lambda: step("score", column="score", min=0.5),
        lambda: step("contamination", **files, margin=3, min_piece=2),
        lambda: step("contamination", **files, action="drop", min_matching_share=0.3),
        lambda: step("identifiers", replace=["email", "ip", "phone", "key"]),
    ]
    return [(maker(), maker) for maker in makers]


def test_no_step_raises_or_remembers_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    steps = every_step(tmp_path)
    assert {type(one) for one, _ in steps} >= {type(step(name)) for name in QUALITY_RULES}
    assert len({type(one).__name__ for one, _ in steps}) == len(STEPS)
    first: dict[int, list[tuple[str, Kept | Removed]]] = {}

    @settings(max_examples=100)  # it has no marker of a property, so `make test-long` does not select it
    @given(TEXTS)
    def check(text: str) -> None:
        for number, (one, _) in enumerate(steps):
            result = run(one, text, score=len(text) / 100)
            first.setdefault(number, []).append((text, result))
            if isinstance(result, Removed):
                assert not isinstance(one, Identifiers | Normalization)
            else:
                assert one.changes_text or result.text is text
                again = run(one, result.text, score=len(text) / 100)
                changed_by = f"{type(one).__name__} of {text!r}"
                assert isinstance(again, Removed) or again.text == result.text, changed_by
                assert one.changes_text or again == result, changed_by

    check()
    for number, (_, maker) in enumerate(steps):  # a step that has seen nothing else, in the reverse order
        fresh = maker()
        for text, result in reversed(first[number][-100:]):
            assert run(fresh, text, score=len(text) / 100) == result


def test_every_section_has_a_step() -> None:
    assert set(STEPS) == {*SECTIONS.values(), *QUALITY_RULES.values()}


def test_the_identity_changes_with_settings_and_files_and_not_with_only(tmp_path: Path) -> None:
    def of(name: str, **keys: object) -> object:
        found = section(name, **keys)
        return identity(found, step(name, **keys))

    assert of("gopher_quality") == of("gopher_quality", only=["web"])
    assert of("gopher_quality") != of("gopher_quality", min_words=51)
    assert of("gopher_quality") != of("gopher_repetition")
    assert pickle.loads(pickle.dumps(of("language", keep=["en"])))["depends_on"]["py3langid"]  # type: ignore[index]
    keys = {"files": [str(tmp_path / "eval.txt")], "min_item_words": 2}
    (tmp_path / "eval.txt").write_text("one two three")
    before = of("contamination", **keys)
    (tmp_path / "eval.txt").write_text("one two four")
    assert of("contamination", **keys) != before


def test_a_score_between_the_limits_stays() -> None:
    one = step("score", column="edu", min=3, max=4.5)
    assert [isinstance(run(one, "text", edu=value), Kept) for value in (2.99, 3, 4.5, 4.51)] == [
        False,
        True,
        True,
        False,
    ]
    assert run(one, "text", edu=2) == Removed("score.min", 2.0, 3)
    assert run(one, "text", edu=5) == Removed("score.max", 5.0, 4.5)


@pytest.mark.parametrize("columns", [{}, {"edu": "3.5"}, {"edu": None}, {"edu": True}, {"edu": float("nan")}])
def test_a_score_that_is_not_there_or_no_number_is_an_error_with_its_place(columns: dict[str, object]) -> None:
    with pytest.raises(DocumentError, match=r"column.* edu") as error:
        run(step("score", column="edu", min=3), "text", **columns)
    assert (error.value.place, error.value.exit_code) == ("web.jsonl:7", 2)
    assert "3.5" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("score", {"column": "edu"}, "min"),
        ("score", {"column": "edu", "min": 2, "max": 1}, "min"),
        ("gopher_quality", {"min_words": 10, "max_words": 9}, "min_words"),
        ("gopher_quality", {"min_stop_words": 9}, "min_stop_words"),
        ("contamination", {"files": ["a.txt"], "action": "drop", "margin": 1}, "margin"),
        ("contamination", {"files": ["a.txt"], "min_matching_share": 0.5}, "min_matching_share"),
        ("contamination", {"files": ["a.txt"], "ngram": 5}, "min_item_words"),
        ("c4", {"min_paragraph_length": 100}, "min_paragraph_length"),
        ("language", {"keep": ["xx"]}, "keep"),
    ],
)
def test_settings_that_contradict_each_other_are_named(name: str, keys: dict[str, object], key: str) -> None:
    assert [found for found, _ in section(name, **keys).inconsistencies()] == [key]


def test_a_list_of_steps_is_checked_as_a_whole() -> None:
    steps = [section("identifiers", only=["wbe"]), section("duplicates", near=False), section("score", column="edu")]
    found = dict(preparation_inconsistencies(steps, ["web", "code"]))
    assert found["0.only"] == "wbe is no source. Did you mean web? Sources: code, web."
    assert "2.min" in found


@pytest.mark.parametrize(
    "given", [{"step": "quality"}, {"step": "quality", "rules": "c5"}, {"rules": "c4"}, {}, "c4", 1]
)
def test_a_step_without_a_known_name_is_told_the_names(given: object) -> None:
    with pytest.raises(ValidationError, match=r"must have `step`: normalization, .* or fineweb"):
        TypeAdapter(AnyStep).validate_python(given)
