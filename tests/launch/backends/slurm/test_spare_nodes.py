"""Jobs that exchange a lost node for a spare one or go on without it, with recorded answers of Slurm."""

import errno
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.attempts import begin_attempt, read_attempt
from scaletrain_cli.launch.backends.slurm import explain, job, node_watch
from scaletrain_cli.launch.backends.slurm.job import main
from scaletrain_cli.launch.backends.slurm.node_watch import Member, NodeWatch
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.node.record import NodeRecord, announce, is_announced, write_node_record
from scaletrain_cli.launch.node.watch import observed_failure
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import BadNode, read_bad_nodes, remember_bad_nodes
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.worker.failures import write_failure
from tests.launch.backends.slurm.test_elastic_job import Slurm
from tests.launch.backends.slurm.test_elastic_job import made as made
from tests.launch.conftest import MadeRun, MakeRun, make_spec

SPARE = ("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.spare_nodes=1", "cluster.gpus_per_node=1")
JOB = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "localhost", "SLURM_JOB_NODELIST": "n[1-3]"}
UP = "NodeName=n1 State=MIXED\nNodeName=n2 State=MIXED\nNodeName=n3 State=IDLE\n"
ANSWERS = {
    "squeue --noheader --jobs=42 --format=%N": "n[1-3]\n",
    "scontrol --oneliner show node n1,n2,n3": UP,
    "scontrol -o show job 42": "JobId=42 JobState=RUNNING PreemptTime=None",
    "squeue": "N/A|UNLIMITED",
}


@pytest.fixture
def lost(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """Return a run on n1 and n2 with the spare n3, whose n2 is lost."""
    return with_lost_node(make_run(*SPARE), monkeypatch)


def with_lost_node(made: MadeRun, monkeypatch: pytest.MonkeyPatch, index: int = 1) -> MadeRun:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    answer(monkeypatch, {})
    monkeypatch.setattr(job, "route_address", lambda name: "10.0.0.1")
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=("n1", "n2"))
    for rank in range(2):
        record = NodeRecord(f"node-{rank:04d}-n{rank + 1}", f"n{rank + 1}", rank, 1, 1, 0.0)
        ended = {} if rank == index else {"ended": 1.0, "exit_code": 1}
        write_node_record(made.run, 1, NodeRecord(**{**vars(record), **ended}))
    return made


def answer(monkeypatch: pytest.MonkeyPatch, differs: dict[str, str]) -> Slurm:
    slurm = Slurm(differs | {command: output for command, output in ANSWERS.items() if command not in differs})
    for module in (job, explain, node_watch):
        monkeypatch.setattr(module, "call_slurm", slurm)
    return slurm


