"""The steps of a source, task by task: against a plain loop, and what is done again after a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from scaletrain_cli.data.pipeline.chain import Chain, chain_of
from scaletrain_cli.data.pipeline.decisions import read_decisions
from scaletrain_cli.data.pipeline.report import place_of
from scaletrain_cli.data.pipeline.tasks import Source, tasks_of
from scaletrain_cli.data.sources.records import Columns, SourceFile
from scaletrain_cli.data.steps import step_of
from scaletrain_cli.data.steps.base import Document, Removed
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec.preparation import (
    GopherQualitySpec,
    IdentifiersSpec,
    NormalizationSpec,
    PreparationStep,
    ScoreSpec,
)

NORMALIZE = NormalizationSpec(step="normalization")
SCORE = ScoreSpec(step="score", column="score", min=2)
LENGTH = GopherQualitySpec(step="quality", rules="gopher_quality", min_words=5, min_stop_words=0)
IDENTIFIERS = IdentifiersSpec(step="identifiers")
STEPS = (NORMALIZE, SCORE, LENGTH, IDENTIFIERS)
ROWS = [
    {"text": f"Letter {n}\r\n" + "of some words " * (n % 7) + f"by writer{n}@example.org.", "score": n % 5}
    for n in range(200)
]


def source(folder: Path, rows: Sequence[object] = ROWS) -> Source:
    files = []
    for number in range(4):
        path = folder / f"{number}.jsonl"
        own = rows[number::4]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in own), encoding="utf-8")
        files.append(SourceFile(str(path), path.stat().st_size, "jsonl"))
    return Source("letters", tuple(files), "content", Columns("text", ("score",)))


def left(chain: Chain, given: Source, task_bytes: int) -> list[str]:
    return [text for task in tasks_of(given, task_bytes) for _, text in chain.documents(task)]


def plainly(rows: Sequence[dict[str, object]], sections: Sequence[PreparationStep]) -> list[str]:
    steps = [step_of(section) for section in sections]
    found = []
    for number in range(4):
        for row in rows[number::4]:
            document = Document(str(row["text"]), "letters", "", {"score": row["score"]})
            for step in steps:
                result = step(document)
                if isinstance(result, Removed):
                    break
                document = document._replace(text=result.text)
            else:
                found.append(document.text)
    return found


@pytest.mark.parametrize("task_bytes", [1 << 20, 700])
def test_documents_that_are_left_are_those_of_a_plain_loop_now_and_from_the_decisions(
    task_bytes: int, tmp_path: Path
) -> None:
    given = source(tmp_path)
    chain = chain_of(tmp_path / "steps", given, STEPS, skips_bad=False)
    expected = plainly(ROWS, STEPS)
    assert 0 < len(expected) < len(ROWS)
    assert "<EMAIL>" in expected[0]
    assert left(chain, given, task_bytes) == expected
    written = [chain.decisions(step, task) for task in tasks_of(given, task_bytes) for step in range(len(chain.steps))]
    assert all(path.is_file() for path in written)
    assert left(chain, given, task_bytes) == expected


def test_a_changed_step_redoes_itself_and_the_later_ones_only(tmp_path: Path) -> None:
    given = source(tmp_path)
    before = chain_of(tmp_path / "steps", given, STEPS, skips_bad=False)
    left(before, given, 1 << 20)
    shorter = LENGTH.model_copy(update={"min_words": 3})
    after = chain_of(tmp_path / "steps", given, (NORMALIZE, SCORE, shorter, IDENTIFIERS), skips_bad=False)
    assert [a.key == b.key for a, b in zip(before.steps, after.steps, strict=True)] == [True, True, True, False, False]
    (task,) = tasks_of(given)
    kept = [after.decisions(step, task).stat().st_ino for step in range(3)]
    assert not after.decisions(3, task).exists()
    assert left(after, given, 1 << 20) == plainly(ROWS, (NORMALIZE, SCORE, shorter, IDENTIFIERS))
    assert [after.decisions(step, task).stat().st_ino for step in range(3)] == kept


def test_a_task_that_is_left_half_way_writes_no_decision(tmp_path: Path) -> None:
    given = source(tmp_path)
    chain = chain_of(tmp_path / "steps", given, STEPS, skips_bad=False)
    (task,) = tasks_of(given)
    documents = chain.documents(task)
    next(documents)
    documents.close()
    assert not (tmp_path / "steps").exists()


def test_decisions_count_documents_and_give_examples_with_their_line(tmp_path: Path) -> None:
    given = source(tmp_path)
    chain = chain_of(tmp_path / "steps", given, STEPS, skips_bad=False)
    left(chain, given, 1 << 20)
    (task,) = tasks_of(given)
    found = [read_decisions(chain.decisions(step, task)) for step in range(len(chain.steps))]
    assert all(found)
    for step, following in pairwise(found):
        assert step is not None
        assert following is not None
        assert step.documents_left == following.documents
        assert step.documents_left == step.documents - len(step.removed_numbers)
    score = found[2]
    assert score is not None
    assert score.documents == 200
    assert score.documents_left == sum(int(str(row["score"])) >= 2 for row in ROWS)
    assert {place_of(task, example) for example in score.examples} == {
        f"{tmp_path}/0.jsonl:{line}" for line in (1, 5, 6)
    }
    assert found[4] is not None
    assert found[4].counts["identifiers.email"] == found[4].documents


@pytest.mark.parametrize("skips_bad", [False, True])
def test_a_bad_document_is_named_or_skipped(skips_bad: bool, tmp_path: Path) -> None:
    rows: list[object] = [*ROWS]
    rows[8] = {"score": 3}
    rows[9] = {"text": "A row without a score.", "score": None}
    given = source(tmp_path, rows)
    chain = chain_of(tmp_path / "steps", given, STEPS, skips_bad=skips_bad)
    if not skips_bad:
        with pytest.raises(UsageError, match=r"0\.jsonl:3"):
            left(chain, given, 1 << 20)
        assert not (tmp_path / "steps").exists()
        return
    good = [row for number, row in enumerate(ROWS) if number not in (8, 9)]
    assert sorted(left(chain, given, 1 << 20)) == sorted(plainly(good, STEPS))
    (task,) = tasks_of(given)
    reading, scored = read_decisions(chain.decisions(0, task)), read_decisions(chain.decisions(2, task))
    assert reading is not None
    assert [place_of(task, each) for each in reading.bad] == [f"{tmp_path}/0.jsonl:3"]
    assert list(reading.removed) == ["sources.no-field"]
    assert reading.documents - reading.documents_left == 1
    assert scored is not None
    assert [place_of(task, each) for each in scored.bad] == [f"{tmp_path}/1.jsonl:3"]


def test_steps_of_other_sources_change_nothing(tmp_path: Path) -> None:
    given = source(tmp_path)
    other = SCORE.model_copy(update={"only": ("web",)})
    keys = [step.key for step in chain_of(tmp_path, given, (NORMALIZE, LENGTH), skips_bad=False).steps]
    assert [step.key for step in chain_of(tmp_path, given, (NORMALIZE, other, LENGTH), skips_bad=False).steps] == keys
