"""Kill ranks of runs with copies in host memory: at most the steps between two copies are lost, and no bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.explain import explain
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.rundir.paths import RunDir, copies_folder
from scaletrain_cli.worker.memory_copies import read_copies, remove_copies
from tests.drills.campaign.forked_attempts import Attempt, ForkedRun, be_rank, strays
from tests.drills.campaign.kills import FINE_TUNING, OPTIMIZERS, ZERO_STAGES
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, drill_spec, submit_drill

pytestmark = [pytest.mark.drill, pytest.mark.long]

NO_SAVES = {"checkpoint__every": 1000, "checkpoint__in_memory": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    **ZERO_STAGES,
    "tensor parallel": {"layout__zero_stage": 1, "layout__tensor_parallel": 2},
    "pipeline parallel": {"layout__zero_stage": 1, "layout__pipeline_parallel": 2},
    "LoRA, stage 1": {**FINE_TUNING["SFT with LoRA, ZeRO-3"], "layout__zero_stage": 1},
    "LoRA, stage 3": FINE_TUNING["SFT with LoRA, ZeRO-3"],
}
EVERY = 8  # steps between checkpoints
# Kills of each layout; `MEMORY_KILLS=100` for more.
KILLS = int(os.environ.get("MEMORY_KILLS", "6"))


@pytest.fixture(autouse=True)
def copies_are_removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the copies of forked runs, which have no node agent."""
    made: list[RunDir] = []
    create = ForkedRun.create.__func__  # type: ignore[attr-defined]

    def created(cls: type[ForkedRun], *given: Any) -> ForkedRun:
        made.append((run := create(cls, *given)).run)
        return run

    monkeypatch.setattr(ForkedRun, "create", classmethod(created))
    yield
    for run in made:
        remove_copies(copies_folder(run))


def lost(run: ForkedRun) -> list[int]:
    return [event["lost_steps"] for event in run.events("resumed")]


# While the copy after step 16 is written, unless the machine is busy: then it may be whole.
KILLED_IN_A_COPY = "sigkill rank=1 step=17; slow-copy rank=1 seconds=0.1"


def assert_one_step_lost_at_most(run: ForkedRun) -> None:
    step = run.events("resumed")[0]["step"]
    assert step in (15, 16)
    assert lost(run) == [16 - step]


def newest(run: ForkedRun) -> int:
    """Return the step from which the next attempt resumes."""
    copies = read_copies(copies_folder(run.run), "revision 0, start 0")
    return max(run.newest_step(), *(step for step, ranks in copies.items() if len(ranks) == 2), 0)


def no_strike(attempt: Attempt) -> None:
    """Leave it to the fault."""


