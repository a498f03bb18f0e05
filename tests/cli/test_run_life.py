"""submit, train, status, list, logs, cancel, resume: the life of a run with a fake engine."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from scaletrain_cli.cli.options import pause
from scaletrain_cli.errors import ExitCode, SchedulerError
from scaletrain_cli.launch.backends.base import PreflightResult
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import CodeRecord
from scaletrain_cli.spec import RunSpec
from tests.cli.command_line import SMALL, Ended, scaletrain
from tests.cli.conftest import replace_engine
from tests.conftest import isolate
from tests.launch.conftest import ENGINE
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("stand_in_engine")
PRICE = ("--set", "cluster.price_per_gpu_hour=3")
FORKED = pytest.mark.usefixtures("forked_jobs")


def submit(verb: str = "submit", run_id: str = "r1", *more: str, **fake: Any) -> Ended:
    env = json.dumps({"FAKE": json.dumps(fake)})
    return scaletrain(verb, SMALL, "--run-id", run_id, "--set", f"env={env}", *more)


def ended(run_id: str = "r1") -> Ended:
    return scaletrain("status", run_id, "--wait", "1h", "--json")


def rows_of(ended: Ended) -> list[str]:
    return [" ".join(row.split()) for row in ended.err.splitlines()]


def wait_for_step(run_id: str, step: int) -> None:
    wait_until(lambda: scaletrain("status", run_id, "--json").data["step"] >= step, f"step {step}")


def test_a_dry_run_prints_the_rendered_job_and_creates_nothing(tmp_path: Path) -> None:
    ended = submit("submit", "r1", "--dry-run")
    assert ended.code == 0
    assert ended.out.endswith(f"launch.backends.local.supervisor {runs_root() / 'r1'} --engine {ENGINE}\n")
    assert list(tmp_path.iterdir()) == []


@FORKED
def test_a_run_is_submitted_followed_and_finished() -> None:
    submitted = submit("submit", "r1", *PRICE, steps=3)
    assert (submitted.code, submitted.out) == (0, "r1\n"), submitted.err
    assert "scaletrain status r1" in submitted.err
    rows = rows_of(submitted)
    assert "Job r1: 1 node with 2 CPU processes on this machine" in rows
    assert any(row.startswith("Cost $") and "$6.00 per hour ($3.00 per GPU-hour: " in row for row in rows)
    assert "Start now: this machine has no queue" in rows
    data = ended().data
    assert (data["state"], data["step"], len(data["attempts"])) == ("finished", 3, 1)
    shown = scaletrain("status", "r1").out
    assert shown.startswith("r1  finished  step 3 of 100 (3.0 %)\n")
    assert "every rank finished" in shown
    assert scaletrain("status").out.splitlines()[0] == shown.splitlines()[0], "the newest run is meant"
    wait_until(lambda: ended().data["job"]["state"] == "ended", "the supervisor has written its last event")
    for words in (["diagnose"], ["explain"], ["events"], ["logs"], ["watch", "--once"]):
        assert scaletrain(*words).out == scaletrain(words[0], "r1", *words[1:]).out, words
    assert scaletrain("list").out.splitlines()[1].split()[:3] == ["r1", "finished", "3/100"]


def run_below(root: Path, verb: str, *more: str, **fake: Any) -> Ended:
    """Begin r1 by the real command lines, below this folder; return when it has ended."""
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, root)
        replace_engine(patch, root)
        patch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: False)
        begun = submit(verb, "r1", *more, **fake)
        ended()
        return begun


@pytest.fixture(scope="module")
def root_of_a_finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    run_below(root, "submit", steps=1)
    return root / "runs"


@pytest.fixture(scope="module")
def trained_until_a_crash(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    root = tmp_path_factory.mktemp("crashed")
    options = ("--set", "restarts.crash=0")
    return run_below(root, "train", *options, steps=9, checkpoint_every=2, die={"1:0": 9}, die_at=7), root / "runs"


@pytest.fixture
def finished(root_of_a_finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs root with the run r1, which has finished; a test leaves it as it was."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(root_of_a_finished_run))
    return root_of_a_finished_run


@pytest.fixture
def crashed(trained_until_a_crash: tuple[Ended, Path]) -> RunDir:
    """The run r1, which has crashed at step 7 of 9 after checkpoints at 2, 4 and 6."""
    shutil.copytree(trained_until_a_crash[1], runs_root())
    return RunDir(runs_root() / "r1")


@pytest.mark.usefixtures("finished")
def test_submitting_again_under_the_same_id_has_no_effect() -> None:
    first = ended().data
    again = submit("submit", "r1", "--json", steps=1)
    assert (again.code, again.data["created"], again.data["job_id"]) == (0, False, first["job_id"])
    assert len(ended().data["attempts"]) == 1
    assert submit(steps=1).err.startswith("already submitted: job ")  # nothing is planned aloud, nothing asked
    other = submit(steps=2)
    assert other.code == ExitCode.USAGE
    assert "exists with another spec" in other.err


@pytest.mark.usefixtures("finished")
def test_log_lines_are_prefixed_with_the_rank() -> None:
    assert scaletrain("logs", "r1").out == "[rank 0] up\n[rank 1] up\n"
    assert scaletrain("logs", "r1", "--rank", "1").out == "up\n"
    assert scaletrain("logs", "r1", "--follow", "--rank", "0").out == "up\n"
    assert scaletrain("logs", "r1", "--tail", "0").out == ""
    assert scaletrain("logs", "r1", "--tail", "0", "--follow").out == ""
    assert scaletrain("logs", "r1", "--tail", "1", "--follow", "--attempt", "1").out.count("\n") == 2
    assert scaletrain("logs", "r1", "--rank", "2").code == ExitCode.USAGE
    assert scaletrain("logs", "r1", "--attempt", "2").code == ExitCode.USAGE


@pytest.mark.usefixtures("crashed")
def test_status_wait_ends_with_the_exit_code_of_a_failed_run() -> None:
    waited = ended()
    assert waited.code == ExitCode.CRASHED
    assert waited.data["state"] == "failed"
    assert "rank 0" in waited.data["why"]
    assert "restarts.crash = 0 is used up" in " ".join(scaletrain("status", "r1").out.split())


@FORKED
def test_a_cancelled_run_keeps_its_state_and_can_be_resumed() -> None:
    submit("submit", "r1", *PRICE, steps=9, stay={"1:*": 2, "2:*": 4})
    wait_for_step("r1", 2)
    assert scaletrain("status", "r1", "--wait", "0.1s").code == 124
    assert "asked to save and stop" in scaletrain("cancel", "r1").err
    waited = ended()
    assert (waited.code, waited.data["state"]) == (ExitCode.PREEMPTED, "cancelled")
    assert "was already cancelled. Nothing was done." in scaletrain("cancel", "r1").err
    resumed = scaletrain("resume", "r1")
    assert (resumed.code, resumed.out) == (0, "r1\n"), resumed.err
    assert "cancelled" in resumed.err
    assert f"after step {waited.data['last_checkpoint_step']}, from " in " ".join(resumed.err.split())
    assert "lost     nothing" in resumed.err
    rows = rows_of(resumed)
    assert any(row.startswith("Cost $") and " expected for the remaining " in row for row in rows)
    assert "Changed none (identical to the last submission)" in rows
    assert "still active" in scaletrain("resume", "r1").err
    (runs_root() / "r1" / "go").touch()
    assert ended().data["state"] == "finished"
    finished = scaletrain("resume", "r1")
    assert (finished.code, finished.out) == (ExitCode.USAGE, "")
    assert "r1 has finished; there is nothing to resume." in finished.err
    assert "has finished. Nothing was done." in scaletrain("cancel", "r1").err


@FORKED
def test_a_finished_run_continues_with_more_steps_and_a_branch_of_it_is_a_run_of_its_own() -> None:
    submit("submit", "r1", *PRICE, "--set", "training.schedule={name: constant}", steps=4, checkpoint_every=2)
    assert ended().data["state"] == "finished"
    wrong = scaletrain("resume", "r1", "--at", "2")
    assert (wrong.code, "--at requires --branch NEW_ID." in wrong.err) == (ExitCode.USAGE, True)
    wrong = scaletrain("resume", "r1", "--branch", "r2", "--from-scratch", "--take-over")
    assert "--branch cannot be combined with --take-over, --from-scratch." in wrong.err
    branch = ("resume", "r1", "--branch", "r2", "--at")
    missing = scaletrain(*branch, 3)
    assert "r1 has no checkpoint of step 3; there are those of steps 2, 4." in " ".join(missing.err.split())
    tried = scaletrain(*branch, 2, "--dry-run")
    assert tried.out.endswith(f"{runs_root() / 'r2'} --engine {ENGINE}\n"), tried.err
    assert not (runs_root() / "r2").exists()
    begun = scaletrain(*branch, 2, "--set", "training.steps=50")
    assert (begun.code, begun.out) == (0, "r2\n"), begun.err
    rows = rows_of(begun)
    assert any(row.startswith("r2 continues r1 after step 2, from ") for row in rows), rows
    assert {"training.steps was 100, now 50", "learning rate of step 3 was 0.002, now 0.002"} <= {*rows}
    assert ended("r2").data["branch_of"]["run_id"] == "r1"
    assert "branch of r1, from step 2" in " ".join(scaletrain("status", "r2").out.split())
    again = scaletrain(*branch, 2, "--set", "training.steps=50", "--json")
    assert (again.code, again.data["created"]) == (0, False), again.err
    resumed = scaletrain("resume", "r1", "--set", "training.steps=200", "--json", code=0)
    assert resumed.data["checkpoint_step"] == 4
    schedule = resumed.data["resize"]["schedule"]
    assert (schedule["total_steps"], schedule["same_past"]) == ({"was": 100, "now": 200}, True)
    assert ended().data["total_steps"] == 200
    shown = scaletrain("events", "r1").out
    assert "from step 5 on: training.steps was 100, now 200; the learning rate of step 5 is 0.002" in shown


@FORKED
def test_resume_skips_a_damaged_checkpoint_and_counts_the_lost_steps(crashed: RunDir) -> None:
    (crashed.checkpoints / "step-00000006" / "shard-0").write_text("rotten")
    resumed = scaletrain("resume", "r1", "--json", code=0)
    assert (resumed.data["checkpoint_step"], resumed.data["steps_lost"]) == (4, 2)
    assert resumed.data["passed_over"][0].startswith("step-00000006/shard-0: ")
    assert ended().data["state"] == "finished"


@FORKED
def test_a_run_resumes_with_fewer_processes_after_it_is_planned_again() -> None:
    submit(steps=9, stay={"1:*": 2})
    wait_for_step("r1", 2)
    scaletrain("cancel", "r1")
    ended()
    revisions = runs_root() / "r1" / "revisions"
    tried = scaletrain("resume", "r1", "--gpus-per-node", "1", "--dry-run", code=0)
    assert tried.out.endswith(f"{runs_root() / 'r1'} --engine {ENGINE}\n")
    assert not revisions.exists()
    resized = {"GPUs 1 x 2 = 2 1 x 1 = 1", "data parallel 2 1", "accumulation 1 2", "global batch 16 16"}
    assert resized <= set(rows_of(tried))
    refused = scaletrain("resume", "r1", "--gpus-per-node", "1", "--set", "training.seed=7")
    assert (refused.code, revisions.exists()) == (ExitCode.USAGE, False)
    assert "--set training.seed = 7: was 42, and what is trained cannot change." in " ".join(refused.err.split())
    assert scaletrain("resume", "r1", "--gpus-per-node", "3").code == ExitCode.INFEASIBLE
    after = scaletrain("resume", "r1", "--gpus-per-node", "1", "--json", code=0).data["resize"]["after"]
    layout = after["layout"]
    assert (after["revision"], layout["world_size"], layout["gradient_accumulation_steps"]) == (1, 1, 2)
    assert ended().data["state"] == "finished"

    assert len(list((runs_root() / "r1" / "attempts" / "0002" / "logs").iterdir())) == 1


def test_a_resume_that_would_be_rejected_changes_nothing(crashed: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in crashed.path.rglob("*")}

    def refuse(
        self: LocalBackend, spec: RunSpec, plan: RunPlan, run: RunDir, code: CodeRecord | None
    ) -> PreflightResult:
        raise SchedulerError("the quota can never hold it.")

    monkeypatch.setattr(LocalBackend, "preflight", refuse)
    for more in ([], ["--gpus-per-node", "1"]):
        refused = scaletrain("resume", "r1", "--yes", *more)
        assert (refused.code, refused.out) == (ExitCode.SCHEDULER, "")
        assert "the quota can never hold it." in refused.err
    assert {path: path.stat().st_mtime_ns for path in crashed.path.rglob("*")} == before


def test_train_ends_with_the_exit_code_of_a_run_that_finishes() -> None:
    trained = submit("train", steps=3)
    assert (trained.code, trained.out) == (0, "r1\n"), trained.err
    assert "finished at step 3 of 100, exit code 0" in trained.err


def test_train_ends_with_the_exit_code_of_a_run_that_crashes(trained_until_a_crash: tuple[Ended, Path]) -> None:
    assert trained_until_a_crash[0].code == ExitCode.CRASHED


def test_without_runs_list_succeeds_and_status_is_an_error() -> None:
    listed = scaletrain("list")
    assert (listed.code, listed.out) == (0, "")
    assert "no runs under" in listed.err
    assert scaletrain("list", "--json").data["runs"] == []
    assert "no runs under" in scaletrain("status").err


@pytest.mark.parametrize("time", ["soon", "-3", "1:2"])
def test_an_invalid_wait_time_is_rejected(time: str) -> None:
    submit("submit", "r1", "--dry-run")
    (runs_root() / "r1").mkdir(parents=True)
    (runs_root() / "r1" / "run.json").write_text("{}")
    assert f"--wait {time}: must be a duration" in scaletrain("status", "r1", f"--wait={time}").err


@pytest.mark.parametrize("time", ["0", "0s", "0.5"])
def test_recover_does_not_look_without_a_pause(time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scaletrain_cli.cli.recover.pause", end)
    ended = scaletrain("recover", "--every", time, code=2)
    assert f"--every {time}" in ended.err
    assert "5m" in ended.err, "what is allowed"
    assert scaletrain("recover", "--every", "1s").code == 130, "it looks again until Ctrl-C"


def test_recover_goes_on_after_a_round_in_which_the_runs_root_could_not_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listings = [OSError(errno.ESTALE, "Stale file handle", "/runs"), [], KeyboardInterrupt()]
    monkeypatch.setattr("scaletrain_cli.launch.recover.list_runs", Mock(side_effect=listings))
    monkeypatch.setattr("scaletrain_cli.cli.recover.pause", pauses := Mock())
    said = scaletrain("recover", "--every", "5m", code=130).err
    assert "/runs: Stale file handle" in said
    assert pauses.call_args_list == [call(300.0), call(300.0)]
    monkeypatch.setattr("scaletrain_cli.launch.recover.list_runs", Mock(side_effect=listings))
    assert "/runs: Stale file handle" in scaletrain("recover", code=1).err


def test_a_pause_may_be_longer_than_the_system_can_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # so that the pause ends at once
    with open(writes, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            pause(30 * 86400.0)
