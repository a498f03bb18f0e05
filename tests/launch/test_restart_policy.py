"""The restart policy: when an ended attempt is followed by another one."""

from typing import Any

import pytest

from scaletrain_cli.launch.attempts import AttemptRecord
from scaletrain_cli.launch.restart import attempts_without_progress, decide, may_restart_in_place
from scaletrain_cli.spec.run import RestartsSpec

CODES = {"done": 0, "preempted": 75, "resize": 75, "wrong-nodes": 5}
NODE = ("node", "wrong-nodes", "hardware", "hang", "communication")
PLENTY = {"crash": 100, "node": 100}
NONE = {"preemption": 0, "node": 0, "crash": 0}
NEVER_BEGAN = "preempted " * 5 + "time-limit " * 4 + "out-of-grace"


def attempts(history: str, seconds: float = 1.0) -> list[AttemptRecord]:
    """Return attempts that ended as in `crash:10 node`: for a reason, with the latest checkpoint at a step, if any.

    `lost`: a node was lost, and the scheduler restarts the job for free.
    """
    found: list[AttemptRecord] = []
    before = None
    for number, (reason, _, step) in enumerate((end.partition(":") for end in history.split()), start=1):
        ended: dict[str, Any] = {"reason": reason, "exit_code": CODES.get(reason, 1), "ended": seconds}
        if reason == "lost":
            ended |= {"reason": "node", "free_of_charge": True}
        checkpoint = int(step) if step else None
        ended |= {"checkpoint_at_start": before, "last_checkpoint_step": checkpoint}
        found.append(AttemptRecord(number, "local", "1", ("here",), started=0.0, **ended))
        before = checkpoint
    return found


def decide_last(history: str, limits: dict[str, int], seconds: float = 1.0, **more: bool):  # type: ignore[no-untyped-def]
    ended = attempts(history, seconds)
    code, reason = ended[-1].exit_code, ended[-1].reason
    assert code is not None
    assert reason is not None
    return decide(code, reason, ended, RestartsSpec(**limits), more.pop("cancelled", False), **more)


@pytest.mark.parametrize(
    ("history", "limits", "exit_code"),
    [
        # Preemptions use no budget by default. With one, the state is saved when it is used up: the run can be resumed.
        (" ".join(f"preempted:{step}" for step in range(200)), {}, None),
        ("preempted:1 preempted:1", {"preemption": 2}, None),
        ("preempted:1 preempted:1 preempted:1", {"preemption": 2}, 75),
        ("preempted:1", {"preemption": 0}, 75),
        ("out-of-grace:1", {"preemption": 0}, 1),
        ("time-limit:1 time-limit:1", {"preemption": 0}, None),
        # A restart on more nodes uses no budget.
        ("resize:1 " * 20, NONE, None),
        ("preempted:1 resize:1 preempted:1", {"preemption": 2}, None),
        ("preempted:1 resize:1 preempted:1", {"preemption": 1}, 75),
        # Crashes have a budget, which counts all of them and not only consecutive ones.
        ("crash:10 killed:20 crash:30", {}, None),
        ("crash:10 killed:20 crash:30 crash:40", {}, 1),
        ("crash:10 preempted:20 crash:30 preempted:40 crash:50", {"crash": 2}, 1),
        # So do other causes that a program of the user's may state.
        ("data:10 data:20 data:30", {}, None),
        ("data:10 crash:20 data:30 data:40", {}, 1),
        # A lack of memory is not tried again by default.
        ("oom:10", {}, 1),
        ("oom:10", {"oom": 1}, None),
        ("host-oom:10", {}, 1),
        # Lost and wrong nodes have a budget of their own.
        *((f"{reason}:10", {"node": 1, "crash": 0}, None) for reason in NODE),
        *((f"{reason}:10 {reason}:20", {"node": 1}, 1) for reason in NODE),
        ("done:10", {}, 0),
        # Three failures in a row without a newer checkpoint end the run. Preemptions between them are ignored.
        ("crash crash", PLENTY, None),
        ("crash crash crash", PLENTY, 93),
        ("crash:10 crash:10 killed:10 crash:10", PLENTY, 93),
        ("crash crash crash:5 crash:5 crash:5", PLENTY, None),
        ("crash:5 crash:5 preempted:5 crash:5 preempted:5 crash:5", PLENTY, 93),
        ("crash:5 crash:5 preempted:5 crash:5 preempted:5 preempted:5", PLENTY, None),
        # So do ten preemptions in a row without a step.
        ("preempted " * 9, {}, None),
        (NEVER_BEGAN, {}, 93),
        (f"{NEVER_BEGAN} preempted:1", {}, None),
        (NEVER_BEGAN.replace("time-limit", "crash time-limit", 1), {}, 93),
        # A lost node whose job the scheduler restarts for free is a preemption, not a failure.
        ("lost " * 9, {}, None),
        ("lost " * 10, {}, 93),
        ("lost " * 9 + "preempted", {}, 93),
        ("crash:5 crash:5 lost:5 crash:5", PLENTY, None),
        ("lost:1 lost:2", {"node": 0}, None),
        ("lost:1 lost:2", {"preemption": 1}, 1),
        # Attempts that never started are not stuck, and checkpoints that no node can read are tried three times.
        ("wrong-nodes " * 5, {}, None),
        ("crash:10 unreadable:10 unreadable:10", {}, None),
        ("crash:10 unreadable:10 unreadable:10 unreadable:10", {}, 93),
    ],
)
def test_a_history_goes_on_or_ends_with_a_code(history: str, limits: dict[str, int], exit_code: int | None) -> None:
    decision = decide_last(history, limits)
    assert decision.requeue == (exit_code is None), decision
    assert decision.requeue or decision.exit_code == exit_code


