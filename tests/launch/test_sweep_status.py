"""The status and the cancellation of a sweep: one damaged run, or one that cannot be cancelled, hides no other."""

from collections.abc import Sequence

import pytest

from scaletrain_cli.errors import ExitCode, SchedulerError
from scaletrain_cli.launch import cancel, status
from scaletrain_cli.launch.job import Job
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.launch.sweep import (
    SweepCancellation,
    cancel_members,
    exit_code_of_all,
    refreshed_sweep_status,
    sweep_status,
)
from scaletrain_cli.rundir.journal import append_line
from scaletrain_cli.rundir.paths import RunDir, SweepPlace, find_sweep, write_sweep_place
from scaletrain_cli.rundir.record import RunRecord
from tests.cli.command_line import scaletrain
from tests.launch.conftest import MadeRun, MakeRun
from tests.launch.test_resume import attempt
from tests.launch.test_submit import CountingScheduler


class Queue(CountingScheduler):
    """Runs are queued until they are cancelled; those in ``refused`` cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[str] = []
        self.refused: Sequence[str] = ()

    def job(self, run: RunDir, record: RunRecord) -> Job:
        return Job("7", "ended" if run.is_cancelled or run.attempts() else "queued")

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        if run.run_id in self.refused:
            raise SchedulerError("was started on another host; cancel it there.")
        self.cancelled.append(run.run_id)
        run.stop_file.touch()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (status, cancel):
        monkeypatch.setattr(module, "backend_for", lambda name: queue)
    return queue


@pytest.fixture
def runs(make_run: MakeRun, queue: Queue) -> list[MadeRun]:
    """Return the runs of a sweep of four, all queued."""
    made = []
    for number in range(1, 5):
        one = make_run(run_id=f"s-{number}")
        write_sweep_place(one.run, SweepPlace("s", number, 4, (f"x={number}",)))
        submit_run(one.run, one.record, queue)
        made.append(one)
    return made


def test_runs_that_have_not_ended_are_canceled_the_last_first(runs: list[MadeRun], queue: Queue) -> None:
    attempt(runs[0], 0, "done")
    attempt(runs[1], 1, "crash")
    found = sweep_status(find_sweep("s"))
    assert found.states == {"queued": 2, "finished": 1, "failed": 1}
    done = cancel_members(found.members)
    assert done == SweepCancellation(cancelled=("s-3", "s-4"), over=("s-1", "s-2"))
    assert queue.cancelled == ["s-4", "s-3"]  # none of a lane may start because the one before it is gone


def test_a_run_that_cannot_be_canceled_stops_no_other_and_sets_the_exit_code(runs: list[MadeRun], queue: Queue) -> None:
    queue.refused = ["s-3"]
    reported = scaletrain("cancel", "s", "--yes", code=ExitCode.SCHEDULER)
    assert "1 run of the sweep s could not be cancelled" in reported.err
    assert "s-3: was started on another host" in reported.err
    assert queue.cancelled == ["s-4", "s-2", "s-1"]
    queue.refused = ()
    again = scaletrain("cancel", "s", "--yes", code=ExitCode.DONE)
    assert "cancelled 1 run of the sweep s; 3 had already ended" in again.err
    assert "(4 cancelled). Nothing was done." in scaletrain("cancel", "s", "--yes", code=ExitCode.DONE).err


def test_a_damaged_run_hides_no_other_run(runs: list[MadeRun], queue: Queue) -> None:
    runs[1].run.record.write_text("{")
    found = sweep_status(find_sweep("s"))
    assert found.states_in_words == "3 queued, 1 damaged"
    assert "is damaged" in found.members[1].to_json()["error"]["message"]
    assert [name for name, _ in cancel_members(found.members).refused] == ["s-2"]
    shown = scaletrain("status", "s").out
    assert "damaged" in shown
    assert len(queue.cancelled) == 3


def test_the_exit_code_of_a_sweep_is_that_of_its_first_unfinished_run(runs: list[MadeRun], queue: Queue) -> None:
    for made in runs:
        attempt(made, 0, "done") if made is not runs[2] else attempt(made, 93, "nan")
    members = sweep_status(find_sweep("s")).members
    assert all(member.is_over for member in members)
    assert exit_code_of_all(members) == ExitCode.DO_NOT_REQUEUE
    assert exit_code_of_all(members[:2]) == 0
    assert scaletrain("status", "s", "--wait", "1s").code == ExitCode.DO_NOT_REQUEUE


def test_a_wait_for_a_sweep_ends_after_its_time_or_when_all_runs_are_cancelled(runs: list[MadeRun]) -> None:
    assert scaletrain("status", "s", "--wait", "0.1s").code == 124
    scaletrain("cancel", "s", "--yes", code=ExitCode.DONE)
    waited = scaletrain("status", "s", "--wait", "1h", "--json")
    assert (waited.code, waited.data["states"]) == (ExitCode.CRASHED, {"cancelled": 4})


def test_a_run_that_has_ended_is_not_queried_again(runs: list[MadeRun], queue: Queue) -> None:
    attempt(runs[0], 0, "done")
    before = sweep_status(find_sweep("s"))
    for made in runs[1:]:
        attempt(made, 0, "done")
    runs[0].run.record.unlink()  # nobody looks
    assert refreshed_sweep_status(before).states == {"finished": 4}


def test_list_can_show_the_runs_of_one_sweep(runs: list[MadeRun], make_run: MakeRun) -> None:
    make_run(run_id="alone")
    listed = scaletrain("list", "--sweep", "s", "--json").data["runs"]
    assert sorted(row["run_id"] for row in listed) == ["s-1", "s-2", "s-3", "s-4"]
    assert scaletrain("list", "--sweep", "t").code == ExitCode.USAGE


def test_force_is_refused_for_a_sweep_on_a_back_end_without_it(runs: list[MadeRun], queue: Queue) -> None:
    assert (
        "--force has no effect on this machine, where the sweep s runs"
        in scaletrain("cancel", "s", "--yes", "--force").err
    )
    assert queue.cancelled == []


def test_the_best_of_the_finished_runs_is_named(runs: list[MadeRun]) -> None:
    for made, loss in zip(runs, (3.0, 2.0, 1.0), strict=False):
        append_line(made.run.metrics, {"step": 1, "loss": loss, "validation_loss": loss + 1})
    attempt(runs[0], 0, "done")
    assert sweep_status(find_sweep("s")).best is None, "one run has no other to be compared with"
    attempt(runs[1], 0, "done")
    attempt(runs[2], 1, "crash")
    found = sweep_status(find_sweep("s"))
    assert found.to_json()["best"] == {"run_id": "s-2", "measure": "validation_loss", "value": 3.0}
    assert "lowest validation loss 3.0000: s-2" in scaletrain("status", "s").out
    append_line(runs[0].run.metrics, {"step": 2, "loss": 1.5})
    attempt(runs[3], 0, "done")  # which has measured nothing
    assert sweep_status(find_sweep("s")).best is None
