"""rehearse before and after its job: options, the spec of the job, the document, the verdicts and the screen."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.diagnosis.findings import Cause, Change
from scaletrain_cli.diagnosis.rehearsal import (
    ITEMS,
    LOG_PREFIX,
    Item,
    Options,
    Rehearsal,
    read_rehearsal,
    rehearsal_from,
    write_rehearsal,
)
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.launch.short_jobs import RehearsalResult, chosen_items, fewest_nodes, rehearsal_spec, result_of
from scaletrain_cli.plan import make_plan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import write_spec_lines
from scaletrain_cli.spec import load_spec
from scaletrain_cli.ui.short_jobs import curve_text, draw, show_rehearsal
from tests.cli.command_line import PROJECT, SMALL, scaletrain

RATES = [1e-5 * 10 ** (place / 8) for place in range(33)]
SMOOTH = [8.3 - 2.0 / (1 + (2e-3 / rate) ** 2) + (3.0 if rate > 0.05 else 0.0) for rate in RATES]
CURVE = Item(
    "learning-rate",
    "failed",
    Reason("rehearsal.rate-diverges", {"lr": 0.6, "steps": 10, "suggestion": 2e-3, "best_loss": 6.3}),
    {
        "rates": RATES,
        "losses": SMOOTH,
        "smoothed": SMOOTH,
        "lr": 0.6,
        "suggestion": 2e-3,
        "diverges": 0.056,
        "bracket": [1e-3, 4e-3],
        "forks": [{"rate": 1e-3, "loss": 6.5}, {"rate": 2e-3, "loss": 6.3}, {"rate": 6e-3, "loss": None}],
        "fork_steps": 10,
    },
    (
        Cause(
            Reason("diagnosis.cause-rate-too-high", {"lr": 0.6}), Change("training.optimizer.lr", "run.json", 0.6, 2e-3)
        ),
    ),
    12.5,
)
FOUND = Rehearsal("r", 1.0, (Item("labels", "passed", Reason("rehearsal.loaded-weights")), CURVE), {"step": {}})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--items", "labls"], "unknown item: labls. Did you mean labels?"),
        (["--items", "labels", "--skip", "labels"], "no item is left to rehearse"),
        (["--budget", "soon"], "--budget soon: must be a duration"),
        (["--plot", "curve.txt"], "--plot curve.txt: the name must end in .png, .svg or .pdf"),
        (["--plot", "no/such/curve.svg"], "--plot no/such/curve.svg: there is no folder no/such"),
        (["--set", "code.engine=mine.train"], "rehearsals run the built-in engine only"),
    ],
    ids=str,
)
def test_a_wrong_option_is_rejected_before_anything_starts(arguments: list[str], expected: str) -> None:
    assert expected in " ".join(scaletrain("rehearse", SMALL, *arguments, code=ExitCode.USAGE).err.split())


def test_items_are_done_in_their_order() -> None:
    assert chosen_items([], []) == tuple(ITEMS)
    assert chosen_items(["overfit", "labels"], []) == ("labels", "overfit")
    assert "preemption" not in chosen_items([], ["preemption"])
    options = Options(("labels", "restore"), 12.0)
    assert Options.from_text(options.to_text()) == options
    assert Options.from_text("") == Options()


def test_the_job_has_the_spec_of_the_run_without_evaluations_and_trackers() -> None:
    spec = load_spec(SMALL, [])
    job = rehearsal_spec(spec, Options())
    assert job.model == spec.model
    assert job.data == spec.data
    assert job.training.optimizer == spec.training.optimizer
    assert (job.evaluation.every, job.telemetry.enabled, job.notify) == (0, False, ())
    assert job.total_steps == spec.total_steps
    assert job.env["SCALETRAIN_ONLY"] == "rehearsal"


def test_a_job_on_fewer_nodes_keeps_the_layout_of_a_replica() -> None:
    spec = load_spec(PROJECT / "recipes/llama-7b-h100.yaml", [])
    nodes = fewest_nodes(spec)
    assert 1 <= nodes < spec.cluster.nodes
    whole, job = make_plan(spec).layout, rehearsal_spec(spec, Options(), nodes)
    part = make_plan(job).layout
    for name in ("tensor_parallel", "pipeline_parallel", "micro_batch_size", "gradient_accumulation_steps"):
        assert getattr(part, name) == getattr(whole, name), name
    share = nodes / spec.cluster.nodes
    assert part.global_batch_size == whole.global_batch_size * share
    assert job.total_steps == spec.total_steps


def test_a_job_on_fewer_nodes_keeps_the_blocks_of_each_stage_even_if_another_split_would_fit() -> None:
    """Fewer replicas shard less of the optimizer: a split by memory would fit, but is not the run that is rehearsed."""
    settings = ["layout.pipeline_parallel=4", "layout.tensor_parallel=2", "layout.zero_stage=1"]
    spec = load_spec(PROJECT / "recipes/llama-7b-h100.yaml", [*settings, "cluster.nodes=4"])
    whole, job = make_plan(spec).layout, rehearsal_spec(spec, Options(), 1)
    assert whole.pipeline_split == ()
    assert job.layout.pipeline_split == (8, 8, 8, 8)
    assert make_plan(job).layout.pipeline_split == (8, 8, 8, 8)


def test_the_document_is_restored_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_rehearsal(run, replace(FOUND, running="overfit", preempted_at=3))
    assert read_rehearsal(run) == replace(FOUND, running="overfit", preempted_at=3)
    assert not FOUND.passed
    newer = FOUND.with_items([Item("labels", "failed", Reason("rehearsal.no-labels"))])
    assert [item.verdict for item in newer.items] == ["failed", "failed"]
    assert rehearsal_from(newer.to_json()).items == newer.items
    (tmp_path / "rehearsal.json").write_text('{"schema": "scaletrain.rehearsal/v1"}')
    with pytest.raises(UsageError, match="is damaged"):
        read_rehearsal(run)


def ended(state: str) -> Any:
    return SimpleNamespace(state=state, reason=Reason("launch.all-ranks-finished"))


def test_the_item_in_which_the_job_ended_has_failed(tmp_path: Path) -> None:
    run, options = RunDir(tmp_path), Options(("labels", "learning-rate", "overfit", "restore"))
    write_rehearsal(run, replace(FOUND, running="overfit"))
    found, complete = result_of(run, ended("failed"), options)
    assert not complete
    assert {item.name: item.verdict for item in found.items} == {
        "labels": "passed",
        "learning-rate": "failed",
        "overfit": "failed",
        "restore": "skipped",
    }
    assert RehearsalResult(run, found, complete, 1.0).exit_code == ExitCode.INFEASIBLE


def test_a_job_that_ended_before_the_first_item_has_failed_in_it(tmp_path: Path) -> None:
    found, complete = result_of(RunDir(tmp_path), ended("failed"), Options(("labels", "overfit")))
    assert [(item.name, item.verdict) for item in found.items] == [("labels", "failed"), ("overfit", "skipped")]
    assert not complete


def test_verdicts_are_read_from_the_log_and_name_lines_of_the_spec(tmp_path: Path) -> None:
    """The run directory is that of pods whose volume the submitter cannot read."""
    import json

    logs = tmp_path / "attempts/0002/logs"
    logs.mkdir(parents=True)
    (logs / "node-00000.log").write_text(f"before\n{LOG_PREFIX}{json.dumps(FOUND.to_json())}\nafter\n")
    run = RunDir(tmp_path)
    write_spec_lines(run, load_spec(SMALL, []))
    found, complete = result_of(run, ended("finished"), Options(("labels", "learning-rate")))
    assert complete
    item = found.item("learning-rate")
    change = item.causes[0].change
    assert change.place.partition(":")[0].endswith("small.yaml")
    assert read_rehearsal(run) == found


def test_the_curve_is_shown_as_text_with_its_marks() -> None:
    *lines, marks, rates, legend = (text.plain for text in curve_text(CURVE, width=60, height=10, unicode=False))
    assert len(lines) == 8
    assert max(map(len, [*lines, marks, rates, legend])) <= 60
    assert 8 < marks.index("^") < marks.index("!")
    assert lines[-1].index("*") > marks.index("^"), "the lowest losses are right of the suggestion here"
    assert (rates.split()[0], rates.split()[-1]) == ("1e-05", "1e-01")
    assert curve_text(replace(CURVE, figures={})) == []
    flat = {**CURVE.figures, "smoothed": [8.3] * len(RATES)}
    assert curve_text(replace(CURVE, figures=flat)) == []


def test_the_screen_names_the_line_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    show_rehearsal(RehearsalResult(RunDir(Path("/runs/r")), FOUND, True, 61.0))
    shown = capsys.readouterr().out
    assert "run.json training.optimizer.lr = 0.6: try 0.002" in shown
    assert "failed: learning-rate (61 s)" in shown
    assert "\\n" not in shown


def test_the_picture_has_the_curve_and_the_trials() -> None:
    pytest.importorskip("matplotlib")
    axes = draw(CURVE).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert {"smoothed", "after 10 steps at a fixed rate", "suggested: 0.002", "diverges: 0.056"} <= set(labels)
    assert axes.get_xscale() == "log"
    assert all(math.isfinite(limit) for limit in axes.get_ylim())
