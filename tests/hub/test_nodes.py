"""Node agents fetch once per node before any rank starts; the ranks are those of the launcher's stand-in engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scaletrain_cli.launch.attempts import attempt_outcome
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.worker.failures import read_failures
from tests.hub import tiny
from tests.hub.server import Hub
from tests.launch.conftest import PROJECT, Agent, MadeRun, make_plan
from tests.waiting import wait_until

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ECHO = ("HF_HUB_OFFLINE", "HF_HUB_CACHE")
MakeHubRun = Callable[..., MadeRun]
StartAgent = Callable[..., Agent]


@pytest.fixture(autouse=True)
def children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartAgent]:
    agents: list[Agent] = []

    def start_agent(made: MadeRun, home: str, node_rank: int = 0, **environment: str) -> Agent:
        own = {"HF_HOME": str(tmp_path / home), **environment}
        agents.append(Agent(made, own, "--node-name", f"n{node_rank}", node_rank=node_rank))
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.end()


@pytest.fixture
def make(hub: Hub) -> MakeHubRun:
    def make_run(nodes: int = 1, *overrides: str, **published: bool) -> MadeRun:
        tiny.publish(hub, **published)
        sets = [f"cluster.nodes={nodes}", "cluster.scheduler=slurm", "training.global_batch_size=8", *overrides]
        spec = parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)
        spec = spec.model_copy(update={"env": {**spec.env, "FAKE": json.dumps({"steps": 3, "echo": ECHO})}})
        made = create_run(spec, make_plan(spec))
        hub.log.clear()
        return MadeRun(made.run, made.record)

    return make_run


def test_two_nodes_with_two_ranks_each_fetch_each_file_once_per_node(
    hub: Hub, make: MakeHubRun, start: StartAgent, tmp_path: Path
) -> None:
    """Data are prepared by rank 0, so only its node fetches them."""
    made = make(nodes=2)
    agents = [start(made, f"node-{rank}", rank) for rank in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], [agent.errors for agent in agents]
    assert {name: len(hub.downloads(name)) for name in (*SHARDS, "tokenizer.json", "a.txt")} == {
        **dict.fromkeys((*SHARDS, "tokenizer.json"), 2),
        "a.txt": 1,
    }
    for rank in range(4):
        cache = tmp_path / f"node-{rank // 2}" / "hub"
        assert f"HF_HUB_OFFLINE='1'\nHF_HUB_CACHE={str(cache)!r}" in made.log(1, rank)
    assert {event["node"] for event in made.events("hub-fetched")} == {"n0", "n1"}


def test_nodes_that_share_a_cache_fetch_once(hub: Hub, make: MakeHubRun, start: StartAgent) -> None:
    made = make(nodes=2)
    hub.chunk_bytes, hub.delay_seconds = 8192, 0.05
    agents = [start(made, "shared", rank) for rank in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], [agent.errors for agent in agents]
    assert {len(hub.downloads(name)) for name in (*SHARDS, "tokenizer.json", "a.txt")} == {1}


def test_a_signal_ends_the_fetch_and_the_next_attempt_starts_the_ranks(
    hub: Hub, make: MakeHubRun, start: StartAgent, tmp_path: Path
) -> None:
    made = make(nodes=2)
    hub.pause.clear()  # large files do not arrive
    agents = [start(made, "shared", rank) for rank in range(2)]
    notes = made.run.attempt(1) / "hub"
    wait_until(lambda: made.events("hub-fetching"), "a fetch has begun")
    wait_until(lambda: len(list(notes.glob("*.json"))) == 2, "both agents fetch")
    agents[0].process.send_signal(signal.SIGTERM)  # the other one follows it
    assert [agent.wait() for agent in agents] == [75, 75]
    assert not any(agent.ranks for agent in agents)
    assert attempt_outcome(made.run, made.record.spec, 1, cancelled=False).reason == "preempted"
    assert {(read_document(path) or {})["state"] for path in notes.glob("*.json")} == {"stopped"}
    hub.add(tiny.MODEL, tiny.model_files(seed=1))  # the branch moves: the run keeps its commit
    hub.pause.set()
    agents = [start(made, "shared", rank) for rank in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0]
    folder = tmp_path / "shared" / "hub" / "models--acme--tiny-llama" / "snapshots"
    (snapshot,) = folder.iterdir()
    assert snapshot.name == made.record.hub[f"hf://{tiny.MODEL}@main"]
    assert (snapshot / SHARDS[0]).read_bytes() == dict(tiny.shards())[SHARDS[0]]


def test_the_token_of_the_run_reads_a_gated_model_and_is_written_nowhere_else(
    hub: Hub, make: MakeHubRun, start: StartAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.tokens |= {"hf_accepted"}
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    made = make(1, "secret_env=[HF_TOKEN]", gated=True)
    assert start(made, "node", HF_TOKEN="").wait() == 0  # the agent has it from the run's secrets
    holding = [
        path
        for root in (made.run.path, tmp_path / "node")
        for path in root.rglob("*")
        if path.is_file() and b"hf_accepted" in path.read_bytes()
    ]
    assert holding == [made.run.secrets]


@pytest.mark.parametrize(
    ("status", "token", "code", "exit_code"),
    [(None, "hf_revoked", "hub.token-refused", 2), (503, "", "hub.busy", 1)],
)
def test_a_refusal_ends_the_attempt_with_its_reason_and_without_a_rank(
    hub: Hub, make: MakeHubRun, start: StartAgent, status: int | None, token: str, code: str, exit_code: int
) -> None:
    """A refused token stops the run; a hub that is down counts as a crash, which is retried."""
    made = make()
    hub.status = status
    agent = start(made, "node", HF_TOKEN=token)
    assert agent.wait() == exit_code
    (failure,) = read_failures(made.run, 1)
    assert (failure.code, failure.exit_code) == (code, exit_code)
    assert not agent.ranks


def test_a_node_that_cannot_fetch_ends_the_others(hub: Hub, make: MakeHubRun, start: StartAgent) -> None:
    made = make(nodes=2)
    agents = [start(made, "node-0", 0), start(made, "node-1", 1, HF_TOKEN="hf_revoked")]
    assert [agent.wait() for agent in agents] == [75, 2]
    assert not any(agent.ranks for agent in agents)
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.reason, outcome.exit_code) == ("usage", 2)
    assert "refuses the token" in str(outcome.why)
