"""The exit codes of pods that cannot use their volume, or whose gang has lost a node."""

import contextlib
import dataclasses
import errno
import os
import pwd
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.errors import DoNotRequeueError, WrongNodesError
from scaletrain_cli.launch import restart, resume_elsewhere
from scaletrain_cli.launch.attempts import begin_attempt, read_attempt, read_attempts
from scaletrain_cli.launch.backends.kubernetes import pod_agent, pod_output, rendezvous
from scaletrain_cli.launch.backends.kubernetes.pod_agent import PodOptions, volume_error
from scaletrain_cli.launch.node import attempt
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.rundir.record import documents_of
from scaletrain_cli.worker.failures import Failure, write_failure
from tests.launch.backends.kubernetes.pods import put_documents, variables_of_a_pod
from tests.launch.conftest import MadeRun, MakeRun

TWO_NODES = ("cluster.scheduler=kubernetes", "cluster.nodes=2", "restarts.node=1")
# Imported before the process becomes a user who may not read the libraries.
NEEDED = (rendezvous, pod_output, restart, attempt, resume_elsewhere)


def options(volume: Path, *, gang: int = 0, rank: int = 0, workload: str = "jobset/fake-s1") -> PodOptions:
    return PodOptions(
        *(volume / ".documents", volume, workload, f"{workload}/{gang}", rank, f"gpu-{rank}", f"fake-s1-node-0-{rank}"),
        master_addr="127.0.0.1",
        master_port=29500,
        rendezvous_port=29501,
        engine="tests.launch.fake_engine",
    )


def place(made: MadeRun, volume: Path) -> Path:
    """Return a volume with the documents of a run."""
    return put_documents(documents_of(made.run, made.record), volume / ".documents").parent


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    """Return a folder that every user may enter; those of pytest are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def ended_as(uid: int, volume: Path, gang: int) -> tuple[int, str]:
    """Run pod 0 as a process of that user; return its exit code and output."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", encoding="utf-8")
            os.environ |= variables_of_a_pod(0, gang)
            arguments = ["--documents", str(volume / ".documents"), "--runs-root", str(volume)]
            try:
                code = pod_agent.main(arguments)
            except BaseException:
                sys.stderr.write(traceback.format_exc())
                code = 1
            sys.stderr.flush()
            os._exit(code)
        os._exit(99)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("gang", "code"), [(0, 5), (1, 5), (2, 93)])
def test_pods_that_cannot_write_exit_with_why(make_run: MakeRun, folder_for_all: Path, gang: int, code: int) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    volume = place(make_run(*TWO_NODES), folder_for_all / "runs")
    volume.chmod(0o755)
    ended, text = ended_as(nobody, volume, gang)
    assert ended == code, text
    assert "Traceback" not in text
    assert text.count("cannot be written") == 1
    assert f"{volume} cannot be written by the pods (uid {nobody}" in text
    assert "belongs to uid 0, gid 0, mode 0755. Set cluster.kubernetes.run_as_user" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_unwritable_run_directory_is_named_instead_of_the_volume(make_run: MakeRun, folder_for_all: Path) -> None:
    made = make_run(*TWO_NODES)
    volume = place(made, folder_for_all / "runs")
    volume.chmod(0o777)
    (volume / made.run.run_id).mkdir(mode=0o755)
    ended, text = ended_as(pwd.getpwnam("nobody").pw_uid, volume, 0)
    assert (ended, f"{volume / made.run.run_id} cannot be written by the pods" in text) == (5, True), text


