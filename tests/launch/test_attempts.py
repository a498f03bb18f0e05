"""The exit reason of an attempt, from the records of its nodes and ranks."""

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import (
    Decision,
    attempt_outcome,
    begin_attempt,
    close_unended,
    end_attempt,
    last_sign_of,
    newest_checkpoint_step,
    read_attempts,
)
from scaletrain_cli.launch.exit_classification import classify_exit
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.launch.restart import conclude_abandoned
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.worker.failures import Failure
from tests.launch.conftest import MakeRun
from tests.rundir.test_checkpoints import save


def node(code: int | None, *ranks: RankRecord, number: int = 0, ended: float = 9.0) -> NodeRecord:
    """Return the record of a node that ended with ``code``; None: it recorded no end."""
    failed = next((rank.rank for rank in ranks if rank.exit_code not in (0, 75)), None)
    end = {"ended": None if code is None else ended, "exit_code": code, "first_failure": failed}
    return NodeRecord(f"node-{number:04d}-n{number}", f"n{number}", number, 1, 1, 0.0, ranks, **end)  # type: ignore[arg-type]


def rank(number: int, code: int, killed_by_agent: bool = False) -> RankRecord:
    return RankRecord(number, 1, 0.0).end(code, 1.0, killed_by_agent)


def judged(
    nodes: list[NodeRecord], *failures: Failure, planned: int = 1, cancelled: bool = False
) -> tuple[int, str, str]:
    outcome = classify_exit(nodes, failures, planned, cancelled=cancelled)
    return outcome.exit_code, outcome.reason, outcome.message


def test_an_attempt_whose_ranks_all_finished_is_done_even_if_it_was_cancelled_later() -> None:
    assert judged([node(0, rank(0, 0))])[:2] == (0, "done")
    assert judged([node(0, rank(0, 0))], cancelled=True)[:2] == (0, "done")


def test_a_mix_of_done_and_preempted_is_preempted() -> None:
    assert judged([node(0, rank(0, 0)), node(75, rank(1, 75), number=1)], planned=2)[:2] == (75, "preempted")


def test_a_cancelled_attempt_has_the_reason_cancelled_and_keeps_its_exit_code() -> None:
    assert judged([node(75, rank(0, 75))], cancelled=True)[:2] == (75, "cancelled")


def test_a_killed_rank_is_named() -> None:
    code, reason, message = judged([node(1, rank(0, 0), rank(1, -9))])
    assert (code, reason) == (1, "killed")
    assert "rank 1 on node-0000-n0 was ended by SIGKILL" in message


def test_a_preemption_that_exceeds_the_grace_period_is_not_a_crash() -> None:
    code, reason, message = judged([node(1, rank(0, -9, killed_by_agent=True), rank(1, -9, killed_by_agent=True))])
    assert (code, reason) == (1, "out-of-grace")
    assert "had not saved its state when the grace period ended" in message


def test_a_rank_that_cannot_be_killed_counts_as_a_node_failure() -> None:
    hanging = NodeRecord("n", "n", 0, 1, 1, 0.0, (RankRecord(0, 1, 0.0),), ended=9.0, exit_code=1, first_failure=0)
    code, reason, message = judged([hanging])
    assert (code, reason) == (1, "node")
    assert "could not be killed" in message


def test_a_segmentation_fault_is_a_crash() -> None:
    assert judged([node(1, rank(0, -11))])[1] == "crash"


@pytest.mark.parametrize(("reason", "code"), [("oom", 1), ("nan", 93), ("wrong-nodes", 5), ("crash", 1)])
def test_the_failure_reason_that_a_rank_records_is_used(reason: str, code: int) -> None:
    failure = Failure(0, reason, "because", code)
    assert judged([node(code, rank(0, code))], failure) == (code, reason, "rank 0 on node-0000-n0: because")


