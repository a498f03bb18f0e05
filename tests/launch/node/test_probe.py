"""The facts of a node, and which of them reject a plan before it is queued."""

import dataclasses
import os
import re
import socket
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.slurm.probe import probe_nodes
from scaletrain_cli.launch.node.inspection import NodeFacts, place_token, probe_node, probe_problems
from scaletrain_cli.rundir.paths import runs_root
from tests.cli.command_line import SMALL, scaletrain
from tests.launch.conftest import make_plan, make_spec

GOOD = NodeFacts("n1", 8, "/dev/nvidia*", 96, 10**12, 10**12, "3.11.2", {"torch": "2.13.0", "deepspeed": "0.19.8"}, "")
GPU_SPEC = make_spec(
    "cluster.scheduler=slurm",
    "cluster.gpu=h100-sxm-80gb",
    "cluster.gpus_per_node=8",
    "training.global_batch_size=8",
    "cluster.slurm.memory_per_node=500GB",
)


def problems(*changes: dict[str, object]) -> list[str]:
    nodes = [dataclasses.replace(GOOD, hostname=f"n{index + 1}", **change) for index, change in enumerate(changes)]  # type: ignore[arg-type]
    return [str(problem) for problem in probe_problems(GPU_SPEC, make_plan(GPU_SPEC), nodes)]


def test_nodes_as_planned_have_no_problem() -> None:
    assert problems({}, {"gpus": 9, "python": "3.12.1"}) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 7}, "n2: 7 GPUs (/dev/nvidia*), but the plan needs 8 per node."),
        ({"memory_bytes": 256 * 10**9}, "n2: has 256 GB of memory; memory_per_node is 500 GB."),
        ({"free_bytes": 0}, "n2: 0 B are free in the runs root; a checkpoint takes 1 B."),
        ({"folder_problem": "/runs cannot be used here: Read-only file system."}, "n2: /runs cannot be used here"),
        ({"packages": {"torch": "2.13.0"}}, "n2: deepspeed not installed for Python 3.11.2."),
        ({"packages": {"torch": "2.6.0", "deepspeed": "0.19.8"}}, "n2: has torch 2.6.0, but n1 has 2.13.0."),
    ],
)
def test_each_problem_names_its_node(change: dict[str, object], said: str) -> None:
    (found,) = problems({}, change)
    assert found.startswith(said)


def test_every_problem_of_every_node_is_listed() -> None:
    assert len(problems({"gpus": 0, "packages": {}}, {"gpus": 0})) == 3


def test_a_probe_returns_the_facts_of_its_node_and_writes_to_the_runs_root(tmp_path: Path) -> None:
    place_token(tmp_path, "t")
    facts = probe_node(str(tmp_path), "t")
    assert facts.folder_problem == ""
    assert facts.hostname == socket.gethostname()
    assert facts.cores == len(os.sched_getaffinity(0))
    assert min(facts.memory_bytes, facts.free_bytes) > 10**8
    assert facts.packages.keys() <= {"torch", "deepspeed"}
    assert "is another folder than" in probe_node(str(tmp_path), "other").folder_problem
    assert "No such file" in probe_node(str(tmp_path / "gone"), "t").folder_problem


@pytest.mark.parametrize("options", [[], ["--set", "cluster.scheduler=slurm", "--dry-run"]])
def test_a_probe_without_slurm_or_without_sending_anything_is_a_usage_error(options: list[str]) -> None:
    ended = scaletrain("submit", SMALL, "--probe", *options, code=2)
    assert "--probe requires cluster.scheduler = slurm" in ended.err


def test_a_probe_without_submitit_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.launch.backends.slurm.probe.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("'.[slurm]'")):
        probe_nodes(GPU_SPEC, make_plan(GPU_SPEC))
    assert not runs_root().exists()
