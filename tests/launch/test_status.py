"""The status of a run, from its directory and the state of its job."""

import contextlib
import json

import pytest

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.attempts import Decision, Outcome, begin_attempt, end_attempt
from scaletrain_cli.launch.cancel import wait_for_end
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.job import Job, JobState
from scaletrain_cli.launch.resume import inspect_resume
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.measured import MODEL_STATES, Figure, Measured, StageFigures, write_measured
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.ui.status import measures_text, sources_text
from tests.launch.conftest import MadeRun, MakeRun
from tests.launch.test_resume import Cluster, attempt, commit


@pytest.fixture
def made(make_run: MakeRun) -> MadeRun:
    return make_run()


def status(made: MadeRun, state: JobState) -> RunStatus:
    cluster = Cluster()
    cluster.state = state
    return run_status(made.run, cluster)


def begin(made: MadeRun) -> None:
    begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))


def test_a_pending_job_is_queued_and_a_requeued_one_is_preempted(made: MadeRun) -> None:
    assert status(made, "queued").state == "queued"
    attempt(made, 75, "preempted", requeue=True)
    assert status(made, "queued").state == "preempted"
    assert status(made, "running").state == "preempted"  # between two attempts
    begin(made)
    assert status(made, "running").state == "running"
    attempt(made, 1, "crash", requeue=True)
    assert status(made, "queued").state == "queued"


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [(0, "done", "finished"), (1, "crash", "failed"), (93, "nan", "failed"), (75, "preempted", "preempted")],
)
def test_an_ended_job_has_the_state_of_its_last_attempt(made: MadeRun, code: int, reason: str, state: str) -> None:
    attempt(made, code, reason)
    found = status(made, "ended")
    assert found.state == state
    assert f"{reason} happened; so it was decided" in found.why
    assert status(made, "unknown").state == state  # the scheduler has forgotten the job; the run directory has not


def test_a_cancelled_run_is_cancelled_unless_it_finished_first(made: MadeRun) -> None:
    made.run.stop_file.touch()
    begin(made)
    assert status(made, "running").state == "running"
    assert status(made, "ended").state == "cancelled"
    attempt(made, 0, "done")
    assert status(made, "ended").state == "finished"


class Says(Cluster):
    """A back end that returns this job, or raises this error."""

    def __init__(self, answer: Job | SchedulerError) -> None:
        super().__init__()
        self.answer = answer

    def job(self, run: RunDir, record: RunRecord) -> Job:
        if isinstance(self.answer, SchedulerError):
            raise self.answer
        return self.answer


SILENT = SchedulerError("squeue did not answer within 15 s.")
# The answers of which none says that anything was lost, with the words to be shown and the state that follows.
NOTHING_LOST = [
    (SILENT, "squeue did not answer within 15 s", "unknown"),
    (Job("7", "unknown", "was started on far"), "was started on far", "unknown"),
    (Job("7", "queued", "PENDING (BeginTime)"), "PENDING (BeginTime)", "queued"),
    (Job("7", "suspended", "SUSPENDED"), "SUSPENDED", "suspended"),
    (Job("7", "ending", "COMPLETING"), "COMPLETING", "ending"),
    (Job("7", "running", "RUNNING"), "RUNNING", "running"),
    (Job("7", "ended", "CANCELLED", cause="cancelled"), "CANCELLED", "cancelled"),
    (Job("7", "ended", "PREEMPTED", cause="preempted"), "PREEMPTED", "preempted"),
    (Job("7", "ended", "no process is left"), "no process is left", "failed"),
]


