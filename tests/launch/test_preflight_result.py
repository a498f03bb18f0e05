"""The summary of a job before it is submitted: cost per hour, remaining steps, warnings; the folder of a node test."""

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest

from scaletrain_cli.errors import MissingPackageError, SchedulerError
from scaletrain_cli.launch import short_jobs
from scaletrain_cli.launch.backends import base
from scaletrain_cli.launch.backends.base import PreflightResult, Start, SubmissionSummary, require_engine_packages
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.plan.result import Cost
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import UnreadableError
from tests.launch.conftest import make_plan, make_spec

SPEC = make_spec()  # 20 steps on 2 ranks
PRICED = dataclasses.replace(make_plan(SPEC), cost=Cost(3.0, recorded("a list"), 100.0, None, 120.0))
START = Start(None, recorded("no estimate"))


@pytest.mark.parametrize(("step", "left", "usd"), [(0, 20, 120.0), (15, 5, 30.0), (20, 0, 0.0), (99, 0, 0.0)])
def test_the_expected_cost_is_that_of_the_remaining_steps(step: int, left: int, usd: float) -> None:
    summary = SubmissionSummary(SPEC, PRICED, START, step)
    assert (summary.steps_left, summary.expected_usd, summary.usd_per_hour) == (left, usd, 6.0)


def test_a_text_of_a_back_end_becomes_a_reason_without_a_code() -> None:
    start = Start(None, "a slot is free")  # type: ignore[arg-type]
    result = PreflightResult(start, ("the queue is old", Reason("launch.queued")))  # type: ignore[arg-type]
    assert (start.why, start.reason.code) == ("a slot is free", "recorded.text")
    assert [warning.code for warning in result.warnings] == ["recorded.text", "launch.queued"]


def test_packages_of_the_engine_are_required_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="torch, deepspeed, tokenizers not installed here"):
        require_engine_packages(SPEC)
    require_engine_packages(make_spec("code.engine=my_trainer"))


def test_the_cost_is_null_without_a_price() -> None:
    summary = SubmissionSummary(SPEC, make_plan(SPEC), START)
    assert summary.to_json() == {
        "start": {"at": None, "why": "no estimate", "reason": START.reason.to_document()},
        "cost": {"expected_usd": None, "usd_per_hour": None, "steps": 20},
        "notes": [],
        "note_reasons": [],
    }


def test_a_note_is_text_with_its_code_and_parameters_beside_it() -> None:
    low = Reason("launch.runs-root-local", {"folder": "/home/a", "file_system": "ext4"})
    found = SubmissionSummary(SPEC, PRICED, START, warnings=(low,)).to_json()
    (note,) = found["notes"]
    assert note.startswith("the runs root /home/a is on ext4, which other nodes see only if")
    assert note.endswith("or test the nodes with --probe.")
    assert found["note_reasons"] == [{"code": "launch.runs-root-local", "params": low.params}]


@pytest.mark.parametrize(
    ("end", "is_kept"),
    [
        (UnreadableError("run.json cannot be read."), True),
        (SchedulerError("no answer"), True),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_node_test_whose_end_is_not_known_keeps_its_run_directory(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """Ctrl-C has cancelled the job."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path))
    monkeypatch.setattr(LocalBackend, "submit", lambda self, run, record: "7")
    monkeypatch.setattr(short_jobs, "wait_for_end", Mock(side_effect=end))
    with pytest.raises(type(end)):
        short_jobs.run_preflight(SPEC, make_plan(SPEC), LocalBackend(), 0.0, lambda status: None)
    assert len([*tmp_path.glob(".preflight-*/preflight-*/run.json")]) == is_kept
    assert len([*tmp_path.iterdir()]) == is_kept