def test_a_full_volume_ends_the_run_and_a_broken_one_is_tried_on_another_node(tmp_path: Path) -> None:
    full = volume_error(options(tmp_path), OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(full, DoNotRequeueError)
    assert "is full" in full.message
    assert isinstance(volume_error(options(tmp_path), OSError(errno.ESTALE, "Stale file handle")), WrongNodesError)


def test_only_gangs_that_began_no_attempt_count_against_a_broken_volume(make_run: MakeRun) -> None:
    """A run on spot nodes may have had dozens of gangs before, all served by the volume."""
    made, stale = make_run(*TWO_NODES), OSError(errno.ESTALE, "Stale file handle")
    volume = place(made, made.run.path.parent)
    assert isinstance(volume_error(options(volume, gang=9), stale), DoNotRequeueError)
    for _ in range(8):
        begin(made, "jobset/fake-s1")
    begin(made, "jobset/fake-s2")
    assert isinstance(volume_error(options(volume, gang=9), stale), WrongNodesError)
    assert isinstance(volume_error(options(volume, gang=10), stale), DoNotRequeueError)


def lose_a_node(made: MadeRun, number: int, lost: int) -> None:
    """Write the run directory as a lost node leaves it: the ranks of the other node lose their peers."""
    for rank in (0, 1):
        node = NodeRecord(f"node-{rank:04d}-gpu-{rank}", f"gpu-{rank}", rank, 1, 1, 1.0)
        if rank != lost:
            ranks = (RankRecord(2 * rank, 0, 1, 1, 1), RankRecord(2 * rank + 1, 1, 1, 1, 1))
            node = dataclasses.replace(node, ranks=ranks, ended=2.0, exit_code=1, first_failure=2 * rank)
            message = "connection closed by peer"
            write_failure(made.run, number, node.node, Failure(2 * rank, "communication", message, 1, node.node))
        write_node_record(made.run, number, node)


def begin(made: MadeRun, workload: str) -> int:
    nodes, free = ("gpu-0", "gpu-1"), workload.startswith("jobset/")
    return begin_attempt(
        made.run, made.record.spec, scheduler="kubernetes", job_id=workload, nodes=nodes, lost_nodes_free=free
    )


def decided(made: MadeRun, number: int, workload: str = "jobset/fake-s1") -> int:
    """Return the exit code that pod 0 decides on after its own of 1."""
    place = options(made.run.path.parent, workload=workload)
    return pod_agent._decide_on_restart(place, made.run, made.record, number, 1).exit_code


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pod wait for a decision that never comes."""
    monkeypatch.setattr(pod_agent, "DECISION_SECONDS", 0.05)
    monkeypatch.setattr(pod_agent, "_POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("at_once")
def test_a_lost_node_is_never_charged(make_run: MakeRun) -> None:
    """The other nodes fail first, with connection errors; their exit code decides whether the restart is charged."""
    made = make_run(*TWO_NODES)
    for _ in range(4):
        number = begin(made, "jobset/fake-s1")
        lose_a_node(made, number, lost=1)
        assert decided(made, number) == 75
        assert pod_agent._await_decision(made.run, number, 1).exit_code == 75
    last = read_attempts(made.run)[-1]
    assert (last.reason, last.free_of_charge) == ("node", True)
    assert last.decision.why == "node: restart 4 (restarts.preemption)"


@pytest.mark.usefixtures("at_once")
def test_on_volcano_a_lost_node_is_charged(make_run: MakeRun) -> None:
    made, workload = make_run(*TWO_NODES), "volcano/fake-s1"
    for code in (1, 93):
        number = begin(made, workload)
        lose_a_node(made, number, lost=1)
        assert decided(made, number, workload) == code


@pytest.mark.usefixtures("at_once")
def test_pods_exit_with_75_if_pod_0_is_lost_unless_they_know_their_own_cause(make_run: MakeRun) -> None:
    made = make_run(*TWO_NODES)
    number = begin(made, "jobset/fake-s1")
    lose_a_node(made, number, lost=0)
    assert [pod_agent._await_decision(made.run, number, code).exit_code for code in (1, 0, 5, 93)] == [75, 0, 5, 93]
    restart.conclude_abandoned(made.run, made.record)  # by the next gang's pod 0
    ended = read_attempt(made.run, number)
    assert ended.free_of_charge
    other = begin(made, "jobset/fake-s1")
    lose_a_node(made, other, lost=2)
    assert pod_agent._await_decision(made.run, other, 1).exit_code == 1, "pod 0 has ended, so no node was lost"
