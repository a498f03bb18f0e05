"""The agent's process that mirrors a run: it copies what is committed, gets time at the end, and disturbs nothing."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.durability import mirror as mirror_findings
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.live_diagnosis import LiveDiagnosis
from scaletrain_cli.launch.mirroring import mirror_now, release_mirror
from scaletrain_cli.launch.node.observer import MirrorProcess
from scaletrain_cli.launch.restart import conclude_run, why_not_begin
from scaletrain_cli.launch.resume_elsewhere import find_to_move
from scaletrain_cli.mirror.claims import read_activity, read_claims
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.mirror_state import MirrorState, mark_superseded, read_mirror_state, write_mirror_state
from tests.cli.command_line import scaletrain
from tests.launch.conftest import MadeRun, StartAgent, is_running, make_plan, make_spec
from tests.mirror.conftest import MakeMirrored, MirroredRun, make_mirrored
from tests.waiting import wait_until

__all__ = ["make_mirrored"]

SLOW = "checkpoint.mirror.bandwidth=20kB/s"
LARGE = (20_000_000,)  # takes longer than a test may


@pytest.fixture(autouse=True)
def time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for processes that were killed: theirs is the lowest priority, and a busy machine ends them late."""
    for module in ("launch.mirroring", "launch.node.observer"):
        monkeypatch.setattr(f"scaletrain_cli.{module}._KILL_SECONDS", 600.0)


def folder_of(tmp_path: Path) -> str:
    return str(tmp_path / "other-disk")


def finish(process: MirrorProcess, *, seconds: float = math.inf, failed: bool = False) -> None:
    process.finish(failed=failed, seconds_left=lambda: seconds, grace_seconds=5.0)


def test_the_process_copies_each_checkpoint_and_the_last(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path))
    made.commit(10)
    process = MirrorProcess(made.run, made.record)
    process.start_if_due()
    pid = process.pid
    wait_until(lambda: made.steps() == [10], "the first checkpoint is copied while the run trains")
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    process.start_if_due()
    assert process.pid == pid
    made.commit(20)
    finish(process)
    assert made.steps() == [10, 20]
    assert not is_running(pid)


def test_a_copy_cut_by_the_grace_period_leaves_the_one_before(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path), SLOW)
    made.commit(10, (1000,))
    process = MirrorProcess(made.run, made.record)
    process.start_if_due()
    wait_until(lambda: made.steps() == [10], "the small checkpoint is copied")
    made.commit(20, LARGE)
    finish(process, seconds=3)
    assert process.pid is not None
    assert not is_running(process.pid)
    assert made.steps() == [10]


def test_a_failed_attempt_does_not_wait_for_the_copy(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path), SLOW)
    made.commit(10, LARGE)
    process = MirrorProcess(made.run, made.record)
    process.start_if_due()
    wait_until(lambda: read_mirror_state(made.run) is not None, "it has begun")
    finish(process, failed=True)
    assert process.pid is not None
    assert not is_running(process.pid)
    assert made.steps() == []


def test_an_agent_ends_as_without_a_mirror_when_the_mirror_fails(start_agent: StartAgent, tmp_path: Path) -> None:
    (tmp_path / "in-the-way").touch()
    spec = make_spec(f"checkpoint.mirror.to={tmp_path}/in-the-way/mirror", fake={"stay": {"1:*": 1}})
    from scaletrain_cli.launch.submit import create_run

    created = create_run(spec, make_plan(spec), "failing")
    made = MadeRun(created.run, created.record)
    agent = start_agent(made)
    wait_until(lambda: len(made.events("mirror-failed")) == 1, "the failure is an event")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    (event,) = made.events("mirror-failed")
    assert "in-the-way" in event["message"]


def test_a_failing_mirror_is_a_finding_and_so_a_notification(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path))
    begin_attempt(made.run, made.record.spec, scheduler="test", job_id="1", nodes=("here",))
    reason = Reason("remote.denied", {"path": "s3://bucket/runs", "status": 403, "code": ""})
    write_mirror_state(made.run, MirrorState(made.to, 1, time.time(), problem=reason, failing_since=time.time()))
    diagnosis = LiveDiagnosis(made.run, made.record, 1)
    diagnosis.look(is_last=True)
    (raised,) = [event for event in made.events("finding") if event["code"] == "diagnosis.mirror-failing"]
    assert raised["severity"] == "warning"
    assert made.to in raised["text"]


