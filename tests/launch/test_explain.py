"""Explanations of runs with every exit reason, from their run directories."""

from typing import get_args

import pytest

from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.explain import RESUME_IS_A_REMEDY, explain
from scaletrain_cli.launch.finding import Finding
from scaletrain_cli.launch.job import Job, JobCause
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reason_texts.launch import TEXTS
from scaletrain_cli.reasons import Reason, entry_of, recorded
from scaletrain_cli.rundir.journal import record_event
from tests.cli.command_line import scaletrain
from tests.launch.conftest import LOCAL, MakeRun
from tests.waiting import wait_until


def reported(finding: Finding) -> str:
    return "\n".join(f"{evidence.source}: {evidence.text}" for evidence in finding.evidence)


def test_every_exit_reason_has_a_text_and_a_remedy() -> None:
    for reason in get_args(ExitReason):
        text = entry_of(f"launch.exit-{reason}")
        assert text.text.startswith("attempt {attempt}")
        assert bool(text.remedies) is (reason not in ("done", "preempted")), reason
        resumes = any("scaletrain resume {run}" in remedy for remedy in text.remedies)
        assert resumes is (reason in RESUME_IS_A_REMEDY), reason
    assert all(f"exit-by-scheduler-{cause}" in TEXTS for cause in get_args(JobCause))


def test_of_a_running_attempt_the_end_of_the_one_before_is_told(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run()
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    end_attempt(made.run, made.record.spec, 1, Outcome(1, "node", recorded("n2 is lost")), Decision(True, 1, "budget"))
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    monkeypatch.setattr(LocalBackend, "job", lambda *_: Job.because("1", "running", recorded("runs")))
    (finding,) = explain(made.run).findings
    assert finding.cause == "running"
    assert "attempts/0001/attempt.json: n2 is lost" in reported(finding)
    assert "decided: budget; another attempt follows" in reported(finding)


def test_a_node_that_waits_for_the_first_one_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    running = Job.because("1", "running", recorded("runs"))
    monkeypatch.setattr(LocalBackend, "job", lambda *_: running)
    record_event(made.run, "unreachable", attempt=1, node="n2", address="n1", port=29500, error="Name not known")
    (finding,) = explain(made.run).findings
    assert finding.cause == "communication"
    assert finding.headline.startswith("node n2 cannot reach the first node at n1, port 29500: Name not known")
    record_event(made.run, "started", step=0, attempt=1)
    assert explain(made.run).findings[0].cause == "running"


@pytest.mark.parametrize("reason", get_args(ExitReason))
def test_every_exit_reason_of_an_attempt_is_explained(make_run: MakeRun, reason: ExitReason) -> None:
    made = make_run()
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    outcome, decision = Outcome(1, reason, recorded("these words")), Decision(False, 1, "the budget is used up")
    end_attempt(made.run, made.record.spec, 1, outcome, decision)
    (finding,) = explain(made.run).findings
    assert finding.cause == reason
    assert "attempts/0001/attempt.json: these words" in reported(finding)
    assert "{" not in "".join(finding.actions)
    if reason != "done":
        assert "no attempt follows unless" in reported(finding)
        assert any(f"scaletrain resume {made.run.run_id}" in action for action in finding.actions)


def test_the_findings_that_explain_a_failed_attempt_are_listed(make_run: MakeRun) -> None:
    made = make_run()
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("here",))
    diverges = Reason("diagnosis.loss-above-start", {"now": 8.0, "step": 90, "start": 4.0})
    cleared = Reason("diagnosis.loss-rising", {"now": 5.0, "step": 50, "best": 4.0, "best_step": 20})
    memory = Reason("diagnosis.memory-nearly-full", {"share": 0.97})
    for reason in (memory, cleared, diverges):
        fields = {"attempt": 1, "step": 90, "subject": "", "text": str(reason), **reason.to_document()}
        record_event(made.run, "finding", severity="error", change="raised", **fields)
        if reason is cleared:
            record_event(made.run, "finding-cleared", severity="error", seconds=5.0, **fields)
    end_attempt(made.run, made.record.spec, 1, Outcome(1, "nan", recorded("NaN")), Decision(False, 1, "over"))
    (finding,) = explain(made.run).findings
    listed = [each.text for each in finding.evidence if each.code == "launch.raised-finding"]
    text = "diagnosed while it trained (error): the loss diverges: 8.000 at step 90, 4.000 at the start"
    assert listed == [f"{text}; see `scaletrain diagnose {made.run.run_id}`"]


def test_a_crash_shows_the_reason_the_end_of_its_log_and_attempts_before(make_run: MakeRun, forked_jobs: None) -> None:
    made = make_run("restarts.crash=1", "cluster.gpus_per_node=1", die={"*:0": 1}, reason="odd")
    submit_run(made.run, made.record, LOCAL)
    wait_until(lambda: LOCAL.job(made.run, made.record).state == "ended", "the run is over")
    explanation = explain(made.run)
    (finding,) = explanation.findings
    assert (explanation.state, finding.cause) == ("failed", "crash")
    assert "odd on request" in reported(finding)
    assert "-00000.log: " in reported(finding)
    assert "dying 1" in reported(finding)
    assert "attempts before it: 1 crash at step" in reported(finding)
    shown = scaletrain("explain", made.run.run_id, code=0)
    assert "attempt 2 ended: the program failed." in shown.out
    assert f"scaletrain logs {made.run.run_id}" in shown.out
    assert '"schema": "scaletrain.explain/v1"' in scaletrain("explain", made.run.run_id, "--json").out


def test_a_run_that_was_never_submitted_is_reported_as_such(make_run: MakeRun) -> None:
    (finding,) = explain(make_run().run).findings
    assert finding.cause == "never-began"
    assert "never started" in reported(finding)
