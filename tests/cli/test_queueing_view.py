"""The summary before confirmation: size, cost and start, on every scheduler."""

import dataclasses
import time

import pytest

from scaletrain_cli.launch.backends.base import Start, SubmissionSummary
from scaletrain_cli.plan.result import Cost, Sanity
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.record import CodeRecord
from scaletrain_cli.ui.plan import show_plan_summary
from scaletrain_cli.ui.submission import (
    cost_text,
    job_rows,
    show_before_resuming,
    show_before_submission,
    size_text,
    start_text,
    sweep_rows,
)
from tests.launch.conftest import make_plan, make_spec

NOW = time.mktime((2026, 11, 22, 14, 0, 0, 0, 0, -1))
HOUR = 3600.0
SLURM = ("cluster.scheduler=slurm", "cluster.gpu=h100-sxm-80gb", "cluster.nodes=4", "cluster.gpus_per_node=8")


def prospect(*overrides: str, cost: Cost | None = None, start: Start | None = None, step: int = 0) -> SubmissionSummary:
    spec = make_spec(*overrides)
    plan = make_plan(spec)
    plan = dataclasses.replace(plan, cost=cost if cost is not None else plan.cost)
    return SubmissionSummary(spec, plan, start if start is not None else Start(None, recorded("no estimate")), step)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (None, "unknown"),
        (NOW - HOUR, "now"),
        (NOW + 60, "now"),
        (NOW + 2 * HOUR, "today 16:00, in 2 h"),
        (NOW + 12 * HOUR, "tomorrow 02:00, in 12 h"),
        (NOW + 72 * HOUR, "2026-11-25 14:00, in 3 d"),
    ],
)
def test_a_start_is_shown_as_a_time_and_a_duration(at: float | None, words: str) -> None:
    assert start_text(Start(at, recorded("")), NOW) == words


def test_a_size_counts_nodes_and_devices() -> None:
    assert size_text(make_spec(*SLURM, "training.global_batch_size=32").cluster) == "4 nodes × 8 GPUs = 32"
    assert size_text(make_spec("cluster.gpus_per_node=1").cluster) == "1 node with 1 CPU process"


@pytest.mark.parametrize(
    ("nodes", "size"),
    [("1", "1 node with 8 GPUs"), ("{min: 1, max: 4}", "1 to 4 nodes × 8 GPUs, now planned on 4")],
)
def test_a_size_has_the_spare_nodes_that_the_job_holds(nodes: str, size: str) -> None:
    spec = make_spec(*SLURM, "training.global_batch_size=32", f"cluster.nodes={nodes}", "cluster.spare_nodes=1")
    assert size_text(spec.cluster) == f"{size}, and 1 spare node"


def test_cost_is_shown_for_the_remaining_steps_and_per_hour() -> None:
    cost = Cost(3.0, "list price", 100.0, None, 1200.0)
    reported = "$1,200 expected for the whole run, $6.00 per hour ($3.00 per GPU-hour: list price)"
    assert cost_text(prospect(cost=cost)) == reported
    assert cost_text(prospect(cost=cost, step=15)).startswith("$300 expected for the remaining 5 steps, ")
    never = dataclasses.replace(cost, expected_usd=None)
    assert cost_text(prospect(cost=never)).startswith("never finishes: ")
    assert cost_text(prospect(cost=Cost(None, "unknown: set a price", None, None, None))) == "unknown: set a price"


@pytest.mark.parametrize(("overrides", "usd", "shown"), [((), None, False), ((), 3.0, True), (SLURM, None, True)])
def test_a_run_on_this_machine_shows_no_cost_without_a_price(
    overrides: tuple[str, ...], usd: float | None, shown: bool
) -> None:
    size = ("training.global_batch_size=32",)
    asked = prospect(*overrides, *size, cost=Cost(usd, "list price", None, None, None))
    assert ("Cost" in [label for label, _ in job_rows(asked)]) == shown


def test_a_resume_shows_job_cost_start_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("cluster.slurm.partition=gpu", "cluster.slurm.qos=high", "cluster.slurm.time=24h")
    one = prospect(*SLURM, "training.global_batch_size=32", *asked, start=Start(None, recorded("sbatch gave no time")))
    show_before_resuming(one, ["-#SBATCH --nodes=2", "+#SBATCH --nodes=4"])
    shown = [" ".join(row.split()) for row in capsys.readouterr().err.splitlines()]
    assert shown[0] == "Job 4 nodes × 8 GPUs = 32 on Slurm, partition gpu, QOS high, requeued after 24 h"
    assert shown[1] == "submitted as a batch script for sbatch; --dry-run prints it"
    assert "Start unknown: sbatch gave no time" in shown
    assert shown[-3:] == ["Changed differences from the last submission:", "-#SBATCH --nodes=2", "+#SBATCH --nodes=4"]


def test_the_submitted_code_is_shown_by_hash_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    code = CodeRecord("0123456789abcdef", 2, "f" * 64, 41, 123_456)
    show_before_submission(dataclasses.replace(prospect(), code=code), "mine")
    shown = capsys.readouterr().err
    assert "Code" in shown
    assert "ffffffffffff (commit 0123456789 and 2 uncommitted, 41 files, 123,456 bytes)" in shown


@pytest.mark.parametrize("shown_before", ["train", "submit"])
def test_what_is_unusual_in_a_recipe_is_shown_before_it_is_paid_for(
    shown_before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    high = Sanity("learning rate", "0.01", "warning", recorded("the recipe scales to 0.001"))
    one = prospect()
    one = dataclasses.replace(one, plan=dataclasses.replace(one.plan, sanity=(high,)))
    show_plan_summary(one.spec, one.plan) if shown_before == "train" else show_before_submission(one, None)
    shown = capsys.readouterr().err
    assert "learning rate 0.01: the recipe scales to 0.001." in shown
    assert shown.count("not calibrated") == 1


def test_the_hourly_cost_of_a_sweep_is_that_of_its_concurrent_runs() -> None:
    cost = Cost(3.0, "list price", 100.0, None, 1200.0)
    points = [(one.spec, one.plan) for one in [prospect(cost=cost)] * 3]
    rows = {label: str(content) for label, content in sweep_rows(points, Start(None, recorded("no estimate")), 2)}
    assert rows["Jobs"] == "3 runs, 2 at a time, 1 node with 2 CPU processes each on this machine"
    assert rows["Cost"] == "$3,600 expected in total, $12.00 per hour"
    assert rows["Start"] == "unknown: no estimate (first runs; the others start as these end)"
    high = Sanity("learning rate", "0.01", "warning", recorded("the recipe scales to 0.001"))
    unusual = [(spec, dataclasses.replace(plan, sanity=(high,))) for spec, plan in points]
    assert [label for label, _ in sweep_rows(unusual, Start(None, recorded("")), 2)] == [
        "Jobs",
        "Cost",
        "Start",
        "Recipe",
    ]