def end(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> str:
    main(["end", str(made.run.path), "--attempt=1", "--srun-exit-code=137", "--may-restart"])
    return capfd.readouterr().out.split()[0]


def begin(made: MadeRun, capfd: pytest.CaptureFixture[str]) -> list[str]:
    follows = ["--follows"] if made.run.attempts() else []
    assert main(["begin", str(made.run.path), *follows]) == 0
    return capfd.readouterr().out.split()[3:]


def test_a_job_requests_its_spare_nodes_and_survives_a_node() -> None:
    options = [*sbatch_options(make_spec(*SPARE), "run")]
    assert {"nodes=3", "no-kill"} <= {*options}
    ranged = make_spec(*SPARE, "cluster.nodes={min: 1, max: 4}")
    assert "nodes=2-5" in [*sbatch_options(ranged, "run", sizes=(1, 2, 4))]
    assert "no-kill" not in [*sbatch_options(make_spec(*SPARE, "cluster.spare_nodes=0"), "run")]


def test_only_slurm_has_spare_nodes() -> None:
    with pytest.raises(SpecError, match="spare_nodes"):
        make_spec("cluster.scheduler=kubernetes", "cluster.spare_nodes=1")


def test_a_spare_node_replaces_one_that_is_lost(lost: MadeRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert end(lost, capfd) == "restart"
    assert begin(lost, capfd) == ["2", "n1,n3", "3", "n1,n2,n3"]
    (event,) = lost.events("nodes-replaced")
    assert (event["nodes"], event["by"]) == (["n2"], ["n3"])
    ended, now = (read_attempt(lost.run, number) for number in (1, 2))
    assert (ended.reason, now.nodes) == ("node", ("n1", "n3"))


@pytest.mark.parametrize(
    "differs",
    [
        {"scontrol --oneliner show node n1,n2,n3": UP.replace("IDLE", "DOWN*")},
        {"scontrol --oneliner show node n1,n2,n3": UP.replace("IDLE", "IDLE+DRAIN")},
        {"squeue --noheader --jobs=42 --format=%N": "fails"},
        {"scontrol -o show job 42": "JobId=42 JobState=COMPLETING PreemptTime=None"},
    ],
    ids=["spare down", "spare drained", "no answer", "job ends"],
)
def test_a_job_without_a_usable_spare_node_is_requeued(
    lost: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], differs: dict[str, str]
) -> None:
    answer(monkeypatch, differs)
    monkeypatch.setattr(job, "exclude_option", lambda spec, excluded: "n2")
    monkeypatch.setattr(job, "exclusion_for", lambda run, spec: job.last_exclusion(run))
    monkeypatch.setattr(job, "_changes", lambda run, record, environment: [])
    assert end(lost, capfd) == "requeue"


def test_a_lost_node_that_the_spec_names_is_replaced_too(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = with_lost_node(make_run(*SPARE, "cluster.slurm.nodelist=n[1-3]"), monkeypatch)
    assert end(made, capfd) == "restart"
    assert begin(made, capfd)[1] == "n1,n3"


def test_a_healthy_node_without_a_record_of_its_end_is_not_excluded(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its agent was still at work when the batch script left the step of the lost node."""
    made, names = make_run(*SPARE, "cluster.nodes=3"), ("n1", "n2", "n3")
    four = f"{UP}NodeName=n4 State=MIXED"
    shown = {f"scontrol --oneliner show node {','.join(names)},n4": four}
    shown |= {
        f"scontrol --oneliner show node {','.join(names)}": UP,
        "squeue --noheader --jobs=42 --format=%N": "n[1-4]",
    }
    answer(monkeypatch, shown)
    for name, value in (JOB | {"SLURM_JOB_NODELIST": "n[1-4]"}).items():
        monkeypatch.setenv(name, value)
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="42", nodes=names)
    for rank, name in enumerate(names):
        ended = {"ended": 1.0, "exit_code": 1} if rank == 0 else {}
        record = NodeRecord(f"node-{rank:04d}-{name}", name, rank, 1, 1, 0.0)
        write_node_record(made.run, 1, NodeRecord(**{**vars(record), **ended}))
    silent = observed_failure("node", Reason("slurm.node-silent"), "node-0001-n2")
    write_failure(made.run, 1, "node-0001-n2-silent", silent)
    announce(made.run, 1, "abandoned")
    assert end(made, capfd) == "restart"
    assert [node.node for node in read_bad_nodes(made.run.path.parent, time.time())] == ["n2"]


def test_a_new_start_of_the_job_leaves_a_bad_node_as_the_spare_one(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, now = make_run(*SPARE), time.time()
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "route_address", lambda name: "10.0.0.1")
    remember_bad_nodes(made.run.path.parent, [BadNode("n2", "hang", "", "other", 1, now, now + 3600)], now)
    assert begin(made, capfd)[1] == "n1,n3"


def test_a_spare_node_that_is_known_as_bad_replaces_none(
    lost: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    remember_bad_nodes(lost.run.path.parent, [BadNode("n3", "hang", "", "other", 1, now, now + 3600)], now)
    monkeypatch.setattr(job, "_changes", lambda run, record, environment: [])
    assert end(lost, capfd) == "requeue"


def test_a_job_that_loses_the_node_of_its_batch_script_is_requeued(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = with_lost_node(make_run(*SPARE), monkeypatch, index=0)
    monkeypatch.setattr(job, "_changes", lambda run, record, environment: [])
    assert end(made, capfd) == "requeue"


def test_a_run_with_a_range_of_nodes_goes_on_with_those_that_are_left(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    answer(
        monkeypatch,
        {
            "scontrol --oneliner show node n1,n2": UP.partition("NodeName=n3")[0],
            "squeue --noheader --jobs=42 --format=%N": "n[1-2]",
        },
    )
    monkeypatch.setattr(job, "route_address", lambda name: "10.0.0.1")
    assert begin(made, capfd) == ["2", "n1,n2"] * 2
    write_node_record(made.run, 1, NodeRecord("node-0000-n1", "n1", 0, 1, 1, 0.0, ended=1.0, exit_code=1))
    write_node_record(made.run, 1, NodeRecord("node-0001-n2", "n2", 1, 1, 1, 0.0))
    assert end(made, capfd) == "restart"
    assert begin(made, capfd) == ["1", "n1", "2", "n1,n2"]
    assert [event["nodes"] for event in made.events("resized")] == [2, 1]


@pytest.fixture
def watch(lost: MadeRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeWatch]:
    """Yield the watch over the nodes of the lost run, which notes in ``signaled`` that it has signaled the script."""
    monkeypatch.setattr(node_watch.os, "kill", lambda pid, number: signaled.append(pid))
    signaled.clear()
    watch = NodeWatch(lost.run, 4711, socket.create_server(("127.0.0.1", 0)))
    yield watch
    for key in [*watch._selector.get_map().values()]:
        cast(socket.socket, key.fileobj).close()


signaled: list[int] = []


def until_signaled(watch: NodeWatch) -> None:
    while not signaled:
        watch.look()


def connect(watch: NodeWatch, name: str, token: str | None = None) -> socket.socket:
    """Return a connection of which the watch knows the name."""
    connection = socket.create_connection(watch.server.getsockname())
    connection.sendall(f"{watch.token if token is None else token} {name}\n".encode())
    watch.look()
    watch.look()
    return connection


def reset(connection: socket.socket) -> None:
    """Close a connection as the kernel of a node that was off does: it knows of none."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def failures(watch: NodeWatch) -> list[str]:
    return [path.name for path in (watch.run.attempt(1) / "failures").glob("*")]


def test_a_node_that_does_not_respond_ends_the_attempt_and_its_step(watch: NodeWatch) -> None:
    with connect(watch, "n1"):
        reset(connect(watch, "n2"))
        until_signaled(watch)
    assert signaled == [4711]
    assert is_announced(watch.run, 1, "failed")
    assert is_announced(watch.run, 1, "abandoned")
    assert failures(watch) == ["node-0001-n2-silent.json"]


def test_a_spare_node_that_does_not_respond_ends_no_attempt(watch: NodeWatch) -> None:
    reset(connect(watch, "n3"))
    watch.look()
    assert not is_announced(watch.run, 1, "failed")
    reset(connect(watch, "n2"))
    until_signaled(watch)
    assert failures(watch) == ["node-0001-n2-silent.json"]


def test_the_watch_goes_on_after_a_connection_that_it_could_not_accept(
    watch: NodeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch.time, "sleep", lambda seconds: None)
    with socket.create_connection(watch.server.getsockname()), monkeypatch.context() as full:
        full.setattr(socket.socket, "accept", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        watch.look()
    watch.look()  # accepts it
    reset(connect(watch, "n2"))
    until_signaled(watch)
    assert failures(watch) == ["node-0001-n2-silent.json"]


def test_the_watch_closes_a_connection_that_sends_more_than_a_line(watch: NodeWatch) -> None:
    with socket.create_connection(watch.server.getsockname()) as stranger:
        watch.look()
        stranger.sendall(bytes(5000))
        while len(watch._selector.get_map()) > 1:
            watch.look()
            assert sum(len(chunk) for key in watch._selector.get_map().values() for chunk in key.data or ()) < 2048


def test_a_stranger_cannot_end_an_attempt(watch: NodeWatch) -> None:
    for token in ("", "0" * 64, "\u20ac"):
        reset(connect(watch, "n2", token))
        watch.look()
    assert not is_announced(watch.run, 1, "failed")


def test_the_end_of_the_process_on_a_node_is_no_loss_of_the_node(
    watch: NodeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, {"scontrol --oneliner show node n2": "NodeName=n2 State=MIXED"})
    connect(watch, "n2").close()
    watch.look()
    assert not is_announced(watch.run, 1, "failed")
    announce(watch.run, 1, "failed")  # as its ranks have lost their connections to the others
    watch.look()
    assert signaled == [], "its agent may still record how its ranks ended"
    monkeypatch.setattr(node_watch, "_PATIENCE_SECONDS", 0.0)
    until_signaled(watch)
    assert failures(watch) == []


def test_a_node_that_was_silent_for_a_moment_is_not_lost_in_the_next_attempt(watch: NodeWatch) -> None:
    reset(connect(watch, "n2"))
    until_signaled(watch)
    with connect(watch, "n2"):
        signaled.clear()
        begin_attempt(watch.run, read_record(watch.run).spec, scheduler="slurm", job_id="42", nodes=("n1", "n2"))
        announce(watch.run, 2, "failed")  # by an error of a rank
        watch.look()
    assert signaled == []
    assert list((watch.run.attempt(2) / "failures").glob("*")) == []


def test_a_first_node_that_sees_no_other_one_blames_none(watch: NodeWatch) -> None:
    """It has lost its own network; another node requeues the job once Slurm reports the first one as down."""
    begin_attempt(watch.run, read_record(watch.run).spec, scheduler="slurm", job_id="42", nodes=("n1", "n2", "n3"))
    for rank, name in enumerate(("n1", "n2", "n3")):
        write_node_record(watch.run, 2, NodeRecord(f"node-{rank:04d}-{name}", name, rank, 1, 1, 0.0))
    connections = [connect(watch, name) for name in ("n2", "n3")]
    for connection in connections:
        reset(connection)
    while not is_announced(watch.run, 2, "failed"):
        watch.look()
    watch.look()
    assert len(list((watch.run.attempt(2) / "failures").glob("*"))) <= 1


def test_a_node_whose_process_has_ended_is_lost_once_slurm_says_so(
    watch: NodeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(watch, "n2").close()
    answer(monkeypatch, {"scontrol --oneliner show node n2": "NodeName=n2 State=DOWN*"})
    until_signaled(watch)
    assert failures(watch) == ["node-0001-n2-silent.json"]


@pytest.mark.parametrize(
    ("job_state", "first", "requeued"),
    [
        ("JobState=RUNNING Restarts=0", "DOWN*", True),
        ("JobState=RUNNING Restarts=1", "DOWN*", False),
        ("JobState=COMPLETING Restarts=0", "DOWN*", False),
    ],
    ids=["first node down", "requeued meanwhile", "ending"],
)
def test_a_job_without_its_first_node_is_requeued_by_another(
    monkeypatch: pytest.MonkeyPatch, job_state: str, first: str, *, requeued: bool
) -> None:
    """Slurm keeps a job with --no-kill as running when the node of its batch script is lost (seen in 22.05.8)."""
    shown = {
        "scontrol -o show job 42": f"JobId=42 {job_state}",
        "scontrol --oneliner show node n1": f"NodeName=n1 State={first}",
    }
    slurm = answer(monkeypatch, shown | {"scontrol requeue 42": ""})

    monkeypatch.setattr(node_watch, "_ASK_SECONDS", 0.0)
    environment = {"SLURM_JOB_ID": "42", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_NODEID": "1"}
    member = Member(RunDir(Path("/nowhere")), "42.0", environment)
    assert member.is_over() is not ("RUNNING Restarts=0" in job_state)
    assert "scontrol requeue 42" not in slurm.calls, "a restart of slurmd looks the same for a moment"
    member.is_over()
    assert ("scontrol requeue 42" in slurm.calls) is requeued
