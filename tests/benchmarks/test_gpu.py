"""`make gpu`: the trial on the CPU measures every piece, and what is known of a GPU is there before one is."""

import math
import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from engine_loops.gpu_table import recipe_of
from gpu.__main__ import PIECES
from gpu.piece import verdict
from gpu.results import Results, Row, page
from gpu.training import STEPS, VARIANTS
from gpu.wheels import requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scaletrain_cli.spec import load_spec

PROJECT = Path(__file__).parents[2]
# With torch on the machine; tokenizers and Liger ask for packages that are not imported in a run without them.
THERE = {"torch", "numpy", "triton", "typing-extensions", "huggingface-hub", "ruamel-yaml-clib"}


@pytest.mark.long
@pytest.mark.process
def test_a_trial_measures_every_piece(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(PROJECT / "benchmarks"), str(PROJECT)])
    command = [sys.executable, "-m", "gpu", "--tiny", "--out", str(tmp_path), "--commit", "trial"]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Results(tmp_path).of("trial", "cpu")
    assert list(rows) == [(piece.name, name) for piece in PIECES.values() for name in piece.tiny]
    assert all(row.ok for row in rows.values())

    assert rows["machine", "machine"].facts["ceiling"] > 1e9
    second = rows["steps", "8B"].lines[0]
    planned, calibrated, measured = (float(second[STEPS.columns.index("step ms: plan") + i]) for i in range(3))
    assert measured == pytest.approx(rows["steps", "8B"].facts["seconds"] * 1e3, rel=0.01)
    assert calibrated != planned
    assert rows["parity", "fp32"].facts["loss"] <= 1e-5
    assert "GPU" in rows["parity", "fp8"].lines[0][1]
    assert math.isfinite(rows["saves", "0.2B"].facts["beyond_copy_seconds"])
    by_cause = {line[1]: float(line[3]) for line in rows["causes", "1B"].lines if not line[1].startswith("`")}
    assert sum(by_cause.values()) - by_cause["step"] == pytest.approx(by_cause["step"], rel=0.05)
    assert rows["survival", "0.2B"].lines[0][-1] == "met: to the bit"

    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "no row of this page is from a GPU" in text
    assert all(f"## {piece.title}" in text for piece in PIECES.values())


def a_row(piece: str, name: str, commit: str, **fields: Any) -> Row:
    found: dict[str, Any] = {"device": "cpu", "seconds": 1.0, "ended": 0.0, "ok": True, "lines": [[name]], "facts": {}}
    return Row(piece, name, commit, **(found | fields))


def test_rows_survive_a_cut_off_run_and_the_latest_of_a_commit_counts(tmp_path: Path) -> None:
    first = Results(tmp_path)
    for row in (
        a_row("steps", "1B", "a", lines=[["old"]]),
        a_row("steps", "1B", "b"),
        a_row("steps", "1B", "a", lines=[["new"]]),
        a_row("steps", "8B", "a", device="h200-sxm-141gb"),
    ):
        first.add(row)
    found = Results(tmp_path).of("a", "cpu")
    assert {key: row.lines for key, row in found.items()} == {("steps", "1B"): [["new"]]}
    text = page(PIECES.values(), found, "make gpu", on_gpu=True)
    assert "| new |" in text
    assert text.count("## ") == 1


def test_the_kept_page_says_that_nothing_is_measured_or_has_what_is() -> None:
    kept = (PROJECT / "benchmarks" / "results" / "gpu.md").read_text(encoding="utf-8")
    without_rows = page(PIECES.values(), {}, "make gpu", on_gpu=False)
    measured = [piece.title for piece in PIECES.values() if f"## {piece.title}" in kept]
    assert kept == without_rows if not measured else kept.splitlines()[0] == without_rows.splitlines()[0]


def test_a_verdict_names_what_is_missed() -> None:
    assert verdict(MFU=True, time=None, memory=False) == "missed: memory"
    assert verdict(MFU=True, memory=True) == "met: MFU, memory"
    assert verdict(MFU=None) == "-"


@pytest.mark.parametrize("piece", [STEPS, VARIANTS], ids=lambda piece: piece.name)
def test_every_row_is_a_valid_spec_of_a_gpu(piece: Any, tmp_path: Path) -> None:
    for name, row in piece.rows.items():
        recipe = recipe_of(row.keywords["model"], "h200-sxm-141gb", tmp_path)
        spec = load_spec(recipe, row.keywords["settings"])
        assert spec.transformer.seq_len == 4096, name
        assert spec.cluster.gpu == "h200-sxm-141gb"


def test_the_pieces_fit_into_their_time() -> None:
    assert all(piece.row_seconds <= piece.seconds for piece in PIECES.values())
    first = [PIECES[name] for name in ("machine", "steps", "parity", "saves", "causes")]
    assert sum(piece.seconds for piece in first) <= 25 * 60


def test_the_wheels_are_all_that_the_listed_packages_need() -> None:
    listed = {canonicalize_name(Requirement(line).name) for line in requirements()}
    needed = {
        (name, canonicalize_name(wanted.name))
        for name in listed - {"liger-kernel"}
        for wanted in map(Requirement, requires(name) or ())
        if wanted.marker is None or wanted.marker.evaluate({"extra": "", "python_version": "3.12"})
    }
    assert {pair for pair in needed if pair[1] not in listed | THERE} == set()
