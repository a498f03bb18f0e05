"""The restart policy: when an ended attempt is followed by another one."""

from __future__ import annotations

import pytest

from scaletrain_cli.launch.attempts import AttemptRecord
from scaletrain_cli.launch.exit_classification import ExitReason
from scaletrain_cli.launch.restart import attempts_without_progress, decide
from scaletrain_cli.spec.run import RestartsSpec

CODES: dict[ExitReason, int] = {"done": 0, "preempted": 75, "resize": 75, "wrong-nodes": 5, "usage": 2}


def attempts(*ends: tuple[ExitReason, int | None]) -> list[AttemptRecord]:
    """Return attempts with these (exit reason, step of the latest checkpoint at the end)."""
    found, before = [], None
    for number, (reason, checkpoint) in enumerate(ends, start=1):
        found.append(
            AttemptRecord(
                number,
                "local",
                "1",
                ("here",),
                started=0.0,
                checkpoint_at_start=before,
                ended=1.0,
                exit_code=CODES.get(reason, 1),
                reason=reason,
                last_checkpoint_step=checkpoint,
            )
        )
        before = checkpoint
    return found


def decide_last(history: list[AttemptRecord], restarts: RestartsSpec | None = None, cancelled: bool = False):  # type: ignore[no-untyped-def]
    last = history[-1]
    assert last.exit_code is not None
    assert last.reason is not None
    return decide(last.exit_code, last.reason, history, restarts or RestartsSpec(), cancelled)


def test_preemptions_use_no_budget_by_default() -> None:
    history = attempts(*[("preempted", step) for step in range(200)])
    assert decide_last(history).requeue


def test_a_preemption_budget_is_respected() -> None:
    assert decide_last(attempts(*[("preempted", 1)] * 2), RestartsSpec(preemption=2)).requeue
    assert decide_last(attempts(*[("time-limit", 1)] * 2), RestartsSpec(preemption=0)).requeue  # nobody's fault
    decision = decide_last(attempts(*[("preempted", 1)] * 3), RestartsSpec(preemption=2))
    assert (decision.requeue, decision.exit_code) == (False, 75), "its state is saved and the run can be resumed"
    assert decide_last(attempts(("preempted", 1)), RestartsSpec(preemption=0)).exit_code == 75
    assert decide_last(attempts(("out-of-grace", 1)), RestartsSpec(preemption=0)).exit_code == 1


def test_a_restart_on_more_nodes_uses_no_budget_and_is_no_failure_without_progress() -> None:
    none = RestartsSpec(preemption=0, node=0, crash=0)
    assert decide_last(attempts(*[("resize", 1)] * 20), none).requeue
    assert attempts_without_progress(attempts(("resize", 1), ("resize", 1), ("crash", 1))) == 1
    history = attempts(("preempted", 1), ("resize", 1), ("preempted", 1))
    assert decide_last(history, RestartsSpec(preemption=2)).requeue
    assert not decide_last(history, RestartsSpec(preemption=1)).requeue
    assert not decide_last(attempts(("resize", 1)), none, cancelled=True).requeue


def test_crashes_are_retried_within_their_budget_and_then_end_with_1() -> None:
    ends: list[tuple[ExitReason, int | None]] = [("crash", 10), ("killed", 20), ("crash", 30)]
    assert decide_last(attempts(*ends)).requeue
    decision = decide_last(attempts(*ends, ("crash", 40)))
    assert (decision.requeue, decision.exit_code) == (False, 1)
    assert "restarts.crash = 3 is used up" in decision.why


def test_a_budget_counts_all_failures_and_not_only_consecutive_ones() -> None:
    ends: list[tuple[ExitReason, int | None]] = [("crash", 10), ("preempted", 20), ("crash", 30), ("preempted", 40)]
    assert not decide_last(attempts(*ends, ("crash", 50)), RestartsSpec(crash=2)).requeue


def test_out_of_memory_is_not_retried_by_default() -> None:
    assert not decide_last(attempts(("oom", 10))).requeue
    assert decide_last(attempts(("oom", 10)), RestartsSpec(oom=1)).requeue


def test_out_of_host_memory_is_not_retried_by_default() -> None:
    assert not decide_last(attempts(("host-oom", 10))).requeue


