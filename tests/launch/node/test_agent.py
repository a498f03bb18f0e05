"""The node agent with real processes: signals, failures, codes and orphans."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import attempt_outcome, begin_attempt, read_attempt
from scaletrain_cli.launch.node.attempt import compiled_code, node_exit_code
from scaletrain_cli.launch.node.heartbeats import Channel
from scaletrain_cli.launch.node.options import parse_options
from scaletrain_cli.launch.node.ranks import LocalRanks
from scaletrain_cli.launch.node.record import RankRecord, is_announced, read_node_records
from scaletrain_cli.launch.node.watch import Watch
from scaletrain_cli.launch.restart import conclude_attempt
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.record import add_revision
from scaletrain_cli.telemetry.run import node_file, read_telemetry, telemetry_folder
from scaletrain_cli.worker.failures import read_failures
from tests.launch import conftest
from tests.launch.conftest import ENGINE, MakeRun, StartAgent, is_running, make_plan, make_spec, signalled_at_its_start
from tests.waiting import wait_until


def test_when_all_ranks_finish_the_agent_exits_0_with_a_full_record(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run()
    agent = start_agent(made, real=True)
    assert agent.wait() == 0
    assert [(rank.rank, rank.exit_code, rank.signal) for rank in agent.ranks] == [(0, 0, None), (1, 0, None)]
    assert all(rank.ended is not None and rank.ended >= rank.started for rank in agent.ranks)
    assert agent.node.ended is not None
    assert (agent.node.exit_code, agent.node.first_failure, agent.node.agent_pid) == (0, None, agent.process.pid)
    found = read_telemetry(made.run)
    assert [f"node-0000-{name}" for name in found.nodes] == [agent.node.node]
    assert {rank: series.steps[-1] for rank, series in found.ranks.items()} == {0: 3, 1: 3}
    assert found.gpus == {}
    file = node_file(made.run, 1, agent.node.node)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o640, 0o750)


def test_the_agent_trains_the_revision_that_its_attempt_names_and_not_the_last_one_of_the_folder(
    make_run: MakeRun, start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run()
    smaller = make_spec("cluster.gpus_per_node=1", "training.global_batch_size=2")
    add_revision(made.run, made.record, smaller, make_plan(smaller), [])
    monkeypatch.setattr(conftest, "begin_attempt", partial(begin_attempt, revision=0))
    agent = start_agent(made)
    assert agent.wait() == 0
    assert [rank.rank for rank in agent.ranks] == [0, 1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_once(make_run: MakeRun, start_agent: StartAgent, signum: signal.Signals) -> None:
    made = make_run(steps=10_000)
    agent = start_agent(made)
    agent.wait_until_up()
    agent.process.send_signal(signum)
    assert agent.wait() == 75
    for rank in (0, 1):
        assert re.findall("heard (.*)", made.log(1, rank)) == [signum.name]
        assert "saved" in made.log(1, rank)
    assert [rank.exit_code for rank in agent.ranks] == [75, 75]
    assert [(event["signal"], event["attempt"]) for event in made.events("signal")] == [(signum.name, 1)]


def test_a_signal_before_the_ranks_have_handlers_is_not_lost(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run(steps=10_000, start_seconds=1.5)
    agent = start_agent(made)
    wait_until(lambda: read_node_records(made.run, 1) and agent.ranks, "ranks are started")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert "heard SIGTERM" in made.log(1, 0)


def test_a_signal_before_the_agent_has_read_its_run_is_not_lost(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run(steps=10_000)
    assert signalled_at_its_start(start_agent, made, real=True).wait() == 75
    assert "heard SIGTERM" in made.log(1, 1)


def test_the_ranks_get_the_whole_grace_to_save(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.grace_seconds=30", steps=10_000, save_seconds=2.5)
    agent = start_agent(made)
    agent.wait_until_up()
    agent.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    agent.process.send_signal(signal.SIGTERM)  # schedulers repeat themselves; that must not cut the save short
    assert agent.wait() == 75
    assert "saved" in made.log(1, 0)


def test_a_rank_that_outlives_the_grace_is_killed_and_exits_1(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.grace_seconds=10", steps=10_000, deaf=[1])
    agent = start_agent(made)
    agent.wait_until_up()
    asked = time.time()
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 1
    saved, killed = agent.ranks
    assert killed.ended - asked >= 10.0
    assert (saved.exit_code, saved.killed_by_agent) == (75, False)
    assert (killed.exit_code, killed.signal, killed.killed_by_agent) == (-9, "SIGKILL", True)


def test_when_one_rank_dies_the_others_are_killed_3_seconds_later(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.gpus_per_node=3", "training.global_batch_size=6", steps=10_000, die={"1:1": -9}, die_at=5)
    agent = start_agent(made)
    assert agent.wait() == 1
    ended = [rank.ended or 0.0 for rank in agent.ranks]
    assert min(ended[0], ended[2]) - ended[1] >= 2.9
    assert [rank.signal for rank in agent.ranks] == ["SIGKILL"] * 3
    assert [rank.killed_by_agent for rank in agent.ranks] == [True, False, True]
    assert agent.node.first_failure == 1
    assert "rank 1 ended with SIGKILL" in agent.errors
    assert not any(is_running(rank.pid) for rank in agent.ranks)


@pytest.mark.parametrize(("code", "expected"), [(93, 93), (7, 1)])
def test_a_final_exit_code_is_the_agents(make_run: MakeRun, start_agent: StartAgent, code: int, expected: int) -> None:
    agent = start_agent(make_run("cluster.gpus_per_node=1", die={"1:0": code}))
    assert agent.wait() == expected
    assert agent.ranks[0].exit_code == code


@pytest.mark.parametrize(
    ("codes", "first_failure", "expected"),
    [
        ([0, 0], None, 0),
        ([0, 75], None, 75),
        ([75, 75], None, 75),
        *(([0, code], 1, code) for code in (2, 3, 4, 5, 93)),
        ([75, 1], 1, 1),
        ([0, -9], 1, 1),
        ([0, -11], 1, 1),
        ([93, 1], 1, 1),
        ([93, 1], 0, 93),
    ],
)
def test_the_exit_code_is_of_the_first_failed_rank(codes: list[int], first_failure: int | None, expected: int) -> None:
    ranks = [RankRecord(rank, pid=1, started=0.0, ended=1.0, exit_code=code) for rank, code in enumerate(codes)]
    assert node_exit_code(ranks, first_failure) == expected


def test_the_others_are_waited_for_when_one_rank_is_done_early(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run(steps=50, die={"1:1": 0}, stay={"1:0": 10})
    agent = start_agent(made)
    wait_until(lambda: made.log(1, 1).endswith("dying 0\n") and agent.ranks, "rank 1 is ending")
    wait_until(lambda: not is_running(agent.ranks[1].pid), "rank 1 is done")
    (made.run.path / "go").touch()
    assert agent.wait() == 0
    assert agent.node.first_failure is None
    assert read_metrics(made.run)[-1]["step"] == 50


def test_ranks_die_when_their_agent_is_killed(make_run: MakeRun, start_agent: StartAgent) -> None:
    agent = start_agent(make_run(steps=10_000))
    agent.wait_until_up()
    agent.process.kill()
    agent.wait()
    wait_until(lambda: not any(is_running(rank.pid) for rank in agent.ranks), "ranks are gone")
    assert agent.node.ended is None


def test_files_of_a_killed_rank_are_removed(make_run: MakeRun, start_agent: StartAgent, tmp_path: Path) -> None:
    agent = start_agent(make_run(env={"SCALETRAIN_SWAP": str(tmp_path / "disk")}, swap=True, die={"1:0": -9}))
    assert agent.wait() == 1
    assert list((tmp_path / "disk").iterdir()) == []


def test_files_of_a_killed_agent_are_removed_later(make_run: MakeRun, start_agent: StartAgent, tmp_path: Path) -> None:
    made = make_run(env={"SCALETRAIN_SWAP": str(tmp_path / "disk")}, swap=True, stay={"1:*": 1})
    killed = start_agent(made)
    killed.wait_until_up()
    killed.process.kill()
    killed.wait()
    wait_until(lambda: not any(is_running(rank.pid) for rank in killed.ranks), "ranks are gone")
    assert len(list((tmp_path / "disk").rglob("moments"))) == 2
    (of_killed,) = (tmp_path / "disk").glob("*/attempt-*")
    later = of_killed.with_name("attempt-0009-node-0000")  # of an attempt that began while this agent was slow to start
    later.mkdir()
    assert start_agent(made).wait() == 0
    assert list((tmp_path / "disk").glob("*/attempt-*")) == [later]


def test_a_grandchild_that_left_the_session_is_killed(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.gpus_per_node=1", detached_child=True)
    assert start_agent(made).wait() == 0
    child = re.search(r"child (\d+)", made.log(1, 0))
    assert child
    assert not is_running(int(child[1]))


def test_the_agent_preempts_if_its_parent_dies(make_run: MakeRun, start_agent: StartAgent, tmp_path: Path) -> None:
    made = make_run(steps=10_000)
    attempt = begin_attempt(made.run, made.record.spec, scheduler="test", job_id="1", nodes=("here",))
    command = [sys.executable, "-m", "scaletrain_cli.launch.node.agent", str(made.run.path), "--engine", ENGINE]
    command += ["--attempt", str(attempt), "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29500"]
    program = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen({command!r} + ['--parent-pid', str(os.getpid())], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as parent:
        wait_until(lambda: "up" in made.log(1, 0) and "up" in made.log(1, 1), "ranks are up")
        parent.kill()
    wait_until(lambda: read_node_records(made.run, 1)[0].ended is not None, "the agent has ended")
    (record,) = read_node_records(made.run, 1)
    assert record.exit_code == 75
    assert [rank.exit_code for rank in record.ranks] == [75, 75]
    assert not any(is_running(rank.pid) for rank in record.ranks)


def test_a_node_with_too_few_gpus_is_rejected_with_code_5_and_why(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.gpu=h100-sxm-80gb", "cluster.gpus_per_node=8", "training.global_batch_size=8")
    agent = start_agent(made, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert agent.wait() == 5
    (failure,) = read_failures(made.run, 1)
    assert (failure.rank, failure.reason, failure.exit_code) == (None, "wrong-nodes", 5)
    assert "3 GPUs" in failure.message
    assert "needs 8" in failure.message
    assert agent.node.exit_code == 5


def test_an_attempt_that_this_node_cannot_see_is_a_usage_error(make_run: MakeRun, start_agent: StartAgent) -> None:
    agent = start_agent(make_run(), None, "--attempt", "7")
    assert agent.wait() == 2
    assert "no attempt 7" in agent.errors


def test_the_ranks_of_one_node_meet_in_a_private_folder_that_is_removed(
    make_run: MakeRun, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = make_run(echo=["SCALETRAIN_RENDEZVOUS"], stay={"1:*": 1})
    agent = start_agent(made)
    agent.wait_until_up()
    (store,) = set(re.findall(r"SCALETRAIN_RENDEZVOUS='(\S+)'", made.log(1, 0) + made.log(1, 1)))
    assert Path(store).is_relative_to(tmp_path)
    assert Path(store).parent.stat().st_mode & 0o777 == 0o700
    agent.process.send_signal(signal.SIGTERM)
    agent.wait()
    assert not Path(store).parent.exists()


def test_two_agents_on_one_machine_keep_their_ranks_and_files_apart(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", echo=["RANK", "NODE_RANK"])
    agents = [start_agent(made, node_rank=0), start_agent(made, node_rank=1)]
    assert [agent.wait() for agent in agents] == [0, 0]
    assert [[rank.rank for rank in agent.ranks] for agent in agents] == [[0, 1], [2, 3]]
    assert "RANK='3'\nNODE_RANK='1'" in made.log(1, 3)
    assert attempt_outcome(made.run, made.record.spec, 1, cancelled=False).reason == "done"


def test_agents_that_end_together_wait_for_the_node_that_ends_last(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", linger=True)
    agents = [start_agent(made, None, "--end-together", node_rank=number) for number in range(2)]
    wait_until(lambda: len(read_node_records(made.run, 1)) == 2 and agents[1].node.ended is not None, "node 1 ended")
    assert (agents[0].node.ended, agents[1].process.poll()) == (None, None)
    (made.run.path / "go").touch()
    assert [agent.wait() for agent in agents] == [0, 0]
    assert is_announced(made.run, 1, "ended")


@pytest.mark.parametrize("event", ["a signal", "a failure of another node"])
def test_an_agent_that_waits_for_the_others_ends_early_on(
    event: str, make_run: MakeRun, start_agent: StartAgent
) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", linger=True)
    agents = [start_agent(made, None, "--end-together", node_rank=number) for number in range(2)]
    wait_until(lambda: len(read_node_records(made.run, 1)) == 2 and agents[1].node.ended is not None, "node 1 ended")
    if event == "a signal":
        agents[1].process.send_signal(signal.SIGTERM)
    else:
        wait_until(lambda: agents[0].ranks, "the agent has recorded its rank")
        os.kill(agents[0].ranks[0].pid, signal.SIGKILL)
        assert agents[0].wait() == 1
    assert agents[1].wait() == 0
    assert (agents[0].node.ended is None) == (event == "a signal")


def test_when_a_rank_dies_other_nodes_end_and_its_node_is_the_cause(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2", steps=10_000, die={"1:0": 1}, die_at=50)
    agents = [start_agent(made, node_rank=0), start_agent(made, node_rank=1)]
    assert [agent.wait() for agent in agents] == [1, 1]
    assert [rank.killed_by_agent for agent in agents for rank in agent.ranks] == [False, True, True, True]
    assert "another node failed" in agents[1].errors
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.reason, "rank 0 on node-0000" in outcome.message) == ("crash", True)


@pytest.mark.parametrize("part", ["inspect_node", "Watch"])
def test_an_agent_that_fails_by_an_error_of_its_own_is_a_crash_with_its_cause_and_its_node_stays_in_use(
    part: str, make_run: MakeRun, start_agent: StartAgent
) -> None:
    made = make_run("cluster.scheduler=slurm", "cluster.nodes=2")
    failing = start_agent(made, {"FAILS": part}, module=("tests.launch.node.failing_agent",))
    other = start_agent(made, node_rank=1)
    assert failing.wait() == 1
    assert "an error of the agent" in failing.errors
    other.wait()
    assert not any(is_running(rank.pid) for rank in failing.ranks)
    conclude_attempt(made.run, made.record, 1, first_attempt=1)
    attempt = read_attempt(made.run, 1)
    assert attempt is not None
    assert (attempt.reason, attempt.exit_code) == ("crash", 1)
    assert attempt.message == f"{failing.node.node}: LookupError: an error of the agent"
    assert read_bad_nodes(made.run.path.parent, time.time()) == []


def test_the_ranks_run_where_the_run_was_submitted(
    make_run: MakeRun, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "where it's submitted"
    home.mkdir()
    monkeypatch.chdir(home)
    made = make_run("cluster.gpus_per_node=1", "telemetry.enabled=false", touch="here")
    monkeypatch.chdir(tmp_path)
    assert start_agent(made).wait() == 0
    assert (home / "here").exists()
    assert not telemetry_folder(made.run, 1).exists()


def test_options_override_the_environment_and_slurm_s_variables_are_read() -> None:
    environment = {"MASTER_ADDR": "n1", "MASTER_PORT": "1234", "SLURM_NODEID": "7", "SLURMD_NODENAME": "n7"}
    found = parse_options(["/run", "--attempt", "3"], environment)
    assert (found.node_rank, found.node_name, found.master_addr, found.master_port) == (7, "n7", "n1", 1234)
    assert parse_options(["/run", "--attempt", "3"], {**environment, "NODE_RANK": "2"}).node_rank == 2
    given = ["/run", "--attempt", "3", "--node-rank", "1", "--node-name", "x", "--master-port", "5"]
    found = parse_options(given, environment)
    assert (found.node_rank, found.node_name, found.master_port, found.parent_pid) == (1, "x", 5, None)


def test_a_shell_whose_program_was_killed_for_memory_ends_for_lack_of_memory(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([5, 6])
    monkeypatch.setattr("scaletrain_cli.launch.node.watch.memory_kills", lambda: next(kills))
    made, ranks = make_run(), LocalRanks(foreign=True)
    ranks.ranks, ranks.channels = [RankRecord(0, 7, 0.0)], {0: Channel()}
    options: Any = SimpleNamespace(attempt=1, node_name="n0")
    Watch(made.run, options, "node-0000-n0", ranks, made.record.spec.cluster)._note_end(7, 128 + signal.SIGKILL)
    assert [(found.rank, found.reason) for found in read_failures(made.run, 1)] == [(0, "host-oom")]


def test_the_cache_of_compiled_code_is_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = Path(compiled_code({})["TORCHINDUCTOR_CACHE_DIR"])
    assert own.stat().st_mode & 0o077 == 0
    assert compiled_code({}) == {"TORCHINDUCTOR_CACHE_DIR": str(own)}
    own.chmod(0o777)  # as if somebody else had been first
    other = Path(compiled_code({})["TORCHINDUCTOR_CACHE_DIR"])
    assert other != own
    assert other.stat().st_mode & 0o077 == 0
    assert compiled_code({}, {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}) == {}


def test_ranks_start_without_the_login_nodes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/of-the-login-node")
    monkeypatch.setattr("scaletrain_cli.launch.node.attempt._TEMPORARY", (str(tmp_path),))
    assert Path(compiled_code({})["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path
    monkeypatch.setattr("scaletrain_cli.launch.node.attempt._TEMPORARY", ("/proc/none",))
    assert not Path(compiled_code({})["TORCHINDUCTOR_CACHE_DIR"]).exists()
