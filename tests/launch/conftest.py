"""Runs to launch: a small spec, a plan with placeholder figures, and child processes that find this package."""

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch import submit
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.backends.local import backend as local_backend
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, read_node_records
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.own_processes import START
from scaletrain_cli.plan import result
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.forked import Forked, RealProcess, forking
from tests.launch.working_tree import WorkingTree
from tests.waiting import wait_until

PROJECT = Path(__file__).parent.parent.parent
ENGINE = "tests.launch.fake_engine"
LOCAL = LocalBackend(engine=ENGINE)
# The package does not change while tests run, and its hash costs more than all else of a new run.
submit.code_hash = functools.cache(submit.code_hash)  # type: ignore[attr-defined]

SPEC = """
schema: scaletrain/v1
name: fake
model: {family: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8,
        vocab_size: 64, seq_len: 8}
data: {source: python-stdlib, tokenizer: {kind: bpe, vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 1, steps: 20, precision: fp32}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 2, gpu: cpu, grace_seconds: 20}
"""


@pytest.fixture(autouse=True)
def no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in engines read no data: nothing is prepared for them in the process of the test."""
    monkeypatch.setattr("scaletrain_cli.launch.preparation.reads_prepared_data", lambda *_: False)


@dataclass(frozen=True)
class MadeRun:
    run: RunDir
    record: RunRecord

    def log(self, attempt: int, rank: int) -> str:
        paths = list((self.run.attempt(attempt) / "logs").glob(f"*-{rank:05d}.log"))
        return paths[0].read_text(encoding="utf-8") if paths else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]


MakeRun = Callable[..., MadeRun]


def make_spec(*overrides: str, env: dict[str, str] | None = None, fake: dict[str, Any] | None = None) -> RunSpec:
    spec = parse_spec(SPEC, file="fake.yaml", base_dir=PROJECT, overrides=overrides)
    return spec.model_copy(update={"env": {**(env or {}), "FAKE": json.dumps(fake or {})}})


def make_plan(spec: RunSpec) -> result.RunPlan:
    """Return a plan with placeholder figures."""
    stage = {field.name: 1 for field in fields(result.StageMemory)}
    layout = {field.name: 1 for field in fields(result.Layout) if field.default is MISSING}
    layout |= {  # type: ignore[dict-item]
        "world_size": spec.world_size,
        "activation_checkpointing": "none",
        "offload": "none",
        "cross_entropy": "whole",
    }
    return result.RunPlan(
        model=result.ModelSize(1, 1, 6.0),
        layout=result.Layout(**layout),  # type: ignore[arg-type]
        memory=result.Memory(**stage, capacity=2, fits=True, by_stage=(result.StageMemory(**stage),)),
        time=result.Time(*[1.0] * 11),
        network=result.Network(result.PerStepBytes(0, 0, 0, 0, 0)),
        durability=result.Durability(1, 1.0, 1, 1.0, 1.0, True),
        cost=result.Cost(None, recorded("none"), None, None, None),
        ranges=result.Ranges(*[result.MeasuredError(False, "none", "none", "none")] * 2),
    )


def is_running(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Agent:
    """A node agent, started as by a scheduler; ``real``: by its command line, which takes longer than a fork."""

    def __init__(
        self,
        made: MadeRun,
        environment: dict[str, str] | None = None,
        *options: str,
        node_rank: int = 0,
        module: Sequence[str] = ("scaletrain_cli.launch.node.agent",),
        real: bool = False,
    ) -> None:
        self.made = made
        self.node_rank = node_rank
        if node_rank == 0:
            begin_attempt(made.run, made.record.spec, scheduler="test", job_id="1", nodes=("here",))
        self.attempt = made.run.attempts()[-1]
        words = [*module, str(made.run.path), "--engine", ENGINE, "--attempt", str(self.attempt), *options]
        words += ["--node-rank", str(node_rank), "--master-addr", "127.0.0.1", "--master-port", "29500"]
        environment = {**os.environ, **(environment or {})}
        kind, given = (RealProcess, environment) if real else (Forked, forking(environment))
        self.process = kind(words[0], words[1:], given, stdout=1)

    def wait(self) -> int:
        self.errors = self.process.communicate()
        return self.process.wait()

    def wait_until_up(self) -> None:
        world = self.made.record.spec.world_size
        wait_until(lambda: all("up" in self.made.log(self.attempt, rank) for rank in range(world)), "ranks are up")

    @property
    def node(self) -> NodeRecord:
        return read_node_records(self.made.run, self.attempt)[self.node_rank]

    @property
    def ranks(self) -> tuple[RankRecord, ...]:
        return self.node.ranks

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


StartAgent = Callable[..., Agent]


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors of local runs, their agents and ranks, as forks."""
    started: dict[int, Forked] = {}
    commands: dict[int, list[str]] = {}  # those of forks are the server's

    def spawn(command: list[str], log: Path) -> int:
        module, *arguments = command[command.index(START) + 1 :]
        with log.open("ab") as file:
            process = Forked(module, arguments, forking(os.environ), stdout=file.fileno(), stderr=file.fileno())
        started[process.pid], commands[process.pid] = process, command
        return process.pid

    monkeypatch.setattr(local_backend, "_spawn", spawn)
    monkeypatch.setattr(local_backend, "command_line", lambda pid: commands.get(pid, []))
    monkeypatch.setattr(local_backend, "_exit_code", lambda pid: started[pid].poll())


@pytest.fixture(autouse=True)
def children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), *([inherited] if inherited else [])]))


@pytest.fixture
def make_run() -> MakeRun:
    def make(*overrides: str, run_id: str | None = None, env: dict[str, str] | None = None, **fake: Any) -> MadeRun:
        spec = make_spec(*overrides, env=env, fake=fake)
        made = create_run(spec, make_plan(spec), run_id)
        return MadeRun(made.run, made.record)

    return make


@pytest.fixture
def start_agent() -> Iterator[StartAgent]:
    agents: list[Agent] = []

    def start(made: MadeRun, environment: dict[str, str] | None = None, *options: str, **how: Any) -> Agent:
        agents.append(Agent(made, environment, *options, **how))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()


def signalled_at_its_start(start_agent: StartAgent, made: MadeRun, *, real: bool = False) -> Agent:
    """Start an agent that has got SIGTERM, blocked as by a supervisor, before it has read its run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        agent = start_agent(made, real=real)
        agent.process.send_signal(signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return agent


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WorkingTree(tmp_path_factory.mktemp("tree")).folder


@pytest.fixture
def tree(tmp_path: Path, committed: Path) -> WorkingTree:
    return WorkingTree(shutil.copytree(committed, tmp_path / "it's a tree"))