def test_out_of_memory_takes_precedence_over_broken_connections() -> None:
    failures = [Failure(0, "crash", "connection closed by peer", 1), Failure(3, "oom", "tried to allocate 2 GiB", 1)]
    nodes = [node(1, rank(0, 1)), node(1, rank(3, 1), number=1, ended=10.0)]
    assert judged(nodes, *failures, planned=2) == (1, "oom", "rank 3 on node-0001-n1: tried to allocate 2 GiB")


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_usage_error_is_not_a_crash(code: int) -> None:
    assert judged([node(code, rank(0, code))])[:2] == (code, "usage")


def test_an_unknown_reason_is_a_crash() -> None:
    assert judged([node(1, rank(0, 1))], Failure(0, "gremlins", "boo", 1))[1] == "crash"


def test_a_node_that_disappeared_is_a_lost_node_whatever_the_other_nodes_did() -> None:
    assert judged([node(75, rank(0, 75)), node(None, number=1)], planned=2)[:2] == (1, "node")
    assert judged([node(75, rank(0, 75))], planned=2)[:2] == (1, "node")
    assert judged([])[:2] == (1, "node")
    assert "node-0000-n0" in judged([node(None)])[2]


def test_a_lost_node_explains_crashes_and_hangs_elsewhere_but_no_recorded_failure_reason() -> None:
    lost = node(None, number=1)
    code, reason, message = judged([node(1, rank(0, 1)), lost], planned=2)
    assert (code, reason) == (1, "node")
    assert "node-0001-n1; then rank 0 on node-0000-n0" in message
    assert judged([node(1, rank(0, -9, killed_by_agent=True)), lost], planned=2)[1] == "node"
    assert judged([node(1, rank(0, -9)), lost], planned=2)[1] == "killed"
    assert judged([node(1, rank(0, 1)), lost], Failure(0, "oom", "full", 1), planned=2)[1] == "oom"
    assert judged([node(1, rank(0, 1))], planned=2)[1] == "crash"  # the other may not have started yet


def test_a_node_that_ended_its_ranks_because_of_another_node_is_not_the_cause() -> None:
    first_to_end = node(1, rank(0, -9, killed_by_agent=True), ended=8.0)
    assert judged([first_to_end, node(1, rank(1, 1), number=1)], planned=2)[2].startswith("rank 1 on node-0001")


def test_the_exit_code_of_an_agent_that_could_not_start_is_kept() -> None:
    outcome = classify_exit([], [], 1, cancelled=False, launcher_exit_code=2)
    assert (outcome.exit_code, outcome.reason) == (2, "usage")


def test_the_record_of_an_attempt_has_its_start_its_outcome_and_the_restart_decision(make_run: MakeRun) -> None:
    made = make_run()
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="77", nodes=("n1", "n2"))
    (began,) = read_attempts(made.run)
    assert (began.number, began.scheduler, began.job_id, began.nodes) == (1, "slurm", "77", ("n1", "n2"))
    assert (began.ended, began.reason, began.decision) == (None, None, None)
    write_node_record(made.run, number, node(1, rank(0, -9)))
    outcome = attempt_outcome(made.run, made.record.spec, number, cancelled=False)
    end_attempt(made.run, made.record.spec, number, outcome, Decision(True, 1, "once more"))
    (ended,) = read_attempts(made.run)
    assert (ended.exit_code, ended.reason, ended.decision) == (1, "killed", Decision(True, 1, "once more"))


def test_an_attempt_without_a_live_supervisor_is_closed_by_its_records(make_run: MakeRun) -> None:
    made = make_run()
    for code in (75, None):
        number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))
        write_node_record(made.run, number, node(code, rank(0, 75)))
    close_unended(made.run, made.record.spec)
    assert [attempt.reason for attempt in read_attempts(made.run)] == ["preempted", "node"]
    assert close_unended(made.run, made.record.spec) == []


