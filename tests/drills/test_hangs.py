"""Hangs of real runs on two nodes: one finding names the rank, the collective and the node. The table is in docs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import attempt_outcome, begin_attempt
from scaletrain_cli.launch.exit_classification import Outcome
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.worker.failures import read_failures
from tests.drills.training_runs import drill_spec
from tests.waiting import wait_until

NODES = ("alpha", "beta", "gamma")
FIRST = "10.77.0.1"  # the address of the first node
STEP = 8  # after the first steps, whose time limit is two minutes at least


@dataclass(frozen=True)
class Hang:
    """A rank sleeps for ever before ``call`` inside a function, and what the finding has to say."""

    collective: str
    inside: str | None
    call: str
    spec: dict[str, Any] = field(default_factory=dict)
    rank: int = 3
    step: int = STEP


GRADIENTS, PARAMETERS = "of gradients", "of parameters"
BETWEEN_STAGES = "of activations between pipeline stages"
HANGS = {
    "gradients, ZeRO-0": Hang(f"all-reduce {GRADIENTS}", "allreduce_bucket", "all_reduce", {"layout__zero_stage": 0}),
    "gradients, ZeRO-2": Hang(f"all-reduce {GRADIENTS}", "average_tensor", "all_reduce"),
    "gradients, ZeRO-3": Hang(
        f"reduce-scatter {GRADIENTS}", "__avg_scatter_grads", "reduce_scatter_tensor", {"layout__zero_stage": 3}
    ),
    "weights, ZeRO-1": Hang(
        f"all-gather {PARAMETERS}", "all_gather_dp_groups", "all_gather_into_tensor", {"layout__zero_stage": 1}
    ),
    "weights, ZeRO-3": Hang(
        f"all-gather {PARAMETERS}", "_all_gather", "all_gather_into_tensor", {"layout__zero_stage": 3}
    ),
    "gradient norm": Hang("all-reduce of the gradient norm", "get_grad_norm_direct", "all_reduce"),
    "loss": Hang("all-reduce of the loss", "_mean_of_step", "all_reduce"),
    "end of the step": Hang("all-reduce at the end of the step", "agree", "all_reduce"),
    "pipeline": Hang(
        f"receive {BETWEEN_STAGES}",
        "_exec_send_activations",
        "send",
        {"layout__pipeline_parallel": 2, "layout__zero_stage": 1},
        rank=1,
    ),
    "tensor parallelism": Hang(
        "all-reduce of activations between the ranks of a layer in model.embed_tokens",
        "sum_over_ranks",
        "all_reduce",
        {"layout__tensor_parallel": 2, "layout__zero_stage": 1},
    ),
    "data": Hang(f"all-reduce {GRADIENTS}", None, "scaletrain_cli.engine.data.loader:Loader.take"),
    "checkpoint": Hang(
        "all-gather of the files of a checkpoint", "_begin_commit", "all_gather", {"checkpoint__every": 10}
    ),
    "end of a save": Hang(
        "barrier at the end of a save", "finish", "barrier", {"checkpoint__every": 10, "checkpoint__async": "false"}
    ),
    "evaluation": Hang("all-reduce of an evaluation", "validation_loss", "all_reduce", {"evaluation__every": 10}),
}


@dataclass(frozen=True)
class Nodes:
    """A run on several agents, in one attempt."""

    run: RunDir
    record: RunRecord
    agents: list[subprocess.Popen[bytes]]
    switch: str  # its network namespace

    def outcome(self) -> Outcome:
        return attempt_outcome(self.run, self.record.spec, 1, cancelled=False)

    def ranks(self, node: int) -> list[int]:
        return [rank.pid for rank in read_node_records(self.run, 1)[node].ranks]

    def wait_for_step(self) -> None:
        wait_until(lambda: any(line["step"] >= STEP for line in read_metrics(self.run)), "it trains")


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def switch(processes: ExitStack, count: int) -> tuple[str, list[str]]:
    """Return the network namespaces of a switch and of nodes that it connects; skip where that is not permitted."""
    names = [f"scaletrain-{os.getpid()}-{number}" for number in range(count + 1)]
    for name in names:
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            pytest.skip("network namespaces need root")
        processes.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
    between, *nodes = names
    commands = [f"-n {between} link add bridge type bridge", f"-n {between} link set bridge up"]
    for number, node in enumerate(nodes):
        commands += [
            f"link add eth netns {node} type veth peer name port{number} netns {between}",
            f"-n {node} addr add {FIRST[:-1]}{number + 1}/24 dev eth",
            f"-n {node} link set eth up",
            f"-n {node} link set lo up",
            f"-n {between} link set port{number} master bridge up",
        ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    return between, nodes


def start(dataset: Path, processes: ExitStack, hang: dict[str, Any], ranks: int = 2, **overrides: Any) -> Nodes:
    """Start a run of four ranks on two nodes, or of one rank on each of three; skip where that needs more rights."""
    nodes = NODES if ranks == 1 else NODES[:2]
    between, network = switch(processes, len(nodes))
    size = {"cluster__scheduler": "slurm", "cluster__nodes": len(nodes), "cluster__gpus_per_node": ranks}
    never = {"training__steps": 10**6, "checkpoint__every": 10**6, "evaluation__every": 0, "guard__hang": "6s"}
    batch = {"training__global_batch_size": 12, "training__micro_batch_size": 1}
    spec = drill_spec(dataset, **{**size, **never, **batch, **overrides})
    made = create_run(spec.model_copy(update={"env": {"HANG": json.dumps(hang)}}), make_plan(spec))
    begin_attempt(made.run, made.record.spec, scheduler="slurm", job_id="1", nodes=nodes)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    agents = []
    for number, node in enumerate(nodes):
        words = ["ip", "netns", "exec", network[number], sys.executable, "-m", "scaletrain_cli.launch.node.agent"]
        words += [str(made.run.path), "--attempt", "1", "--engine", "tests.drills.hanging_engine"]
        words += ["--node-rank", str(number), "--node-name", node, "--master-addr", FIRST, "--master-port", "29500"]
        agents.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        processes.callback(agents[-1].wait)
        processes.callback(agents[-1].kill)  # its ranks end with it, stopped ones as well
    return Nodes(made.run, made.record, agents, between)


def finding(outcome: Outcome) -> Reason:
    assert outcome.reason == "hang", outcome
    found = outcome.why.params["finding"]
    assert isinstance(found, Reason)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_does_not_enter_a_collective_is_named(name: str, dataset: Path, processes: ExitStack) -> None:
    case = HANGS[name]
    hang = {"rank": case.rank, "step": case.step, "inside": case.inside, "call": case.call, "long_seconds": 6.0}
    nodes = start(dataset, processes, hang, **case.spec)
    assert [agent.wait() for agent in nodes.agents] == [1, 1]
    outcome = nodes.outcome()
    found = finding(outcome)
    assert found.code == "launch.hang-not-entered", outcome.message
    assert (found.params["rank"], found.params["collective"]) == (case.rank, case.collective), outcome.message
    # The storage system may be the cause of a rank that waits for its batch.
    assert outcome.against == (() if name == "data" else (NODES[case.rank // 2],))
    assert f"rank {case.rank} on node-{case.rank // 2:04d}-{NODES[case.rank // 2]} did not enter" in outcome.message
    assert "hanging_engine.py" in found.params["doing"].params["function"]


@pytest.mark.long
def test_a_stopped_rank_is_named_with_the_collective_that_waits_for_it(dataset: Path, processes: ExitStack) -> None:
    nodes = start(dataset, processes, {})
    nodes.wait_for_step()
    os.kill(nodes.ranks(1)[1], signal.SIGSTOP)
    assert [agent.wait() for agent in nodes.agents] == [1, 1]
    outcome = nodes.outcome()
    found = finding(outcome)
    assert (found.code, found.params["rank"], outcome.against) == ("launch.hang-not-entered", 3, ("beta",))
    assert "stopped by a signal (state T)" in outcome.message
    assert found.params["collective"], outcome.message


@pytest.mark.long
def test_a_node_that_stops_as_a_whole_is_named_by_the_ranks_that_wait_for_it(
    dataset: Path, processes: ExitStack
) -> None:
    nodes = start(dataset, processes, {})
    nodes.wait_for_step()
    for pid in (nodes.agents[1].pid, *nodes.ranks(1)):
        os.kill(pid, signal.SIGSTOP)
    assert nodes.agents[0].wait() == 1
    outcome = nodes.outcome()
    found = finding(outcome)
    assert (found.code, found.params["ranks"], outcome.against) == ("launch.hang-silent-node", [2, 3], ("beta",))


@pytest.mark.long
def test_a_stopped_agent_does_not_hide_the_rank_that_hangs_on_its_node(dataset: Path, processes: ExitStack) -> None:
    nodes = start(dataset, processes, {})
    nodes.wait_for_step()
    os.kill(nodes.agents[1].pid, signal.SIGSTOP)
    os.kill(nodes.ranks(1)[1], signal.SIGSTOP)
    assert nodes.agents[0].wait() == 1
    outcome = nodes.outcome()
    found = finding(outcome)
    # Its own ranks continue the agent after 30 seconds, which may be before the other one has ended.
    assert outcome.against == ("beta",), outcome.message
    assert 3 in (found.params["rank"],) if "rank" in found.params else 3 in found.params["ranks"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cut_link_is_told_from_a_rank_that_hangs(ranks: int, dataset: Path, processes: ExitStack) -> None:
    nodes = start(dataset, processes, {}, ranks)
    nodes.wait_for_step()
    subprocess.run(["ip", "-n", nodes.switch, "link", "set", "port1", "nomaster"], check=True)
    assert [agent.wait() for agent in nodes.agents] == [1] * len(nodes.agents)
    outcome = nodes.outcome()
    found = finding(outcome)
    failures, beta = read_failures(nodes.run, 1), "node-0001-beta"
    at = {address: failure.node for failure in failures for address in failure.addresses}
    stalled = {frozenset((failure.node, at[peer])) for failure in failures for peer in failure.stalled}
    assert stalled
    assert all(beta in pair for pair in stalled), "the first and the third node reach each other"
    if len(stalled) == 2:
        assert (found.code, outcome.against) == ("launch.hang-node-cut-off", ("beta",))
    else:  # either end may be at fault; of three nodes, one may have sent nothing when the link was cut
        assert (found.code, outcome.against) == ("launch.hang-link-cut", ())
        assert found.params["nodes"] == sorted(*stalled)
    assert found.params["collective"], outcome.message