@pytest.mark.parametrize("reason", ["node", "wrong-nodes", "hardware", "hang", "communication"])
def test_lost_and_wrong_nodes_have_their_own_budget(reason: ExitReason) -> None:
    assert decide_last(attempts((reason, 10)), RestartsSpec(node=1, crash=0)).requeue
    assert not decide_last(attempts((reason, 10), (reason, 20)), RestartsSpec(node=1)).requeue


@pytest.mark.parametrize("code", [2, 3, 4, 93])
def test_failures_that_a_restart_cannot_fix_stop_with_their_own_exit_code(code: int) -> None:
    decision = decide(code, "crash", attempts(("crash", 10)), RestartsSpec(), cancelled=False)
    assert (decision.requeue, decision.exit_code) == (False, code)


def test_a_finished_attempt_stops() -> None:
    decision = decide_last(attempts(("done", 10)))
    assert (decision.requeue, decision.exit_code) == (False, 0)


def test_a_cancelled_run_stops_even_when_preempted() -> None:
    decision = decide_last(attempts(("preempted", 10)), cancelled=True)
    assert (decision.requeue, decision.exit_code) == (False, 75)


def test_three_failures_in_a_row_without_a_newer_checkpoint_stop_with_93() -> None:
    plenty = RestartsSpec(crash=100, node=100)
    assert decide_last(attempts(("crash", None), ("crash", None)), plenty).requeue
    for ends in ([("crash", None)] * 3, [("crash", 10), ("crash", 10), ("killed", 10), ("crash", 10)]):
        decision = decide_last(attempts(*ends), plenty)  # type: ignore[arg-type]
        assert (decision.requeue, decision.exit_code) == (False, 93), ends


def test_a_newer_checkpoint_between_failures_counts_as_progress() -> None:
    history = attempts(("crash", None), ("crash", None), ("crash", 5), ("crash", 5), ("crash", 5))
    assert attempts_without_progress(history) == 2
    assert decide_last(history, RestartsSpec(crash=100)).requeue


def test_preemptions_between_failures_are_ignored() -> None:
    history = attempts(("crash", 5), ("crash", 5), ("preempted", 5), ("crash", 5), ("preempted", 5), ("crash", 5))
    assert decide_last(history, RestartsSpec(crash=100)).exit_code == 93
    assert decide_last([*history[:-1], attempts(("preempted", 5))[0]], RestartsSpec(crash=100)).requeue


def test_without_checkpoints_only_the_budgets_limit_the_restarts_of_a_program_that_saves_in_its_own_way() -> None:
    history = attempts(*[("preempted", None)] * 12)
    limits = RestartsSpec()
    assert not decide(75, "preempted", history, limits, False).requeue
    assert decide(75, "preempted", history, limits, False, progress_known=False).requeue
    failed = attempts(*[("node", None)] * 4)
    assert not decide(1, "node", failed, limits, False).requeue
    assert decide(1, "node", failed, limits, False, progress_known=False).requeue
    assert not decide(1, "crash", attempts(*[("crash", None)] * 4), limits, False, progress_known=False).requeue


def test_ten_preemptions_in_a_row_without_a_step_stop_with_93_and_name_the_setting_that_is_too_short() -> None:
    assert decide_last(attempts(*[("preempted", None)] * 9)).requeue
    idle: list[tuple[ExitReason, int | None]] = [("preempted", None)] * 5 + [("time-limit", None)] * 4
    idle += [("out-of-grace", None)]
    decision = decide_last(attempts(*idle))
    assert (decision.requeue, decision.exit_code) == (False, 93)
    assert "too short to start up" in decision.why
    assert decide_last(attempts(*idle, ("preempted", 1))).requeue
    with_a_crash = attempts(*idle[:5], ("crash", None), *idle[5:])
    assert decide_last(with_a_crash).exit_code == 93


def test_attempts_that_never_started_do_not_count_as_stuck() -> None:
    assert decide_last(attempts(*[("wrong-nodes", None)] * 5)).requeue


def test_checkpoints_that_no_node_can_read_are_tried_three_times() -> None:
    ends: list[tuple[ExitReason, int | None]] = [("unreadable", 10)] * 3
    assert decide_last(attempts(("crash", 10), *ends[:2])).requeue
    decision = decide_last(attempts(("crash", 10), *ends))
    assert (decision.requeue, decision.exit_code) == (False, 93)
