"""Runs of the real engine on a real Slurm of four nodes: preempted, cancelled, resumed, with a lost node."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.rundir.paths import RunDir
from tests.slurm_cluster.cluster import DevCluster
from tests.slurm_cluster.site import on_login_node

pytestmark = pytest.mark.slurm
PROJECT = Path(__file__).parents[2]
RECIPE = PROJECT / "recipes" / "llama-10m-cpu.yaml"
ON_SLURM = (
    "cluster.scheduler=slurm",
    "cluster.nodes=2",
    "cluster.gpus_per_node=1",
    "cluster.slurm={partition: spot, time: 30m, memory_per_node: 2GB}",
)
SAVED_EVERY = 100
# Steps of milliseconds, and too many to finish during a test.
TINY = (
    *("model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
    *("model.num_key_value_heads=2", "model.intermediate_size=32", "model.seq_len=32", "training.steps=1000000"),
    *("evaluation.every=0", f"checkpoint.every={SAVED_EVERY}"),
)
HOSTILE = "the 'runs' of \"us\" $(touch canary-1) `touch canary-2` ; & * é\n"


class Login:
    """The command line of a user on the login node of the cluster."""

    def __init__(self, cluster: DevCluster, runs: Path) -> None:
        self.cluster = cluster
        cluster.environment |= {"SCALETRAIN_RUNS": str(runs), "PYTHONPATH": str(PROJECT)}

    def scaletrain(self, *arguments: str, sets: tuple[str, ...] = (), check: bool = True) -> Any:
        overrides = [word for override in sets for word in ("--set", override)]
        return on_login_node(self.cluster, *arguments, *overrides, check=check)

    def submit(self, *sets: str) -> str:
        return str(self.scaletrain("submit", str(RECIPE), "--yes", "--json", sets=sets)["run_id"])

    def status(self, run_id: str) -> dict[str, Any]:
        return dict(self.scaletrain("status", run_id, "--json"))

    def wait(self, run_id: str, reached: Callable[[dict[str, Any]], bool], *ends: str) -> dict[str, Any]:
        """Wait until `reached`; fail if the run ends in a state that is not one of `ends`."""
        while not reached(now := self.status(run_id)):
            assert now["state"] not in {"failed", "cancelled", "finished"} - set(ends), now
            time.sleep(0.5)
        return now

    def wait_for_steps(self, run_id: str, attempt: int, more: int = 3) -> dict[str, Any]:
        """Wait until the attempt itself has trained `more` steps; return the status after that."""

        def trains(now: dict[str, Any]) -> bool:
            resumed = events(now["run_dir"], "resumed")
            if not now["attempt"] == attempt == len(resumed) + 1:
                return False
            start = resumed[-1]["step"] if resumed else 0
            return any(line["step"] >= start + more for line in metrics(now["run_dir"]) if line["attempt"] == attempt)

        self.wait(run_id, trains)
        return self.status(run_id)  # the one before may be older than the events


@pytest.fixture
def login(slurm: DevCluster, tmp_path: Path) -> Login:
    return Login(slurm, tmp_path / HOSTILE)


def events(run_dir: str, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def ends(run_dir: str) -> list[tuple[int, str]]:
    return [(event["exit_code"], event["reason"]) for event in events(run_dir, "attempt-ended")]


def metrics(run_dir: str) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be in part
    return [json.loads(line) for line in whole.splitlines()]


def curves(run_dir: str) -> dict[tuple[int, str], float]:
    """Return the metrics that must not depend on interruptions, by step and name."""
    lines = metrics(run_dir)
    names = ("loss", "validation_loss", "grad_norm", "learning_rate")
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


@pytest.mark.long
def test_a_preempted_run_continues_on_other_nodes_and_equals_the_local_run(login: Login) -> None:
    """A job of higher priority keeps the nodes; no step is lost, and the metrics are bitwise equal."""
    short = (*TINY, "training.steps=60", "evaluation.every=20", "checkpoint.every=25")
    # Slow in the first attempt, so that it is preempted before it finishes.
    run_id = login.submit(*ON_SLURM, *short, "env.SCALETRAIN_FAULT=slow-rank step=5 seconds=2 attempt=1")
    before = login.wait(run_id, lambda now: now["step"] >= 4)
    assert len(before["nodes"]) == 2
    urgent = login.cluster.submit("sleep 600", "-p", "high", "-N", "2", "--exclusive", "-w", ",".join(before["nodes"]))
    local = login.submit("cluster.gpus_per_node=2", *short)  # at the same time
    done = login.wait(run_id, lambda now: now["state"] == "finished", "finished")
    login.cluster.run("scancel", urgent)
    assert not set(read_attempts(RunDir(Path(done["run_dir"])))[1].nodes) & set(before["nodes"])
    assert done["steps_lost_total"] == 0
    assert done["restarts"] == 1

    undisturbed = login.wait(local, lambda now: now["state"] == "finished", "finished")
    assert curves(done["run_dir"]) == curves(undisturbed["run_dir"])
    assert {(60, "loss"), (60, "validation_loss")} <= curves(done["run_dir"]).keys()


def sees_the_run_while_it_trains(login: Login, run_id: str, nodes: list[str], page: Path) -> None:
    """Use `status`, `watch`, `diagnose`, `profile` and `report` on a run of two ranks on two nodes."""

    def measures(now: dict[str, Any]) -> bool:
        memory = (now["hardware"] or {}).get("memory_bytes")
        return now["step_seconds"]["measured"] is not None and memory is not None and memory["count"] == 2

    now = login.wait(run_id, measures)
    files = (Path(now["run_dir"]) / "attempts" / "0001" / "telemetry").glob("node-*.jsonl.gz")
    assert sorted(file.name for file in files) == [
        f"node-{number:04d}-{node}.jsonl.gz" for number, node in enumerate(nodes)
    ]
    assert now["eta_seconds"] > 0
    screen = login.scaletrain("watch", run_id, "--once").stdout
    for text in (f"{run_id}  running", f"on {', '.join(nodes)}", " per step, planned ", "rank "):
        assert text in screen, screen
    diagnosis = login.scaletrain("diagnose", run_id, "--json")
    assert diagnosis["run_id"] == run_id
    assert diagnosis["last_step"] >= now["step"]
    profile = login.scaletrain("profile", run_id, "--ranks", "0,1", "--steps", "2", "--timeout", "15m", "--json")
    assert [(rank["rank"], rank.get("error")) for rank in profile["by_rank"]] == [(0, None), (1, None)]
    assert profile["measured"]["exposed_communication"]["median"] > 0
    login.scaletrain("report", run_id, "-o", str(page))
    written = page.read_text()
    assert all(f">{node}<" in written for node in nodes)
    assert 'id="profiles"' in written
    assert login.status(run_id)["attempt"] == 1


@pytest.mark.long
def test_no_interruption_by_slurm_loses_a_saved_step(login: Login, tmp_path: Path) -> None:
    """Preemption without a grace time, scancel, a lost node, the time limit, and `scaletrain cancel`.

    Before them, the verbs that show a run are used from the login node while it trains.
    """
    cluster = login.cluster
    run_id = login.submit(*ON_SLURM, *TINY, "cluster.slurm.partition=spot0")
    training = login.wait_for_steps(run_id, 1)
    job_id = training["job_id"]
    sees_the_run_while_it_trains(login, run_id, training["nodes"], tmp_path / "report.html")

    urgent = cluster.submit("sleep 600", "-p", "high", "-N", "4", "--exclusive")
    cluster.wait_for(job_id, lambda job: job["Restarts"] == "1")
    cluster.run("scancel", urgent)
    login.wait_for_steps(run_id, 2)

    cluster.run("scancel", job_id)
    cluster.wait_for_state(job_id, "CANCELLED")
    stopped = login.wait(run_id, lambda now: len(ends(now["run_dir"])) == 2 and now["job"]["state"] == "ended")
    assert stopped["attempt"] == 2
    assert stopped["last_checkpoint_step"] == stopped["step"]
    assert "scaletrain resume" in stopped["why"]

    login.scaletrain("resume", run_id, "--yes")
    resumed = login.wait_for_steps(run_id, 3, more=SAVED_EVERY + 1)
    assert resumed["job_id"] != job_id
    assert resumed["steps_lost_total"] == 0
    assert cluster.job(job_id)["JobState"] == "CANCELLED"

    lost = resumed["nodes"][-1]
    cluster.lose_node(lost)
    again = login.wait_for_steps(run_id, 4)
    cluster.node_up(lost)
    assert lost not in again["nodes"]
    assert again["job_id"] == resumed["job_id"]

    restarts = cluster.job(again["job_id"])["Restarts"]
    cluster.end_soon(again["job_id"])
    cluster.wait_for(again["job_id"], lambda job: job["Restarts"] != restarts)
    cluster.run("scontrol", "update", f"jobid={again['job_id']}", "TimeLimit=30")  # the short limit would stay
    in_time = login.wait_for_steps(run_id, 5)
    assert ends(in_time["run_dir"])[2:] == [(1, "node"), (75, "time-limit")], events(
        in_time["run_dir"], "attempt-ended"
    )
    assert in_time["steps_lost_total"] == again["steps_lost_total"]

    login.scaletrain("cancel", run_id, "--yes")
    cancelled = login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")
    assert cancelled["last_checkpoint_step"] == cancelled["step"]
    preempted = (75, "preempted")
    assert ends(cancelled["run_dir"]) == [preempted, preempted, (1, "node"), (75, "time-limit"), (75, "cancelled")]
    assert not list(Path(cancelled["run_dir"]).rglob("canary*")) + list(Path().glob("canary*"))


@pytest.mark.long
def test_a_hung_node_is_named_and_the_run_continues_without_it(login: Login) -> None:
    run_id = login.submit(*ON_SLURM, *TINY, "guard.hang=15s")
    before = login.wait_for_steps(run_id, 1, more=8)
    bad = before["nodes"][1]
    (record,) = Path(before["run_dir"]).glob(f"attempts/0001/nodes/node-0001-{bad}.json")
    os.kill(json.loads(record.read_text())["ranks"][0]["pid"], signal.SIGSTOP)
    after = login.wait(run_id, lambda now: now["attempt"] == 2 and bool(now["nodes"]))
    login.scaletrain("cancel", run_id, "--yes")
    assert ends(before["run_dir"])[0] == (1, "hang")
    message = events(before["run_dir"], "attempt-ended")[0]["message"]
    assert f"rank 1 on node-0001-{bad}" in message
    assert "does not respond: stopped by a signal" in message
    assert bad not in after["nodes"]
    assert [event["nodes"] for event in events(before["run_dir"], "nodes-excluded")] == [[bad]]
    assert [node["node"] for node in login.scaletrain("nodes", "list", "--json")["nodes"]] == [bad]
    assert login.cluster.job(before["job_id"])["ExcNodeList"] == bad
    login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")


@pytest.mark.long
def test_a_spare_node_replaces_one_that_hangs_in_the_same_job(login: Login) -> None:
    run_id = login.submit(*ON_SLURM, *TINY, "guard.hang=15s", "cluster.spare_nodes=1", "checkpoint.every=5")
    before = login.wait(run_id, lambda now: bool(now["last_checkpoint_step"]))
    run = RunDir(Path(before["run_dir"]))
    hung = read_node_records(run, 1)[1]
    os.kill(hung.ranks[0].pid, signal.SIGSTOP)
    login.wait_for_steps(run_id, 2)
    assert hung.name not in read_attempts(run)[1].nodes
    assert login.cluster.job(before["job_id"])["Restarts"] == "0"
    assert [event["nodes"] for event in events(before["run_dir"], "nodes-replaced")] == [[hung.name]]
    login.scaletrain("cancel", run_id, "--yes")
    login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")


@pytest.mark.long
def test_the_state_of_a_lost_node_comes_from_the_memory_of_another_one(login: Login) -> None:
    """Nothing is on disk, and the memory of the node is lost with it."""
    copies = (*("checkpoint.in_memory=1", "checkpoint.every=100000"), "env.SCALETRAIN_FAULT=slow-rank seconds=0.2")
    run_id = login.submit(*ON_SLURM, *TINY, "cluster.spare_nodes=1", *copies)
    before = login.wait_for_steps(run_id, 1, more=10)  # the last two may not be copied yet
    lost = read_attempts(RunDir(Path(before["run_dir"])))[0].nodes[-1]
    login.cluster.node_down(lost)
    after = login.wait_for_steps(run_id, 2)
    login.cluster.node_up(lost)
    (resumed,) = events(after["run_dir"], "resumed")
    assert (resumed["saved_step"], resumed["step"] >= 8, resumed["lost_steps"] <= 2) == (0, True, True), resumed
    assert login.cluster.job(before["job_id"])["Restarts"] == "0"
    login.scaletrain("cancel", run_id, "--yes")
    login.wait(run_id, lambda now: now["state"] == "cancelled", "cancelled")


@pytest.mark.long
def test_a_probe_reports_the_nodes_and_leaves_only_the_run(login: Login, tmp_path: Path) -> None:
    sets = (*ON_SLURM, *TINY, "cluster.slurm.nodelist=n[1-2]", "cluster.slurm.extra={exclusive: true}")
    done = login.scaletrain("submit", str(RECIPE), "--yes", "--probe", sets=sets)
    run_id = done.stdout.strip()
    login.scaletrain("cancel", run_id, "--yes")
    assert "probed 2 nodes (n1, n2): at least 0 GPUs" in done.stderr
    assert "torch" in done.stderr
    assert sorted(path.name for path in (tmp_path / HOSTILE).iterdir()) == ["datasets", run_id]


def test_a_probe_finds_a_node_that_does_not_share_the_runs_root(login: Login, tmp_path: Path) -> None:
    root = tmp_path / HOSTILE
    root.mkdir()
    in_n2 = ["nsenter", "--mount", "--target", str(login.cluster.slurmd("n2"))]
    login.cluster.run(*in_n2, "mount", "-t", "tmpfs", "none", str(root))
    sets = (*ON_SLURM, "cluster.slurm.nodelist=n[1-2]")
    refused = login.scaletrain("submit", str(RECIPE), "--yes", "--probe", sets=sets, check=False)
    login.cluster.run(*in_n2, "umount", str(root))
    assert refused.returncode == 5
    assert "n2: no answer" in refused.stderr
    assert "n1: " not in refused.stderr
    assert list(root.iterdir()) == []
    assert login.cluster.run("squeue", "--noheader", "--states=PD,R", "--partition=spot").stdout == ""