def struck(run: ForkedRun, begun: int, chance: random.Random) -> tuple[Attempt, int]:
    """Run an attempt after step ``begun`` that is killed; return it with the step that the next one must begin at."""
    kind = chance.choice(("between copies", "in a copy", "in a save", "at the start"))
    rank, step = chance.randrange(2), chance.randrange(begun + 1, min(begun + 6, STEPS) + 1)
    if kind == "in a save":
        step = min((begun + 8) // EVERY * EVERY + 1, STEPS)
    fault, strike = f"sigkill rank={rank} step={step}", no_strike
    fault += {"in a copy": f"; slow-copy rank={rank} seconds=0.05", "in a save": "; slow-save seconds=0.5"}.get(
        kind, ""
    )
    if kind == "at the start":
        step, fault = 0, ""

        def strike(attempt: Attempt) -> None:
            attempt.pids()
            attempt.over.wait(chance.uniform(0, 0.6))
            attempt.send(signal.SIGKILL, rank)

    print(f"{run.run.run_id}: killed {kind}, after step {begun}: {fault}")
    return run.attempt(strike, fault), max(begun, step - 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_of_every_kind_lose_one_step_at_most_and_no_bit(
    layout: str, dataset: Path, chance: random.Random
) -> None:
    chance.seed(f"{chance.random()} {layout}")
    spec = drill_spec(dataset, **{**LAYOUTS[layout], "checkpoint__every": EVERY, "checkpoint__in_memory": 1})
    prepare_data(spec)
    undisturbed = ForkedRun.create(spec)
    undisturbed.attempts_to_end()
    kills = 0
    while kills < KILLS:
        run, begun = ForkedRun.create(spec), 0
        while kills < KILLS and begun < STEPS - 10 and not run.events("finished"):
            attempt, least = struck(run, begun, chance)
            kills += attempt.exit_codes is None
            begun = newest(run)
            assert begun >= least or run.events("finished")
        run.attempts_to_end()
        assert max(lost(run), default=0) <= 1, run.events()
        assert strays(run, undisturbed) == []


def test_ranks_and_agents_killed_under_the_supervisor_lose_one_step_and_the_memory_is_given_back(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress without a checkpoint counts: otherwise three failures would end the run."""
    kills = "sigkill rank=0 step=8 attempt=1; sigkill-agent rank=1 step=15 attempt=2; sigkill rank=1 step=22 attempt=3"
    monkeypatch.setenv(VARIABLE, f"{kills}; exception rank=0 step=29 attempt=4")
    drill = submit_drill(dataset, **NO_SAVES, restarts="{crash: 10, node: 10}")
    folder = copies_folder(drill.run)
    drill.wait_for_end()
    ends = [event["reason"] for event in drill.events("attempt-ended")]
    assert ends == ["killed", "node", "killed", "crash", "done"]
    resumed = [event["step"] for event in drill.events("resumed")]
    trained = [7, 14, 21, 28]
    assert [max(step, last - 1) for step, last in zip(resumed, trained, strict=True)] == resumed
    assert run_status(drill.run).steps_lost_total <= sum(trained) - sum(resumed)
    assert not folder.exists()
    shown = [evidence.code for finding in explain(drill.run).findings for evidence in finding.evidence]
    assert "launch.resumed-from-copies" in shown
    assert strays(drill, undisturbed()) == []


def test_a_start_under_the_supervisor_that_is_killed_keeps_the_copies(
    dataset: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "sigkill rank=0 step=13 attempt=1")
    drill = submit_drill(dataset, **NO_SAVES, restarts="{crash: 10}")
    drill.wait_for(lambda: len(drill.run.attempts()) > 1)
    os.kill(drill.rank_pids()[1], signal.SIGKILL)  # while it imports
    drill.wait_for_end()
    (resumed,) = drill.events("resumed")
    assert (resumed["attempt"], resumed["lost_steps"] <= 1, resumed["saved_step"]) == (3, True, 0)
    assert resumed["step"] >= 11
    assert strays(drill, undisturbed()) == []


def memory_of_node(run: RunDir, node: int) -> Path:
    return run.path / f"memory of node {node}"


def be_rank_of_its_own_node(path: Path, number: int) -> int:
    """Run the engine as a rank of one of two nodes, whose memory no rank of the other one sees."""
    from scaletrain_cli.engine import assembly
    from scaletrain_cli.engine.checkpoint import memory_copies

    def folder(run: RunDir) -> Path:
        return memory_of_node(run, node) / "copies"

    of_node = int(os.environ["WORLD_SIZE"]) // 2
    node, local_rank = divmod(int(os.environ["RANK"]), of_node)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(local_rank), str(of_node)
    assembly.copies_folder = memory_copies.copies_folder = folder  # type: ignore[attr-defined]
    return be_rank(path, number)


TWO_NODES = {"cluster": "{scheduler: slurm, nodes: 2, gpus_per_node: 1, gpu: cpu, slurm: {time: 1h}}"}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_rank_on_two_nodes_resumes_from_the_memory_of_both(
    stage: int, dataset: Path, undisturbed: Undisturbed
) -> None:
    layout = {"layout__zero_stage": stage}
    run = ForkedRun.create(drill_spec(dataset, **NO_SAVES, **TWO_NODES, **layout), be_rank_of_its_own_node)
    run.attempt(fault=KILLED_IN_A_COPY)
    run.attempts_to_end()
    assert_one_step_lost_at_most(run)
    assert strays(run, undisturbed(**layout)) == []


SPARE_NODE = {"cluster": TWO_NODES["cluster"].replace("nodes: 2,", "nodes: 2, spare_nodes: 1,")}


REPLACED = {
    **LAYOUTS,
    "local SGD": OPTIMIZERS["local SGD, ZeRO-0"],
    "other parameters from step 18 on": FINE_TUNING["SFT in two stages"],
}


@pytest.mark.parametrize("layout", REPLACED)
def test_a_lost_node_that_a_new_one_replaces_loses_one_step_and_no_bit(
    layout: str, dataset: Path, chance: random.Random
) -> None:
    """Its memory is lost with it. In between a rank is killed, and two nodes change places."""
    settings = {**REPLACED[layout], **NO_SAVES, **SPARE_NODE}
    if layout == "tensor parallel":  # within a node
        settings["cluster"] = SPARE_NODE["cluster"].replace("per_node: 1", "per_node: 2")
    spec = drill_spec(dataset, **settings)
    prepare_data(spec)
    undisturbed = ForkedRun.create(spec, be_rank_of_its_own_node)
    undisturbed.attempts_to_end()
    run, step = ForkedRun.create(spec, be_rank_of_its_own_node), 0
    for number, hurt in enumerate(("node", "rank", "node", "places")):
        step += chance.randrange(4, 7)
        lost_node = chance.randrange(2)
        run.attempt(fault=f"sigkill rank={chance.randrange(2)} step={step}")
        assert len(run.events("started", "resumed")) == number + 1, run.log()
        if hurt == "node":
            shutil.rmtree(memory_of_node(run.run, lost_node))
        elif hurt == "places":
            memory_of_node(run.run, 0).rename(memory_of_node(run.run, 2))
            memory_of_node(run.run, 1).rename(memory_of_node(run.run, 0))
            memory_of_node(run.run, 2).rename(memory_of_node(run.run, 1))
    run.attempts_to_end()
    assert max(lost(run)) <= 1, run.events()
    assert [event.get("saved_step") for event in run.events("resumed")] == [0] * 4, "none from disk"
    assert strays(run, undisturbed) == []


def test_both_nodes_lost_resume_from_disk(dataset: Path, undisturbed: Undisturbed) -> None:
    run = ForkedRun.create(drill_spec(dataset, **NO_SAVES, **SPARE_NODE), be_rank_of_its_own_node)
    run.attempt(fault="sigkill rank=1 step=6")
    for node in range(2):
        shutil.rmtree(memory_of_node(run.run, node))
    run.attempts_to_end()
    assert [event["step"] for event in run.events("started", "resumed")] == [0, 0]
    assert strays(run, undisturbed()) == []


@pytest.mark.parametrize("layout", ["stage 0", "LoRA, stage 1", "pipeline parallel"])
def test_nodes_that_save_a_share_each_resume_with_that_of_the_other(layout: str, dataset: Path) -> None:
    spec = drill_spec(dataset, **{**LAYOUTS[layout], **NO_SAVES, **TWO_NODES})
    prepare_data(spec)
    undisturbed = ForkedRun.create(spec, be_rank_of_its_own_node)
    undisturbed.attempts_to_end()
    run = ForkedRun.create(spec, be_rank_of_its_own_node)
    run.attempt(fault=KILLED_IN_A_COPY)
    run.attempts_to_end()
    assert_one_step_lost_at_most(run)
    assert strays(run, undisturbed) == []
