"""The screen of `scaletrain status`: measured and planned values, and the report of the scheduler."""

from dataclasses import replace

import pytest

from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.view import read_view
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.goodput import Goodput
from scaletrain_cli.rundir.journal import append_lines
from scaletrain_cli.rundir.measured import Figure, Measured, StageFigures
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.ui.status import goodput_text, guard_text, memory_text, show_status
from tests.cli.command_line import scaletrain
from tests.cli.prepared_runs import living_process, prepare


def measured(**figures: Figure) -> Measured:
    states = {"parameters": Figure(200, 200), "gradients": Figure(100, 100), "optimizer_states": Figure(700, 700)}
    return Measured(1, 2, 1, "cpu", 0, (StageFigures(0, states | figures),))


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({}, "model states 1.00 kB, as planned"),
        ({"gradients": Figure(100, 110)}, "model states 1.01 kB, 1.0 % above the plan"),
        ({"parameters": Figure(10**9, 10**9 - 128)}, "model states 1.00 GB, 128 B below the plan"),
        (
            {"activations": Figure(100, 97), "host": Figure(0, 5), "allocated": Figure(10, 20)},
            "model states 1.00 kB, as planned; activations 97 B, 3.0 % below the plan; host 5 B, not planned; "
            "peak 20 B, 100 % above the plan",
        ),
    ],
)
def test_memory_text_compares_measured_and_planned_bytes(figures: dict[str, Figure], text: str) -> None:
    assert memory_text(measured(**figures)) == text


def test_goodput_text_lists_the_other_activities_largest_first() -> None:
    spent = Goodput(9000, data=0.1, save=50, restore=600, evaluation=0, rollback=0, lost_work=350, idle=0, other=0)
    assert goodput_text(spent) == "90 % of 2 h 47 min; set-up 6.0 %, lost work 3.5 %, save 0.5 %"
    assert goodput_text(Goodput(0, 0, 0, 0, 0, 0, 0, 0, 0)) == "0 % of 0 ms"


def test_a_run_that_waits_again_shows_how_it_ended_and_why_its_job_waits(capsys: pytest.CaptureFixture[str]) -> None:
    view = read_view(RunDir(prepare("failed", "r")))
    ended, job = recorded("attempt 1 ended: preempted"), Job("7", "queued", "Priority")
    status = replace(view.status, state="queued", scheduler="slurm", job_id="7", reason=ended, job=job)
    show_status(replace(view, status=status, attempts=()))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "why attempt 1 ended: preempted" in lines
    assert "job slurm job 7: Priority" in lines


def test_the_list_shows_the_time_that_is_left_as_status_does() -> None:
    with living_process() as process:
        run = RunDir(prepare("running", "trains", process, "training.steps=300"))
        prepare("failed", "over")
        lines = [{"step": step, "loss": 2.0, "step_seconds": 0.5, "attempt": 1} for step in range(4, 101)]
        append_lines(run.metrics, lines)
        listed = {row["run_id"]: row["eta_seconds"] for row in scaletrain("list", "--json").data["runs"]}
        stated = {name: scaletrain("status", name, "--json").data["eta_seconds"] for name in listed}
        shown = scaletrain("list").out
        only_over = scaletrain("list", "--state", "over").out
    assert listed == stated == {"trains": 100.0, "over": None}
    assert "1 min 40 s" in shown
    assert " left " in shown.splitlines()[0]
    assert " left " not in only_over.splitlines()[0]


def test_guard_text_counts_events_by_kind_and_does_not_count_what_is_over() -> None:
    back = {"event": "rolled-back", "from_step": 20, "to_step": 10, "skip": [18, 20], "cause": "nan"}
    slow = {"event": "stragglers", "rank": 1, "seconds": 0.06, "others_seconds": 0.003}
    over = {"event": "stragglers", "rank": None}
    text = "2 rollbacks, 1 slow rank; last: rank 1 is slower than the others: 60.0 ms for its own work in a step"
    assert guard_text([back, slow, over]).startswith("1 rollback, 1 slow rank")
    assert guard_text([back, back, slow, over]).startswith(text)
    assert guard_text([over]) == guard_text([]) == ""
    assert "last: after a NaN or an infinity from step 20 to step 10; batches 18 to 20" in guard_text([over, back])