@pytest.mark.parametrize(("answer", "words", "state"), NOTHING_LOST)
def test_a_node_is_reported_as_lost_only_if_the_scheduler_reports_it(
    made: MadeRun, answer: Job | SchedulerError, words: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(made)
    found = run_status(made.run, Says(answer))
    assert (found.state, found.job.state) == (state, getattr(answer, "state", "unknown"))
    monkeypatch.setattr("scaletrain_cli.launch.status.backend_for", lambda name: Says(answer))
    explained = explain(made.run)
    said = [found.why, explained.state, json.dumps(explained.to_json()["findings"])]
    with contextlib.suppress(SchedulerError):
        said.append(str(inspect_resume(made.run, Says(answer)).why_ended))
    assert all(words in text for text in said if text != state)
    assert not [text for text in said if "lost" in text or "dministrator" in text]
    assert ("is not known" in said[2]) == (words in ("was started on far", "no process is left") or answer is SILENT)
    over = getattr(answer, "state", "") == "ended"
    assert any("resume" in action for finding in explained.findings for action in finding.actions) == (
        over or state == "suspended"
    )


def test_a_node_that_the_scheduler_reports_as_lost_is_the_cause(made: MadeRun) -> None:
    begin(made)
    found = run_status(made.run, Says(Job("7", "ended", "NODE_FAIL", cause="node")))
    assert found.state == "failed"
    assert "its job lost a node" in found.why
    assert "NODE_FAIL" in found.why


@pytest.mark.parametrize("answer", [SILENT, Job("7", "queued", "PENDING (BeginTime)")])
def test_an_attempt_that_the_scheduler_ended_is_not_the_end_of_its_run(
    made: MadeRun, answer: Job | SchedulerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="7", nodes=("n",))
    decision = Decision(False, 1, "Slurm is ending the job", left_to_scheduler=True)
    end_attempt(made.run, made.record.spec, number, Outcome(1, "node", recorded("n is gone")), decision)
    found = run_status(made.run, Says(answer))
    assert found.state == ("unknown" if answer is SILENT else "queued")
    monkeypatch.setattr("scaletrain_cli.launch.status.backend_for", lambda name: Says(answer))
    reported = json.dumps(explain(made.run).to_json())
    follows = "whether another attempt follows is not known" if answer is SILENT else "another attempt follows"
    assert follows in reported
    assert "no attempt follows" not in reported


def test_a_preempted_run_whose_job_ended_does_not_wait(made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(made, 75, "preempted", requeue=True)
    gone = Says(Job("7", "ended", "Slurm no longer lists the job"))
    status = run_status(made.run, gone)
    assert is_over(made.run, status)
    assert not is_over(made.run, run_status(made.run, Says(SILENT)))
    monkeypatch.setattr("scaletrain_cli.launch.status.backend_for", lambda name: gone)
    (finding,) = explain(made.run).findings
    assert "no attempt follows, since the job is over" in finding.evidence[-1].text
    assert any(f"scaletrain resume {made.run.run_id}" in action for action in finding.actions)


def test_a_scheduler_that_does_not_answer_leaves_the_state_unknown_and_the_rest_shown(made: MadeRun) -> None:
    append_line(made.run.metrics, {"step": 4, "loss": 2.0})
    found = run_status(made.run, Says(SILENT))
    assert (found.state, found.step, found.why) == ("unknown", 4, "squeue did not answer within 15 s")
    job = found.to_json()["job"]
    assert (job["state"], job["detail"]) == ("unknown", "squeue did not answer within 15 s")
    assert job["code"] == "recorded.text"


def test_the_scheduler_is_not_queried_for_a_finished_run(made: MadeRun) -> None:
    class NotToBeAsked(Cluster):
        def job(self, run: RunDir, record: RunRecord) -> Job:
            raise AssertionError("nothing can follow, and two hundred questions to a controller are too many")

    submit_run(made.run, made.record, Cluster())
    attempt(made, 0, "done")
    found = run_status(made.run, NotToBeAsked())
    assert (found.state, found.job_id) == ("finished", "job-1")


def test_a_scheduler_that_is_down_for_a_moment_does_not_end_the_wait_for_a_run(made: MadeRun) -> None:
    """As of a drill, which is one of many that run for hours."""
    answers = [SchedulerError("squeue did not answer."), Job("7", "ending"), Job("7", "ended")]

    class Restarting(Cluster):
        def job(self, run: RunDir, record: RunRecord) -> Job:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    submit_run(made.run, made.record, Cluster())
    attempt(made, 0, "done")
    assert wait_for_end(made.run, Restarting(), 1200.0, lambda status: None).state == "finished"
    assert answers == []


def test_each_figure_is_taken_from_the_latest_line_that_has_it(made: MadeRun) -> None:
    submit_run(made.run, made.record, Cluster())
    evaluated = {"validation_loss": 3.1, "validation_loss/web": 3.3, "validation_loss/code": 2.0}
    append_line(made.run.metrics, {"step": 1, "loss": 3.0, **evaluated, "tokens_per_second": 10.0})
    append_line(made.run.metrics, {"step": 2, "loss": 2.5, "loss/web": 2.75, "tokens_per_second": 11.0})
    with made.run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    commit(made, 2)
    record_event(made.run, "resumed", step=1, lost_steps=4)
    record_event(made.run, "resumed", step=2, lost_steps=3)
    begin(made)
    begin(made)
    found = status(made, "running")
    assert (found.step, found.total_steps, found.loss, found.validation_loss) == (2, 20, 2.5, 3.1)
    assert (found.tokens_per_second, found.last_checkpoint_step) == (11.0, 2)
    assert (found.source_losses, found.source_validation_losses) == ({"web": 2.75}, {"web": 3.3, "code": 2.0})
    assert sources_text(found) == "web loss 2.7500, validation 3.3000; code validation 2.0000"
    assert (found.steps_lost_total, found.restarts, found.attempt) == (7, 1, 2)
    assert (found.name, found.scheduler, found.job_id, found.nodes) == ("fake", "local", "7", ("n",))
    assert json.loads(json.dumps(found.to_json()))["schema"] == "scaletrain.status/v1"


def test_steps_since_the_checkpoint_are_lost_from_the_end_of_an_attempt_on(made: MadeRun) -> None:
    record_event(made.run, "started", step=0)
    append_line(made.run.metrics, {"step": 9, "loss": 2.5})
    commit(made, 6)
    begin(made)
    assert status(made, "running").steps_lost_total == 0
    attempt(made, 1, "crash")
    record_event(made.run, "attempt-ended", attempt=2, reason="crash")
    assert status(made, "ended").steps_lost_total == 3
    begin(made)
    assert status(made, "running").steps_lost_total == 3, "before the next attempt has recorded them"
    record_event(made.run, "resumed", step=6, lost_steps=3)
    assert status(made, "running").steps_lost_total == 3


VISION = "model={family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic}"


def test_a_loss_that_is_not_finite_is_null_and_not_the_one_before(made: MadeRun) -> None:
    begin(made)
    append_line(made.run.metrics, {"step": 4, "loss": 2.5})
    append_line(made.run.metrics, {"step": 5, "loss": None, "grad_norm": 1.5})
    found = status(made, "running")
    assert (found.step, found.loss, found.grad_norm) == (5, None, 1.5)
    append_line(made.run.metrics, {"step": 4, "validation_loss": 2.0})
    append_line(made.run.metrics, {"step": 8, "validation_loss": None})
    assert status(made, "running").validation_loss is None


def test_lines_of_another_form_are_left_out(made: MadeRun) -> None:
    """Records of another program, or after damage: text in place of numbers, events without a name."""
    begin(made)
    append_line(made.run.metrics, {"step": 4, "loss": 2.5, "learning_rate": 0.1, "validation_loss": 2.0})
    for line in (
        {"step": "5", "loss": 2.0},
        {"step": 5.5, "loss": 2.0},
        {"step": 6, "loss": "nan", "grad_norm": [1]},
        {"step": 7, "loss": [], "validation_loss": {}},
    ):
        append_line(made.run.metrics, line)
    for event in ({}, {"event": 3}, {"event": "stragglers"}, {"event": "resumed", "lost_steps": "9", "attempt": "1"}):
        append_line(made.run.events, event)
    append_line(made.run.events, {"event": "rolled-back", "lost_steps": 3})
    found = status(made, "running")
    assert (found.step, found.loss, found.grad_norm, found.validation_loss) == (4, 2.5, None, 2.0)
    assert (found.straggler, found.steps_lost_total) == (None, 3)
    assert measures_text(found) == "loss 2.5000, validation 2.0000"


def test_the_status_of_a_vision_run_has_images_and_accuracy_beside_the_loss(make_run: MakeRun) -> None:
    made = make_run(VISION, "data={source: images}")
    append_line(made.run.metrics, {"step": 5, "loss": 2.0, "samples_per_second": 1260.0})
    evaluated = {"validation_loss": 2.5, "validation_top1": 0.7123, "validation_top5": 0.9, "validation_images": 64}
    append_line(made.run.metrics, {"step": 5, **evaluated})
    append_line(made.run.metrics, {"step": 6, "loss": 1.5, "samples_per_second": 1300.0})
    begin(made)
    found = status(made, "running")
    assert (found.loss, found.validation_loss, found.unit, found.samples_per_second) == (1.5, 2.5, "images", 1300.0)
    assert (found.tokens_per_second, found.validation_measures) == (None, {"top1": 0.7123, "top5": 0.9})
    assert measures_text(found) == "loss 1.5000, validation 2.5000, top-1 71.2 %, 1.30 k images/s"
    answer = found.to_json()
    assert (answer["unit"], answer["samples_per_second"]) == ("images", 1300.0)
    assert answer["validation_measures"] == {"top1": 0.7123, "top5": 0.9}


def test_a_run_that_was_never_started_has_the_state_unknown(made: MadeRun) -> None:
    found = run_status(made.run)
    assert (found.state, found.why, found.step, found.loss) == ("unknown", "never started", 0, None)


def test_a_cancelled_run_has_the_state_unknown_while_the_scheduler_does_not_answer(made: MadeRun) -> None:
    made.run.stop_file.touch()
    begin(made)
    assert status(made, "unknown").state == "unknown"
    attempt(made, 75, "cancelled")
    assert status(made, "unknown").state == "cancelled"


def test_no_restart_is_reported_after_the_job_has_ended(made: MadeRun) -> None:
    attempt(made, 1, "crash", requeue=True)
    assert "will not happen; `scaletrain resume` continues the run" in status(made, "ended").why
    assert "will not come" not in status(made, "queued").why


def test_status_contains_the_measurements(made: MadeRun) -> None:
    assert status(made, "running").to_json()["measured"] is None
    begin(made)
    figures = {name: Figure(100, 100) for name in MODEL_STATES}
    write_measured(made.run, Measured(1, 2, 2, "cpu", 0, (StageFigures(0, figures),)))
    answer = json.loads(json.dumps(status(made, "running").to_json()))["measured"]
    assert answer["stages"][0]["gradients"] == {"planned": 100, "measured": 100, "difference": 0.0}


def test_a_stopped_run_says_once_how_it_goes_on(made: MadeRun) -> None:
    begin(made)
    outcome = Outcome(75, "preempted", recorded("the ranks stopped"))
    decision = Decision.because(False, 75, Reason("local.supervisor-stopped"), left_to_scheduler=True)
    end_attempt(made.run, made.record.spec, 1, outcome, decision)
    assert status(made, "ended").why.count("`scaletrain resume` continues the run") == 1
