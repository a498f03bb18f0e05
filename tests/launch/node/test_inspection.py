"""The inspection of a node before its agent starts ranks."""

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import pytest

from scaletrain_cli.launch.node import inspection
from scaletrain_cli.launch.node.gpu_health import GpuHealth, NodeHealth
from scaletrain_cli.launch.node.inspection import NodeInspection, inspect_node
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.worker.failures import read_failures
from tests.launch.conftest import MadeRun, MakeRun, StartAgent
from tests.waiting import wait_until

GB = 10**9
FAKE_NVML = Path(__file__).parent / "fake_nvml"


def inspected(
    made: MadeRun,
    monkeypatch: pytest.MonkeyPatch,
    health: NodeHealth | None = None,
    visible: Mapping[str, str] = MappingProxyType({"CUDA_VISIBLE_DEVICES": "0,1"}),
    locks: ExitStack | None = None,
) -> NodeInspection:
    monkeypatch.setattr(inspection, "query_driver", lambda: health)
    return inspect_node(made.run, made.record, "node-0000-here", visible, locks)


def test_a_healthy_node_has_no_problems(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspected(make_run(), monkeypatch)
    assert (found.problems, found.notes, found.gpus) == ((), (), ())
    assert found.cores > 0
    assert found.run_free_bytes
    assert abs(found.clock_ahead_seconds) < 5
    assert list(make_run().run.path.glob(".clock*")) == []


def test_broken_gpus_memory_and_shm_are_reported_apart(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run("cluster.gpu=h100-sxm-80gb")
    gpus = (GpuHealth(0, "GPU-a", "H100", 85 * GB, 0), GpuHealth(1, "GPU-b", "H100", 85 * GB, 0, waits_for_reset=True))
    monkeypatch.setattr(inspection, "available_bytes", lambda: 8 * GB)
    monkeypatch.setattr(inspection, "_free", lambda path: 64 * 2**20)
    monkeypatch.setattr(inspection, "_clock_ahead", lambda path: -90.0)
    monkeypatch.setattr(inspection, "usable_cores", lambda: 1)
    found = inspected(made, monkeypatch, NodeHealth("550", gpus))
    assert [problem.code for problem in found.problems] == ["node.gpu-needs-reset"]
    assert [str(note).split(";")[0] for note in found.notes] == [
        "2 ranks share 1 CPU core: kernels are launched, data read and checkpoints written late",
        "/dev/shm has 67.1 MB free",
        "the clock is 90 s behind that of the run directory's file system: times in logs are wrong",
    ]
    durability = dataclasses.replace(made.record.plan.durability, copy_bytes_per_node=40 * GB)
    plan = dataclasses.replace(made.record.plan, durability=durability)
    more = inspected(MadeRun(made.run, dataclasses.replace(made.record, plan=plan)), monkeypatch, NodeHealth("550"))
    assert "take 40.0 GB" in str(more.problems[-1])


@pytest.mark.parametrize(
    ("visible", "of_spec", "judged"),
    [
        ({}, None, [0, 1]),  # the ranks take the first ones
        ({"CUDA_VISIBLE_DEVICES": "3,GPU-1,2"}, None, [3, 1]),
        ({}, "3,2", [3, 2]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2,0", [2, 0]),
    ],
)
def test_only_gpus_that_ranks_will_use_are_judged(
    visible: dict[str, str], of_spec: str | None, judged: list[int], make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that several people share, others use the other GPUs."""
    chosen = None if of_spec is None else {"CUDA_VISIBLE_DEVICES": of_spec}
    made = make_run("cluster.gpu=h100-sxm-80gb", env=chosen)
    busy = NodeHealth("550", tuple(GpuHealth(index, f"GPU-{index}", "H100", 85 * GB, 85 * GB) for index in range(4)))
    found = inspected(made, monkeypatch, busy, visible)
    assert [problem.params["gpu"] for problem in found.problems if problem.code == "node.gpu-in-use"] == judged
    assert [gpu.index for gpu in found.gpus] == judged


def test_a_run_on_this_machine_takes_the_first_gpus_that_are_fit_and_that_no_other_run_has(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, broken, *free = (GpuHealth(index, f"GPU-{index}", "H100", 85 * GB, 0) for index in range(5))
    busy, broken = dataclasses.replace(busy, used_bytes=85 * GB), dataclasses.replace(broken, waits_for_reset=True)
    health = NodeHealth("550", (busy, broken, *free))

    def taken(locks: ExitStack | None, *overrides: str) -> list[int]:
        made = make_run("cluster.gpu=h100-sxm-80gb", *overrides)
        return [gpu.index for gpu in inspected(made, monkeypatch, health, {}, locks).gpus]

    with ExitStack() as first, ExitStack() as second:
        assert taken(first) == [2, 3]
        assert taken(second) == [0, 1], "too few are left: the first ones, and why they are unfit"
        one = ("cluster.gpus_per_node=1", "training.global_batch_size=1")
        assert taken(second, *one) == [4], "what was tried before holds no lock"
    with ExitStack() as third:
        assert taken(third) == [2, 3], "once the runs have ended"
    assert taken(None) == [0, 1], "those that a scheduler gave to the job"


def test_ranks_on_this_machine_get_free_gpus(make_run: MakeRun, start_agent: StartAgent) -> None:
    path = os.pathsep.join([str(FAKE_NVML), os.environ["PYTHONPATH"]])
    given = {"PYTHONPATH": path, "FAKE_NVML": json.dumps({"gpus": [{"used": 85 << 30}, {}, {}, {}]})}
    one = ("cluster.gpu=h100-sxm-80gb", "cluster.gpus_per_node=1", "training.global_batch_size=1")
    made = [make_run(*one, stay={"1:0": 1}, echo=["CUDA_VISIBLE_DEVICES"]) for _ in range(2)]
    for run in made:
        agent = start_agent(run, given)
        wait_until(lambda: "up" in run.log(1, 0) or agent.process.poll() is not None, "it trains or ends")  # noqa: B023
    chosen = [run.log(1, 0).split("CUDA_VISIBLE_DEVICES='")[1].split("'")[0] for run in made]
    recorded = [json.loads(next((run.run.attempt(1) / "preflight").iterdir()).read_text())["gpus"] for run in made]
    assert [[gpu["index"] for gpu in gpus] for gpus in recorded] == [[1], [2]]
    assert chosen == [gpus[0]["uuid"] for gpus in recorded]


def test_an_agent_on_a_bad_node_writes_why_and_starts_no_rank(make_run: MakeRun, start_agent: StartAgent) -> None:
    made = make_run("cluster.gpu=h100-sxm-80gb")
    path = os.pathsep.join([str(FAKE_NVML), os.environ["PYTHONPATH"]])
    lost = json.dumps({"gpus": [{}, {"lost": True}]})
    agent = start_agent(made, {"PYTHONPATH": path, "FAKE_NVML": lost, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert agent.wait() == 5
    (path,) = (made.run.attempt(1) / "preflight").iterdir()
    document = json.loads(path.read_text())
    assert "GPU is lost" in document["problems"][0]
    assert document["problem_reasons"][0]["code"] == "node.driver-failed"
    (failure,) = read_failures(made.run, 1)
    assert (failure.reason, failure.code) == ("wrong-nodes", "node.driver-failed")
    assert "GPU is lost" in failure.message
    assert read_node_records(made.run, 1)[0].ranks == ()


def test_another_version_than_that_of_the_run_is_a_note(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run()
    older = MadeRun(made.run, dataclasses.replace(made.record, code_hash="0" * 64))
    (note,) = inspected(older, monkeypatch).notes
    assert note.params == {"installed": made.record.code_hash[:12], "submitted": "0" * 12}
