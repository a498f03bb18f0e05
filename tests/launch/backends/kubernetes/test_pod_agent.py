"""The agents of a gang as real processes: rendezvous, training, SIGTERM, and one decision for all pods."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import Decision, signaled_nodes
from scaletrain_cli.launch.backends.kubernetes import pod_agent
from scaletrain_cli.launch.backends.kubernetes.pod import AGENT_SECONDS
from scaletrain_cli.launch.backends.kubernetes.pod_agent import DECISION_SECONDS, exit_code_for
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.node.watch import UNKILLABLE_SECONDS
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.record import add_revision, documents_of, place_documents, read_record
from tests.launch.backends.kubernetes.pods import WORKLOAD, Gang, put_documents
from tests.launch.conftest import MadeRun, MakeRun, make_plan
from tests.waiting import wait_until

TWO_NODES = ("cluster.scheduler=kubernetes", "cluster.nodes=2")
StartGang = Callable[..., Gang]


def test_pods_rendezvous_train_and_exit_with_0(make_run: MakeRun, start_gang: StartGang) -> None:
    gang = start_gang(make_run(*TWO_NODES))
    assert gang.wait() == [0, 0]
    (attempt,) = gang.attempts
    assert (attempt.scheduler, attempt.job_id, attempt.reason) == ("kubernetes", WORKLOAD, "done")
    assert attempt.nodes == ("gpu-0.ec2.internal", "gpu-1.ec2.internal")
    assert "rank 0: up\n" in gang.output[0]  # the ranks' files on the volume are also in the pods' logs
    assert "rank 3: up\n" in gang.output[1]
    assert "attempt 1 begins in a run directory of the pods' own\n" in gang.output[1]


def test_a_preflight_alone_leaves_nothing_on_the_volume(make_run: MakeRun, start_gang: StartGang) -> None:
    gang = start_gang(make_run(*TWO_NODES, env={"SCALETRAIN_ONLY": "preflight"}))
    assert gang.wait() == [0, 0]
    assert not gang.run.path.exists()


def test_evicted_pods_exit_with_75_and_the_next_gang_continues(make_run: MakeRun, start_gang: StartGang) -> None:
    made = make_run(*TWO_NODES, stay={"1:*": 1})
    gang = start_gang(made)
    gang.wait_until_up()
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [75, 75]
    decision = gang.attempts[0].decision
    assert (decision.requeue, decision.exit_code) == (True, 75)
    assert decision.reason.code == "launch.restart-unlimited"
    assert decision.why == "preempted: restart 1 (restarts.preemption)"
    assert start_gang(made, 1).wait() == [0, 0]
    assert [attempt.reason for attempt in gang.attempts] == ["preempted", "done"]


def test_an_idle_gang_saves_and_ends_with_93_so_that_no_other_follows(make_run: MakeRun, start_gang: StartGang) -> None:
    made = make_run(*TWO_NODES, "cluster.idle_timeout=10s", steps=20, stay={"1:*": 3}, silence=600)
    gang = start_gang(made)
    assert gang.wait() == [93, 93]
    (attempt,) = gang.attempts
    assert (attempt.reason, attempt.exit_code, attempt.last_checkpoint_step) == ("idle", 75, 3)
    assert "launch.stop-idle" in gang.termination_log(1).read_text()


def test_after_a_crash_the_pods_begin_the_next_attempt_until_the_budget_ends(
    make_run: MakeRun, start_gang: StartGang
) -> None:
    gang = start_gang(
        make_run(
            *TWO_NODES, "restarts.crash=1", die={"*:2": 7}, die_at=9, checkpoint_every=1, steps=99, stay={"1:0": 5}
        )
    )
    assert gang.wait() == [93, 93]
    assert [attempt.reason for attempt in gang.attempts] == ["crash", "crash"]
    assert gang.attempts[0].nodes == gang.attempts[1].nodes
    assert [attempt.lost_nodes_free for attempt in gang.attempts] == [True, True]
    assert "attempt 2 begins" in gang.output[1]
    assert read_events(gang.run)[-1]["event"] == "stopped"


def test_no_attempt_follows_in_a_pod_that_was_asked_to_leave(make_run: MakeRun, start_gang: StartGang) -> None:
    """The kubelet asks once. The ranks elsewhere then end with an error of communication, or as here."""
    gang = start_gang(make_run(*TWO_NODES, stay={"*:*": 1}, steps=99))
    gang.wait_until_up()
    gang.pods[1].send_signal(signal.SIGTERM)
    wait_until(lambda: signaled_nodes(gang.run, 1), "the agent of pod 1 has the signal")
    wait_until(
        lambda: all(node.ranks for node in read_node_records(gang.run, 1)), "the agents have recorded their ranks"
    )
    (node, _) = read_node_records(gang.run, 1)
    os.kill(node.ranks[0].pid, signal.SIGKILL)
    assert 0 not in gang.wait()
    (attempt,) = gang.attempts
    assert (attempt.decision.requeue, attempt.decision.in_place) == (True, False)


def test_a_gang_of_an_ended_run_exits_with_the_decision(make_run: MakeRun, start_gang: StartGang) -> None:
    made = make_run(*TWO_NODES)
    gang = start_gang(made)
    gang.wait()
    assert json.loads(gang.termination_log(1).read_text())["exit_code"] == 0
    assert start_gang(made, 1).wait() == [0, 0]  # a node was lost as the last pod ended
    gang.run.stop_file.touch()
    refused = start_gang(made, 2)
    assert refused.wait() == [93, 93]
    codes = {json.loads(refused.termination_log(number).read_text())["code"] for number in (0, 1)}
    assert codes == {"launch.stop-cancelled-before-start"}
    assert len(gang.attempts) == 1


def test_a_pod_terminated_before_all_joined_exits_with_75_alone(make_run: MakeRun, start_gang: StartGang) -> None:
    for number in (0, 1):
        gang = start_gang(make_run(*TWO_NODES), pods=(number,))
        gang.wait_until_heeding()
        gang.signal(signal.SIGTERM)
        assert gang.wait() == [75]
        assert gang.run.attempts() == []


def test_an_attempt_whose_pods_were_lost_is_closed_by_the_next_gang(make_run: MakeRun, start_gang: StartGang) -> None:
    made = make_run(*TWO_NODES, stay={"1:*": 1})
    gang = start_gang(made)
    gang.wait_until_up()
    gang.signal(signal.SIGKILL)
    assert gang.wait() == [-9, -9]
    assert start_gang(made, 1).wait() == [0, 0]
    assert [attempt.reason for attempt in gang.attempts] == ["node", "done"]


def test_another_run_of_the_same_id_stays_unchanged(make_run: MakeRun, start_gang: StartGang, tmp_path: Path) -> None:
    made = make_run(*TWO_NODES, run_id="same")
    gang = start_gang(made)
    gang.wait()
    before = gang.run.record.read_bytes()
    other = MadeRun(made.run, make_run(*TWO_NODES, "training.seed=7", run_id="other").record)
    documents = documents_of(other.run.__class__(tmp_path / "same"), other.record)
    assert "same" not in documents["run.json"]
    (gang.volume / ".documents" / "run.json").write_text(
        documents["run.json"].replace('"run_id": "other"', '"run_id": "same"')
    )
    with pytest.raises(Exception, match="another run with the same name"):
        place_documents(gang.volume / ".documents", gang.volume)
    assert gang.run.record.read_bytes() == before


def test_the_newest_revision_is_written_to_a_volume_without_it(make_run: MakeRun, tmp_path: Path) -> None:
    made = make_run(*TWO_NODES)
    smaller = made.record.spec.model_copy(update={"cluster": made.record.spec.cluster.model_copy(update={"nodes": 1})})
    revised = add_revision(made.run, made.record, smaller, make_plan(smaller), ["cluster.nodes=1"])
    put_documents(documents_of(made.run, revised), tmp_path)
    run, record = place_documents(tmp_path, tmp_path / "volume")
    assert record == read_record(made.run)
    assert (record.revision, record.spec.cluster.nodes) == (1, 1)
    assert place_documents(tmp_path, tmp_path / "volume")[1] == record
    assert run.path.parent == tmp_path / "volume"


@pytest.mark.parametrize(
    ("decision", "code"),
    [
        (Decision(False, 0, ""), 0),
        (Decision(True, 75, ""), 75),
        (Decision(True, 1, ""), 1),
        (Decision(True, 5, ""), 5),
        (Decision(True, 137, ""), 1),
        (Decision(False, 1, ""), 93),
        (Decision(False, 75, ""), 93),
        (Decision(False, 2, ""), 2),
        (Decision(False, 3, ""), 3),
        (Decision(False, 4, ""), 93),
        (Decision(False, 93, ""), 93),
    ],
)
def test_the_exit_code_decides_whether_kubernetes_restarts(decision: Decision, code: int) -> None:
    assert exit_code_for(decision) == code


def test_a_preemption_without_time_to_save_is_not_charged() -> None:
    assert exit_code_for(Decision(True, 1, ""), "out-of-grace") == 75
    assert exit_code_for(Decision(True, 1, ""), "crash") == 1
    assert exit_code_for(Decision(False, 1, ""), "out-of-grace") == 93


def test_the_pods_grace_period_includes_the_agents_time() -> None:
    assert AGENT_SECONDS >= UNKILLABLE_SECONDS + DECISION_SECONDS


def test_the_agent_of_a_pod_loads_no_spec_before_it_can_receive_sigterm() -> None:
    program = f"import sys, {pod_agent.__name__}; print('pydantic' in sys.modules, len(sys.modules) < 250)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