def test_a_run_that_recorded_its_last_step_has_finished_whatever_ends_its_nodes(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2")
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
    write_node_record(made.run, number, node(0, rank(1, 0), number=1))
    write_node_record(made.run, number, node(None, rank(0, 0)))  # its agent was killed
    assert attempt_outcome(made.run, made.record.spec, number, cancelled=False).reason == "node"
    record_event(made.run, "finished", step=20)
    outcome = attempt_outcome(made.run, made.record.spec, number, cancelled=True)
    assert (outcome.exit_code, outcome.reason, outcome.against) == (0, "done", ())
    assert "node-0000-n0" in outcome.message
    conclude_abandoned(made.run, made.record)
    more = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
    assert attempt_outcome(made.run, made.record.spec, more, cancelled=False).reason == "node"


@pytest.mark.parametrize(("signaled", "reason"), [((), "node"), (("n0",), "node"), (("n0", "n1"), "out-of-grace")])
def test_nodes_that_were_told_to_save_are_not_lost(make_run: MakeRun, signaled: tuple[str, ...], reason: str) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2")
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0", "n1"))
    for index in range(2):
        write_node_record(made.run, number, node(None, rank(index, 0), number=index))
    for name in signaled:
        record_event(made.run, "signal", signal="SIGTERM", attempt=number, node=name)
    outcome = attempt_outcome(made.run, made.record.spec, number, cancelled=False)
    assert outcome.reason == reason


def test_an_attempt_without_a_recorded_end_ended_with_its_last_record(make_run: MakeRun) -> None:
    made = make_run()
    number = begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=("n0",))
    (began,) = read_attempts(made.run)
    assert last_sign_of(made.run, began) == began.started
    append_line(made.run.metrics, {"step": 1, "time": began.started + 60, "attempt": number})
    append_line(made.run.metrics, {"step": 2, "time": began.started + 90, "attempt": number})
    (closed,) = close_unended(made.run, made.record.spec)
    assert closed.ended == began.started + 90
    assert read_attempts(made.run) == [closed]


def test_ranks_that_stopped_on_a_signal_saved_what_is_on_disk(make_run: MakeRun) -> None:
    made = make_run()
    number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))
    write_node_record(made.run, number, node(75, rank(0, 75)))
    unsaved = attempt_outcome(made.run, made.record.spec, number, cancelled=False)
    assert (unsaved.reason, unsaved.message) == (
        "preempted",
        "the ranks stopped before there was a checkpoint",
    )
    save(made.run.checkpoints, 4)
    saved = attempt_outcome(made.run, made.record.spec, number, cancelled=False)
    assert saved.message == "the ranks stopped, and the latest checkpoint is at step 4"
    stopped = attempt_outcome(made.run, made.record.spec, number, cancelled=True)
    assert stopped.message == "cancelled; the ranks stopped, and the latest checkpoint is at step 4"


def test_the_exit_code_of_a_program_counts_after_its_last_step(make_run: MakeRun) -> None:
    made = make_run("code.command=[python, train.py]", "cluster.gpus_per_node=1")
    number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))
    record_event(made.run, "finished", step=20)
    write_node_record(made.run, number, node(1, rank(0, 1)))
    assert attempt_outcome(made.run, made.record.spec, number, cancelled=False).reason == "crash"


def test_a_checkpoint_with_a_missing_or_shortened_file_is_not_the_newest(make_run: MakeRun) -> None:
    made = make_run()
    for step in (2, 4, 6):
        save(made.run.checkpoints, step)
    assert newest_checkpoint_step(made.run, made.record.spec) == 6
    (made.run.checkpoints / "step-00000006" / "rank-00000.pt").write_bytes(b"short")
    assert newest_checkpoint_step(made.run, made.record.spec) == 4
    (made.run.checkpoints / "step-00000004" / "sub" / "rank-00001.pt").unlink()
    assert newest_checkpoint_step(made.run, made.record.spec) == 2


def test_a_truncated_attempt_record_is_named_and_its_number_stays_taken(make_run: MakeRun) -> None:
    made = make_run()
    for _ in range(2):
        number = begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",))
    (made.run.attempt(number) / "attempt.json").write_text('{"number": 2, "sched')
    with pytest.raises(UsageError, match=r"attempts/0002/attempt\.json is damaged"):
        read_attempts(made.run)
    assert begin_attempt(made.run, made.record.spec, scheduler="local", job_id="1", nodes=("n",)) == 3