@pytest.mark.parametrize("code", [2, 3, 4, 93])
def test_a_failure_that_no_restart_can_fix_keeps_its_code(code: int) -> None:
    decision = decide(code, "crash", attempts("crash:10"), RestartsSpec(), cancelled=False)
    assert (decision.requeue, decision.exit_code) == (False, code)


@pytest.mark.parametrize("reason", ["preempted", "resize"])
def test_a_cancelled_run_stops(reason: str) -> None:
    decision = decide_last(f"{reason}:10", {}, cancelled=True)
    assert (decision.requeue, decision.exit_code) == (False, 75)


def test_a_decision_names_the_budget_or_the_setting_that_is_too_short() -> None:
    assert "restarts.crash = 3 is used up" in decide_last("crash:10 killed:20 crash:30 crash:40", {}).why
    assert "too short to start up" in decide_last(NEVER_BEGAN, {}).why


def test_attempts_without_progress_are_those_since_the_newest_checkpoint() -> None:
    assert attempts_without_progress(attempts("crash crash crash:5 crash:5 crash:5")) == 2
    assert attempts_without_progress(attempts("resize:1 resize:1 crash:1")) == 1


@pytest.mark.parametrize(
    ("history", "may"),
    [
        *((reason, True) for reason in ("crash", "killed", "oom", "host-oom", "nan", "hang", "communication")),
        *((f"{reason}:9", False) for reason in ("preempted", "out-of-grace", "time-limit", "idle", "cancelled")),
        ("resize:9", True),  # onto nodes of the job that have returned
        *((f"{reason}:9", False) for reason in ("node", "hardware", "wrong-nodes")),
        ("crash crash", False),  # at the same step: another node may differ
        ("crash crash:5", True),
        ("crash:5 crash:5", True),
        ("crash:5 crash:5 crash:5", False),
        ("crash preempted crash", False),
    ],
)
def test_an_attempt_may_follow_on_the_same_nodes_if_they_were_kept_and_may_be_healthy(history: str, may: bool) -> None:
    assert may_restart_in_place(attempts(history)) == may


def test_an_attempt_may_follow_in_the_job_without_the_node_that_is_to_blame() -> None:
    for reason in ("node", "hardware", "wrong-nodes", "hang"):
        assert may_restart_in_place(attempts(f"{reason}:9"), against=("n2",))


@pytest.mark.parametrize(("history", "again"), [("preempted " * 12, True), ("node " * 4, True), ("crash " * 4, False)])
def test_without_checkpoints_only_budgets_limit_a_program_that_saves_in_its_own_way(history: str, again: bool) -> None:
    assert not decide_last(history, {}, 700.0).requeue
    assert decide_last(history, {}, 700.0, progress_known=False).requeue == again


def test_a_program_that_ends_as_preempted_soon_after_each_start_is_not_restarted_for_ever() -> None:
    assert decide_last("preempted " * 9, {}, progress_known=False).requeue
    assert decide_last("preempted " * 10, {}, progress_known=False).code == "launch.stop-no-progress-preempted"
