"""The report of prepared data, against documents planted for each rule and plain counts of what is left."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from scaletrain_cli.data.pipeline.decisions import shortened
from scaletrain_cli.data.pipeline.prepare import Preparation, prepare
from scaletrain_cli.data.pipeline.shards import length_range, length_range_end
from scaletrain_cli.data.pipeline.tasks import Source
from scaletrain_cli.data.report import read_report
from scaletrain_cli.data.sources.records import Columns, SourceFile
from scaletrain_cli.spec.preparation import (
    C4Spec,
    ContaminationSpec,
    DuplicatesSpec,
    FineWebSpec,
    GopherQualitySpec,
    GopherRepetitionSpec,
    IdentifiersSpec,
    LanguageSpec,
    NormalizationSpec,
    PreparationStep,
    ScoreSpec,
)
from scaletrain_cli.ui.data_page import page
from scaletrain_cli.ui.data_report import show_report

# Words that no language model takes for another language, and that make sentences unlike each other.
WORDS = (
    "the of and that have with water mountain house window morning evening teacher student garden winter summer people "
    "because though through between another nothing everything carefully quickly thought brought mother father brother "
    "history science reading writing number letter question answer village country weather kitchen bridge forest river"
).split()
MAIL, KEY = "jane.doe@example.com", "ghp_" + "a1B2" * 9
DRAW = random.Random(5)


def prose(lines: int = 8) -> str:
    """Return lines of English words, each a sentence."""
    sentences = (" ".join(DRAW.choices(WORDS, k=12)).capitalize() for _ in range(lines))
    return "\n".join(f"{sentence}." for sentence in sentences)


QUIZ = " ".join(DRAW.choices(WORDS, k=20))
GERMAN = "Der schnelle Fuchs springt über den faulen Hund, und die Katze schläft dabei ruhig auf dem warmen Ofen. "
KEPT = [prose() for _ in range(40)]
PLANTED: dict[str, list[str]] = {
    "language.keep": [GERMAN * 4 + str(n) for n in range(3)],
    "gopher_quality.min_words": [f"Write to {MAIL} about the house and the {word}." for word in WORDS[:5]],
    "gopher_quality.max_hashes_per_word": [prose() + " #" * 40 + f" {KEY}" for _ in range(3)],
    "gopher_repetition.max_duplicate_lines": [f"The house of {prose(1)}\n" * 9 for _ in range(4)],
    "c4.document_phrases": [prose() + "\nLorem ipsum." for _ in range(2)],
    "fineweb.max_short_lines": ["\n".join(f"The {word} of it." for word in DRAW.sample(WORDS, 30)) for _ in range(2)],
    "duplicates.exact": [KEPT[0], KEPT[1], KEPT[1]],
    "duplicates.near": [f"{text}\nAnd {word} too." for text, word in zip(KEPT[2:5], WORDS, strict=False)],
    "contamination.ngram": [prose(4) + f"\nHe said {QUIZ}.\n" + prose(4)],
    "score.min": [prose() for _ in range(6)],
}
OWN = prose()  # the only text of ``web`` that is left
BAD = {
    "sources.not-json": ['{"text": "cut', "no JSON"],
    "sources.no-field": ['{"body": "x"}'],
    "sources.empty": ['{"text": " "}'],
}


def steps(folder: Path) -> tuple[PreparationStep, ...]:
    (folder / "quiz.jsonl").write_text(json.dumps({"text": QUIZ}) + "\n", encoding="utf-8")
    return (
        NormalizationSpec(step="normalization"),
        LanguageSpec(step="language", keep=("en",), min_probability=0.0),
        GopherQualitySpec(step="quality", rules="gopher_quality"),
        GopherRepetitionSpec(step="quality", rules="gopher_repetition", max_top_2gram=None, max_top_3gram=None),
        C4Spec(step="quality", rules="c4", min_sentences=None),
        FineWebSpec(step="quality", rules="fineweb", max_newlines_per_word=None),
        ScoreSpec(step="score", column="score", min=2),
        DuplicatesSpec(step="duplicates", similarity=0.7),
        ContaminationSpec(step="contamination", action="drop", files=(str(folder / "quiz.jsonl"),)),
        IdentifiersSpec(step="identifiers"),
    )


def read(rule: str, text: str) -> str:
    return json.dumps({"text": text, "score": 1 if rule == "score.min" else 3})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Tokenizer, Path]:
    """Return the reports of two sources, the tokenizer and the folder; ``books`` has all planted texts but copies."""
    folder = tmp_path_factory.mktemp("report")
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = trainers.WordLevelTrainer(special_tokens=["<|endoftext|>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(KEPT[:2], words)
    copies = [rule for rule in PLANTED if rule.startswith("duplicates")]
    lines = {
        "books": [read("", text) for text in KEPT]
        + [read(rule, text) for rule, texts in PLANTED.items() if rule not in copies for text in texts]
        + [line for broken in BAD.values() for line in broken],
        "web": [*(read(rule, text) for rule in copies for text in PLANTED[rule]), read("", OWN)],
    }
    sources = []
    for name, rows in lines.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        file = SourceFile(str(path), path.stat().st_size, "jsonl")
        sources.append(Source(name, (file,), name, Columns("text", ("score",))))
    given = Preparation(tuple(sources), steps(folder), tokenizer.to_str(), 0.2, skips_bad=True, task_bytes=20_000)
    done = prepare(given, folder / "data", 1, lambda *_: None)
    books, web = (json.loads((done[name] / "report.json").read_text(encoding="utf-8")) for name in ("books", "web"))
    return books, web, tokenizer, folder


def test_each_rule_has_the_documents_that_were_planted_for_it(prepared: Any) -> None:
    books, web, _, folder = prepared
    removed = {rule["rule"]: rule for report in (books, web) for step in report["steps"] for rule in step["removed"]}
    assert {rule: each["documents"] for rule, each in removed.items()} == {
        rule: len(texts) for rule, texts in PLANTED.items()
    }
    lines = (folder / "books.jsonl").read_text(encoding="utf-8").splitlines()
    for rule, texts in PLANTED.items():
        assert sum(removed[rule]["measured"].values()) == len(texts)
        if not rule.startswith("duplicates"):
            for example in removed[rule]["examples"]:
                path, _, line = example["place"].rpartition(":")
                assert path == str(folder / "books.jsonl")
                assert json.loads(lines[int(line) - 1])["text"] in texts
    assert removed["gopher_quality.min_words"]["measured"] == {"9": 5}
    assert removed["language.keep"]["measured"] == {"de": 3}
    assert removed["score.min"]["characters"] == sum(map(len, PLANTED["score.min"]))
    assert [each["text"] for each in removed["duplicates.exact"]["examples"]] == [
        shortened(text) for text in PLANTED["duplicates.exact"]
    ]


def test_documents_and_characters_go_from_step_to_step_and_end_in_the_tokens(prepared: Any) -> None:
    for report, name in zip(prepared[:2], ("books", "web"), strict=True):
        for step in report["steps"]:
            gone = sum(each["documents"] for kind in ("removed", "bad") for each in step[kind])
            assert step["documents"] - gone == step["documents_left"]
        for step, following in zip(report["steps"], report["steps"][1:], strict=False):
            assert (step["documents_left"], step["characters_left"]) == (
                following["documents"],
                following["characters"],
            )
        assert report["steps"][-1]["documents_left"] == sum(report["documents"].values())
        assert report["source"] == name
    assert prepared[0]["languages"] == {"kept": {"en": prepared[0]["steps"][2]["documents_left"]}, "removed": {"de": 3}}


def test_lengths_characters_and_unknown_tokens_are_those_of_the_documents_that_are_left(prepared: Any) -> None:
    books, web, tokenizer, _ = prepared
    assert sum(web["documents"].values()) == 1
    ids = [tokenizer.encode(text).ids for text in KEPT]
    ranges = books["lengths"]["ranges"]
    assert [each["from"] for each in ranges[1:]] == [each["to"] + 1 for each in ranges[:-1]]
    assert {each["from"]: (each["documents"], each["tokens"]) for each in ranges if each["documents"]} == {
        least: (count, sum(len(each) for each in ids if length_range(len(each)) == least))
        for least, count in Counter(length_range(len(each)) for each in ids).items()
    }
    assert (books["lengths"]["shortest"], books["lengths"]["longest"]) == (min(map(len, ids)), max(map(len, ids)))
    assert books["unknown_tokens"] == sum(each.count(tokenizer.token_to_id("<unk>")) for each in ids) > 0
    text = "".join(KEPT)
    assert books["bytes"] == len(text.encode())
    assert sum(books["tokens"].values()) == sum(map(len, ids)) + len(ids)
    assert books["tokens_per_byte"] == sum(books["tokens"].values()) / books["bytes"]
    assert books["characters"] == {
        "all": len(text),
        "digits": 0,
        "whitespace": sum(map(str.isspace, text)),
        "marks": text.count("."),
        "control": 0,
        "non_ascii": 0,
        "replacement": 0,
    }


def test_bad_documents_have_their_reason_and_line(prepared: Any) -> None:
    books, _, _, folder = prepared
    first = len((folder / "books.jsonl").read_text(encoding="utf-8").splitlines()) - sum(map(len, BAD.values())) + 1
    bad = {each["reason"]: each for each in books["steps"][0]["bad"]}
    assert {reason: each["documents"] for reason, each in bad.items()} == {
        reason: len(lines) for reason, lines in BAD.items()
    }
    places = [each["place"] for reason in BAD for each in bad[reason]["places"]]
    assert places == [f"{folder}/books.jsonl:{first + number}" for number in range(4)]


def test_duplicates_have_clusters_with_both_texts_and_the_expected_recall(prepared: Any) -> None:
    books, web, _, folder = prepared
    (found,) = web["duplicates"]
    assert books["duplicates"] == [found]
    assert found["clusters_by_size"] == {"2": 4, "3": 1}
    assert found["largest_clusters"][0]["documents"] == 3
    assert found["largest_clusters"][0]["kept"] == {
        "source": "books",
        "place": f"{folder}/books.jsonl:2",
        "text": shortened(KEPT[1]),
    }
    near = {(each["first"]["text"], each["second"]["text"]) for each in found["examples"] if each["similarity"] < 1}
    assert near == {
        (shortened(first), shortened(second))
        for first, second in zip(KEPT[2:5], PLANTED["duplicates.near"], strict=True)
    }
    assert found["expected_recall"]["0.80"] == pytest.approx(0.975, abs=1e-3)


def test_the_page_is_well_formed_without_outside_references_and_shows_texts_as_text(prepared: Any) -> None:
    folder = prepared[3]
    datasets = {report["source"]: _dataset(folder, report["source"]) for report in prepared[:2]}
    report = read_report(datasets)
    first = report["sources"][0]
    first["steps"][2]["removed"][0]["examples"][0]["text"] = "<script>alert('&')</script>\x1b]0;"
    text = page(report, "a <spec>")
    root = ElementTree.fromstring(text)  # raises if a tag is not closed or a text not escaped
    assert {each.tag for each in root.iter()}.isdisjoint({"script", "link", "img", "iframe", "a", "object"})
    named = {name for each in root.iter() for name in each.attrib}
    assert named.isdisjoint({"src", "href", "srcset", "onclick", "action"})
    assert not re.search(r"url\(|@import|https?:", text)
    written = "".join(root.itertext())
    assert "<script>alert('&')</script>\\x1b]0;" in written
    rules = [rule for source in report["sources"] for step in source["steps"] for rule in step["removed"]]
    assert all(rule["rule"] in written for rule in rules)
    assert all(each["place"] in written for rule in rules for each in rule["examples"])
    assert MAIL not in written


def test_the_screen_has_each_step_and_the_most_frequent_rules(
    prepared: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    books = prepared[0]
    show_report(read_report({"books": _dataset(prepared[3], "books")}))
    shown = capsys.readouterr().out
    for step in books["steps"]:
        assert f"{step['name']} " in shown
    assert re.search(r"gopher_quality\.min_words +5 +\S+ % +50 +9\n", shown)
    assert "languages: en" in shown
    assert re.search(r"sources\.not-json +2 ", shown)
    assert f"books.jsonl:{len(_lines(prepared[3])) - 3}" in shown.replace("\n", "").replace(" ", "")
    assert "4 clusters" not in shown
    assert "in 5 clusters of up to 3 documents" in shown
    assert max(map(len, shown.splitlines())) <= 200


def _lines(folder: Path) -> list[str]:
    return (folder / "books.jsonl").read_text(encoding="utf-8").splitlines()


def _dataset(folder: Path, source: str) -> Path:
    found = (folder / "data").glob("*/dataset.json")
    return next(path.parent for path in found if json.loads(path.read_text())["source"] == source)


def test_no_mail_address_and_no_key_is_in_what_is_written(prepared: Any) -> None:
    folder = prepared[3]
    written = [path for path in (folder / "data").rglob("*.json") if path.is_file()]
    assert sum(path.name == "report.json" for path in written) == 3
    texts = [path.read_text(encoding="utf-8") for path in written]
    assert not any(MAIL in text or KEY in text for text in texts)
    assert any("<EMAIL>" in text for text in texts)


@pytest.mark.parametrize("before", [0, 250, 299, (1 << 16) - 20])
def test_an_identifier_at_the_end_of_an_example_is_never_shown_in_part(before: int) -> None:
    for secret in (MAIL, KEY, f"eyJ{'a' * 3000}.eyJ{'b' * 16000}.{'c' * 4000}"):
        text = "word " * (before // 5) + secret + " and more" * 9000
        assert secret[:8] not in shortened(text)


def test_ranges_of_lengths_follow_each_other() -> None:
    starts = sorted({length_range(count) for count in range(5000)})
    assert [length_range_end(start) + 1 for start in starts[:-1]] == starts[1:]
    assert all(length_range(length_range_end(start)) == start for start in starts)
