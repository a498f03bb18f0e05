import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import attempt_outcome
from scaletrain_cli.launch.evaluate import evaluation_spec
from scaletrain_cli.launch.hub_fetch import fetched_spec
from scaletrain_cli.launch.node.hub import fetch_hub_files
from scaletrain_cli.launch.node.options import AgentOptions
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

    def start_agent(made: MadeRun, home: str, node_rank: int = 0, late: str = "", **environment: str) -> Agent:
        own = {"HF_HOME": str(tmp_path / home), **environment}
        options: dict[str, Any] = {"node_rank": node_rank}
        if late:
            options["module"] = ("tests.hub.late_view", late, str(tmp_path / "seen"))
        agents.append(Agent(made, own, "--node-name", f"n{node_rank}", **options))
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.end()


@pytest.fixture
def make(hub: Hub) -> MakeHubRun:
    def make_run(nodes: int = 1, *overrides: str, stay: dict[str, int] | None = None, **published: bool) -> MadeRun:
        tiny.publish(hub, **published)
        sets = [f"cluster.nodes={nodes}", "cluster.scheduler=slurm", "training.global_batch_size=8", *overrides]
        spec = parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)
        spec = spec.model_copy(
            update={"env": {**spec.env, "FAKE": json.dumps({"steps": 3, "echo": ECHO, "stay": stay or {}})}}
        )
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


@pytest.mark.long  # tests/hub/test_fetch.py has two fetches at a time
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


def test_a_signal_after_another_node_started_reaches_ranks(make: MakeHubRun, start: StartAgent) -> None:
    """This node does not see yet that the other one is ready; without it, the ranks there would wait for its ranks."""
    made = make(nodes=2, stay={"1:0": 1, "1:1": 1})  # its own ranks would finish before a signal that is late
    late, other = start(made, "shared", 0, late="fetching"), start(made, "shared", 1)
    wait_until(lambda: "up" in made.log(1, 2), "the other node has started its ranks")
    late.process.send_signal(signal.SIGTERM)
    assert late.wait() == 75, late.errors
    assert len(late.ranks) == 2
    assert [event["node"] for event in made.events("signal")] == ["n0"]
    assert other.wait() == 0


@pytest.mark.long
def test_no_rank_starts_on_a_node_that_does_not_see_that_another_one_has_stopped(
    hub: Hub, make: MakeHubRun, start: StartAgent
) -> None:
    made = make(nodes=2)
    for section in ("model", "data"):
        fetched_spec(made.record.spec, section)
    hub.pause.clear()
    stopped = start(made, "node-0", 0)
    wait_until(lambda: made.events("hub-fetching"), "a fetch has begun")
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.wait() == 75
    hub.pause.set()
    late = start(made, "hf", 1, late="ready")  # a complete cache
    assert late.wait() == 75, late.errors
    assert not late.ranks


@pytest.mark.usefixtures("fetched_here")
@pytest.mark.parametrize(
    ("sets", "fetched"),
    [
        ((), 0),
        (("model.adapter={name: lora, rank: 2, weights: 'hf://acme/adapter'}",), 1),
        (("training.trainable=[{match: lm_head}]",), 1),
    ],
    ids=["full", "adapter", "frozen"],
)
def test_an_evaluation_fetches_initial_weights_only_if_its_checkpoint_lacks_some(
    hub: Hub, make: MakeHubRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: tuple[str, ...], fetched: int
) -> None:
    hub.add("acme/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    task = "evaluation.tasks=[{kind: generation, name: a, prompts: [b]}]"
    made = make(1, *sets, task)
    spec = evaluation_spec(made.run, made.record, 2)
    evaluation = create_run(spec, made.record.plan, "evaluation", hub=made.record.hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "of-the-evaluation"))  # on another node
    options = AgentOptions(evaluation.run.path, 1, 0, "n", "", 0, None, "")
    local = fetch_hub_files(evaluation.run, evaluation.record, options, {}).spec
    assert [len(hub.downloads(name)) for name in SHARDS] == [fetched, fetched]
    assert not hub.downloads("adapter_model.safetensors")
    beside = Path(local.transformer.weights or "")
    assert (beside / "tokenizer_config.json").is_file()
    assert (beside / "tokenizer.json").is_file()


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
    [(503, "", "hub.busy", 1), pytest.param(None, "hf_revoked", "hub.token-refused", 2, marks=pytest.mark.long)],
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


def test_an_unwritable_cache_in_env_ends_the_run(hub: Hub, make: MakeHubRun, start: StartAgent, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = make(1, f"env={{HF_HOME: {tmp_path}/file/hf}}")
    agent = start(made, "node")
    assert agent.wait() == 2, agent.errors
    (failure,) = read_failures(made.run, 1)
    assert failure.code == "hub.not-writable"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a drive's kind that has space for the files and little more than the reserve."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=258m", "none", folder], check=False).returncode:
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, *, but: int) -> None:
    """Leave ``but`` bytes of space."""
    while (free := shutil.disk_usage(folder).free) > but:
        with contextlib.suppress(OSError), (folder / "filler").open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), max(4096, (free - but) // 2))


@pytest.mark.parametrize(
    ("sets", "met", "exit_code", "reason"),
    [
        ((), False, 5, "wrong-nodes"),  # the nodes have disks of their own
        (("cluster.scheduler=local",), True, 93, "disk-full"),
        pytest.param((), True, 5, "wrong-nodes", marks=pytest.mark.long),
        pytest.param(("cluster.scheduler=local",), False, 93, "disk-full", marks=pytest.mark.long),
    ],
    ids=["own-predicted", "only-met", "own-met", "only-predicted"],
)
def test_a_full_disk_is_tried_on_another_node_if_it_is_the_nodes_own_and_else_stops_the_run(
    hub: Hub,
    make: MakeHubRun,
    start: StartAgent,
    disk: Path,
    sets: tuple[str, ...],
    met: bool,
    exit_code: int,
    reason: str,
) -> None:
    made = make(1, *sets)
    if met:
        hub.pause.clear()
    else:
        fill(disk, but=1 << 22)
    agent = start(made, "disk")
    if met:
        wait_until(lambda: made.events("hub-fetching"), "a fetch has begun")
        fill(disk, but=0)
        hub.pause.set()
    assert agent.wait() == exit_code, agent.errors
    (failure,) = read_failures(made.run, 1)
    assert failure.code == ("hub.disk-full" if met else "hub.no-space")
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.exit_code, outcome.reason) == (exit_code, reason)
    assert outcome.against == (("n0",) if exit_code == 5 else ())


def test_a_node_that_cannot_fetch_ends_the_others(hub: Hub, make: MakeHubRun, start: StartAgent) -> None:
    made = make(nodes=2)
    agents = [start(made, "node-0", 0), start(made, "node-1", 1, HF_TOKEN="hf_revoked")]
    assert [agent.wait() for agent in agents] == [75, 2]
    assert not any(agent.ranks for agent in agents)
    outcome = attempt_outcome(made.run, made.record.spec, 1, cancelled=False)
    assert (outcome.reason, outcome.exit_code) == ("usage", 2)
    assert "refuses the token" in str(outcome.why)
