"""The runs of a sweep as one job array: its script, the ids of its tasks, lost answers, and what is refused."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.backends.slurm import array, commands, queue
from scaletrain_cli.launch.backends.slurm.array import own_job_id, require_one_array
from scaletrain_cli.launch.backends.slurm.backend import SlurmBackend
from scaletrain_cli.launch.job import open_request, read_submission
from scaletrain_cli.launch.preparation import PreparedData
from scaletrain_cli.launch.prepared_submission import SubmittedRun
from scaletrain_cli.launch.sweep import Point, submit_as_array, submit_sweep
from scaletrain_cli.rundir.paths import RunDir, read_sweep_place, runs_root
from scaletrain_cli.rundir.record import read_record
from tests.launch.conftest import make_plan, make_spec

SLURM = SlurmBackend()
SETTINGS = ("cluster.scheduler=slurm", "cluster.nodes=2")


def points(*settings: str) -> list[Point]:
    """Return the points of a sweep over the seed; ``settings``: of the second one in addition."""
    found = []
    for seed, more in ((1, ()), (2, settings), (3, ())):
        spec = make_spec(*SETTINGS, f"training.seed={seed}", *more)
        named = (f"training.seed={seed}",)
        found.append(Point(spec, make_plan(spec), SLURM, run_id=f"sweep-{seed}", overrides=named))
    return found


class Controller:
    """Stands in for sbatch and squeue; ``rows``: as squeue prints them, for both formats."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.refusal: SchedulerError | None = None
        self.rows: list[str] = []

    def __call__(self, command: Sequence[str], **options: Any) -> SimpleNamespace:
        self.calls.append(list(command))
        if command[0] == "sbatch":
            comment = next(word for word in command if word.startswith("--comment=")).partition("=")[2]
            if self.refusal is None or isinstance(self.refusal, SchedulerSilentError):
                self.rows = [f"70_{number}|PENDING|None||me|{comment}" for number in (1, 2, 3)]
            if self.refusal is not None:
                raise self.refusal
            return SimpleNamespace(stdout="70\n", stderr="")
        if "--format=%F|%k" in command:
            rows = [f"70|{row.rpartition('|')[2]}" for row in self.rows]
        elif any(word.startswith("--jobs=") for word in command):
            rows = [row for row in self.rows if row.split("|")[0] in command[4].partition("=")[2].split(",")]
        else:
            rows = self.rows
        return SimpleNamespace(stdout="\n".join(rows), stderr="")

    def sent(self) -> int:
        return sum(call[0] == "sbatch" for call in self.calls)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    found = Controller()
    monkeypatch.setattr(array, "call_slurm", found)
    monkeypatch.setattr(queue, "call_slurm", found)
    monkeypatch.setattr(commands, "call_slurm", found)
    monkeypatch.setattr(commands, "_SEARCH_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(SlurmBackend, "_known_site", lambda self, spec: None)
    return found


def submit(cap: int = 2) -> list[SubmittedRun]:
    return submit_as_array("sweep", points(), cap)


def test_one_request_queues_all_runs_and_each_is_a_task(controller: Controller) -> None:
    done = submit()
    assert [one.job_id for one in done] == ["70_1", "70_2", "70_3"]
    assert controller.sent() == 1
    assert [read_sweep_place(one.run).number for one in done] == [1, 2, 3]  # type: ignore[union-attr]
    script = (runs_root() / ".array-sweep" / "array.sh").read_text()
    assert "#SBATCH --array=1-3%2\n" in script
    assert "#SBATCH --job-name=sweep\n" in script
    jobs = [(one.run.path / "job.sh").read_text() for one in done]
    assert [requeued_by(job, {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"}) for job in jobs] == ["70_2"] * 3
    assert submit()[0].job_id == "70_1"
    assert controller.sent() == 1, "the same command queues no second array"


def requeued_by(script: str, environment: dict[str, str]) -> str:
    """Return the id of the job that a batch script requeues; the number of its job is 70."""
    (line,) = (line for line in script.splitlines() if "scontrol requeue" in line)
    word = line.strip().removeprefix("scontrol requeue ").removesuffix(" || return")
    variables = {"SLURM_JOB_ID": "70", "PATH": "/usr/bin:/bin"} | environment
    said = subprocess.run(["bash", "-c", f"echo {word}"], env=variables, check=True, capture_output=True, text=True)
    return said.stdout.strip()


def test_an_array_that_was_not_sent_is_a_whole_job(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array was interrupted before sbatch, and the sweep is submitted again without --array."""

    def interrupted(*arguments: object, **options: object) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SlurmBackend, "submit_array", interrupted)
        with pytest.raises(KeyboardInterrupt):
            submit()
    monkeypatch.setattr(queue, "_SETTLED_SECONDS", 0.0)
    done = submit_sweep("sweep", points(), 2)
    script = (done[0].run.path / "job.sh").read_text()
    assert requeued_by(script, {}) == "70", "its own job"
    places = [read_sweep_place(one.run) for one in done]
    assert [place.after for place in places if place is not None] == [None, None, done[0].run.run_id], "two at a time"


def test_without_a_limit_all_tasks_may_run(controller: Controller) -> None:
    submit(cap=3)
    assert "#SBATCH --array=1-3\n" in (runs_root() / ".array-sweep" / "array.sh").read_text()


def test_a_task_runs_the_script_of_its_run_in_its_folder(controller: Controller, tmp_path: Path) -> None:
    done = submit()
    for one in done:
        (one.run.path / "job.sh").write_text('echo "$PWD"; exit 7\n')
    script = runs_root() / ".array-sweep" / "array.sh"
    environment = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(["/bin/bash", str(script)], env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 7
    assert (done[1].run.path / "slurm-70_2.log").read_text() == f"{done[1].run.path}\n"


def test_a_refused_array_leaves_nothing(controller: Controller) -> None:
    controller.refusal = SchedulerError("invalid partition.")
    with pytest.raises(SchedulerError, match="invalid partition"):
        submit()
    assert list(runs_root().iterdir()) == []


def test_an_array_whose_answer_was_lost_is_found(controller: Controller) -> None:
    controller.refusal = SchedulerSilentError("no answer.")
    assert [one.job_id for one in submit()] == ["70_1", "70_2", "70_3"]


def test_a_late_array_is_found_by_the_same_command(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    controller.refusal = SchedulerSilentError("no answer.")
    with monkeypatch.context() as patch:
        patch.setattr(array, "_find_array", lambda sweep, comment: None)
        with pytest.raises(SchedulerSilentError, match="no second job"):
            submit()
    runs = [RunDir(runs_root() / f"sweep-{seed}") for seed in (1, 2, 3)]
    assert all(open_request(run) is not None for run in runs)
    assert SLURM.job(runs[1], None).id == "70_2"  # type: ignore[arg-type]
    assert [one.job_id for one in submit()] == ["70_1", "70_2", "70_3"]
    assert controller.sent() == 1


def test_a_resumed_run_gets_a_job_of_its_own(controller: Controller) -> None:
    run = submit()[0].run
    assert read_submission(run) is not None
    record = json.loads((run.path / "sweep.json").read_text())
    assert record["array"]
    assert '"$SLURM_JOB_ID"' in SLURM.render(run, read_record(run))


def test_runs_that_request_different_jobs_are_refused_before_anything_is_made(controller: Controller) -> None:
    different = points("cluster.slurm.time=1h")
    with pytest.raises(UsageError, match="time=60:00"):
        submit_as_array("sweep", different, 2)
    with pytest.raises(UsageError, match="is a range"):
        require_one_array([make_spec("cluster.scheduler=slurm", "cluster.nodes={min: 1, max: 4}")] * 2)
    with pytest.raises(UsageError, match="are not prepared"):
        submit_as_array("sweep", [replace(one, data=PreparedData(tasks=1)) for one in points()], 2)
    with pytest.raises(UsageError, match="has no job arrays"):
        submit_as_array("sweep", [replace(one, backend=LocalBackend()) for one in points()], 2)
    assert controller.calls == []
    assert not runs_root().exists() or list(runs_root().iterdir()) == []


def test_a_task_is_called_by_the_array_and_its_number() -> None:
    task = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    assert own_job_id(task) == "70_3"
    assert own_job_id({"SLURM_JOB_ID": "70"}) == "70"


def test_tasks_that_never_started_are_one_row_of_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sacct lists them by the array alone: with -j ARRAY_TASK it prints nothing."""
    asked = []

    def accounting(command: Sequence[str], **options: Any) -> SimpleNamespace:
        asked.append(command[command.index("-j") + 1])
        rows = ["70_1|COMPLETED", "70_[2-3,5%2]|CANCELLED by 0", "70_[7,...]|PENDING", "71|FAILED"]
        return SimpleNamespace(stdout="\n".join(rows))

    monkeypatch.setattr(queue, "call_slurm", accounting)
    cancelled = dict.fromkeys(("70_2", "70_3", "70_5"), "CANCELLED by 0")
    found = queue._accounted_states(["70_1", "70_2", "71"])
    assert found == {"70_1": "COMPLETED", **cancelled, "70_7": "PENDING", "71": "FAILED"}
    assert asked == ["70,71"]
    assert queue.cancelled_by_another("70_5") == (os.geteuid() != 0)