def test_a_mirror_far_behind_is_a_finding(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path))

    def codes(waits_seconds: float) -> list[str]:
        state = MirrorState(made.to, 1, 5000.0, step=10, waiting_step=20, waiting_since=5000.0 - waits_seconds)
        write_mirror_state(made.run, state)
        from scaletrain_cli.diagnosis.case import read_case

        case: Case = read_case(made.run, made.record)
        return [finding.code for finding in mirror_findings(case)]

    assert codes(60.0) == []
    assert codes(700.0) == ["diagnosis.mirror-behind"]


def test_the_end_of_a_run_releases_its_mirror(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path))
    made.commit(10)
    release_mirror(made.run, made.record, os.environ, 600.0)
    assert made.steps() == [10]
    found = find_to_move(made.to, "moving", root=tmp_path / "second")
    assert found.activity.released


@pytest.mark.parametrize(("code", "seconds"), [("launch.stop-idle", 60.0), ("launch.job-stopped", 5.0)])
def test_a_run_that_is_over_has_a_minute_to_release_its_mirror_and_a_preempted_one_seconds(
    code: str, seconds: float, make_mirrored: MakeMirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = make_mirrored(folder_of(tmp_path)), list[float]()
    monkeypatch.setattr("scaletrain_cli.launch.mirroring.release_mirror", lambda *words: given.append(words[-1]))
    conclude_run(made.run, Decision.because(False, ExitCode.PREEMPTED, Reason(code)))
    assert given == [seconds]


def test_a_process_that_cannot_be_killed_does_not_keep_the_end_of_a_run(
    make_mirrored: MakeMirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started = make_mirrored(folder_of(tmp_path)), list[subprocess.Popen[bytes]]()
    popen = subprocess.Popen

    class Stuck(popen[bytes]):
        """A process that SIGKILL does not end, as one that waits for a dead file system."""

        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(["sleep", "100000"], **options)
            started.append(self)

        def kill(self) -> None:
            """Do nothing."""

    monkeypatch.setattr("scaletrain_cli.launch.mirroring.subprocess.Popen", Stuck)
    monkeypatch.setattr("scaletrain_cli.launch.mirroring._KILL_SECONDS", 0.2)
    release_mirror(made.run, made.record, os.environ, 0.2)
    (process,) = started
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("over", [True, False])
def test_the_verb_releases_a_mirror_at_the_end(make_mirrored: MakeMirrored, tmp_path: Path, *, over: bool) -> None:
    made = make_mirrored(folder_of(tmp_path))
    made.commit(10)
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    if over:
        decision = Decision(False, 4, "it is not restarted")
        end_attempt(made.run, made.record.spec, 1, Outcome(1, "crash", recorded("a rank ended")), decision)
    mirror_now(made.run, made.record)
    assert mirror_now(made.run, made.record).step == 10
    (claim,) = read_claims(made.store)
    assert read_activity(made.store, claim).released is over


def test_no_attempt_begins_in_a_place_that_was_superseded(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made: MirroredRun = make_mirrored(folder_of(tmp_path))
    mark_superseded(made.run, {"host": "other", "run_dir": "/runs/moving"})
    decision = why_not_begin(made.run, made.record, "1")
    assert str(decision.reason) == "the run continues in /runs/moving on other, from its mirror"


def test_the_verb_mirrors_a_run_that_has_ended(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(folder_of(tmp_path))
    made.commit(10)
    ended = scaletrain("checkpoint", "mirror", made.run.path, "--json")
    assert (ended.code, ended.data["step"], ended.data["state"]) == (0, 10, "current")
    listed = scaletrain("checkpoint", "list", made.run.path, "--json").data
    assert [(entry["step"], entry["mirrored"]) for entry in listed["checkpoints"]] == [(10, True)]
    made.commit(20)
    made.remove(10)
    shown = scaletrain("checkpoint", "list", made.run.path)
    assert "only in the mirror: 10" in shown.err
    assert "mirrored" in shown.out
    status = scaletrain("status", made.run.path)
    assert f"step 10 in {made.to}" in " ".join(status.out.split())
    assert mirror_now(made.run, made.record).steps == [10, 20]
