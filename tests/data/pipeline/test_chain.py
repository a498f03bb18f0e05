"""The steps of a source, task by task: against a plain loop, and what is done again after a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.data.pipeline.chain import chain_of
from scaletrain_cli.data.pipeline.tasks import Source, tasks_of
from scaletrain_cli.data.sources.records import Columns, SourceFile
from scaletrain_cli.spec.preparation import (
    GopherQualitySpec,
    IdentifiersSpec,
    NormalizationSpec,
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


def test_a_task_that_is_left_half_way_writes_no_decision(tmp_path: Path) -> None:
    given = source(tmp_path)
    chain = chain_of(tmp_path / "steps", given, STEPS, skips_bad=False)
    (task,) = tasks_of(given)
    documents = chain.documents(task)
    next(documents)
    documents.close()
    assert not (tmp_path / "steps").exists()


def test_steps_of_other_sources_change_nothing(tmp_path: Path) -> None:
    given = source(tmp_path)
    other = SCORE.model_copy(update={"only": ("web",)})
    keys = [step.key for step in chain_of(tmp_path, given, (NORMALIZE, LENGTH), skips_bad=False).steps]
    assert [step.key for step in chain_of(tmp_path, given, (NORMALIZE, other, LENGTH), skips_bad=False).steps] == keys
