"""Ranks that measure each other on CPUs: the figures, the file, and the exit of a slow rank."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.health import preflight
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import WrongNodesError
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from tests.drills.training_runs import drill_spec
from tests.engine.ranks import on_ranks


@given(st.integers(2, 40))
def test_partners_are_mutual_and_no_two_nodes_are_paired_twice(nodes: int) -> None:
    rounds = list(zip(*(preflight.partners(node, nodes) for node in range(nodes)), strict=True))
    assert 1 <= len(rounds) <= 3
    met = set()
    for partners in rounds:
        assert [partners[partner] for partner in partners] == list(range(nodes))
        alone = [node for node, partner in enumerate(partners) if node == partner]
        assert len(alone) == nodes % 2
        pairs = {frozenset(pair) for pair in enumerate(partners)} - {frozenset([node]) for node in alone}
        assert not met & pairs
        met |= pairs


def checked(path: Path, slow_rank: int | None, scheduler: str) -> str:
    run, ranks = RunDir(path), Ranks.from_environment()
    record = read_record(run)
    cluster = record.spec.cluster.model_copy(update={"nodes": 4, "gpus_per_node": 1, "scheduler": scheduler})
    record = replace(record, spec=record.spec.model_copy(update={"cluster": cluster}))
    if ranks.rank == slow_rank:
        preflight._measure_flops = lambda device: 1.0  # type: ignore[assignment]
    else:
        preflight._measure_flops = lambda device: 1e9  # type: ignore[assignment]  # these share two cores
    measured = preflight._measure_links  # over cores that the ranks share: only whether each link was measured is kept
    preflight._measure_links = lambda *given: [1e9 if link > 0 else 0.0 for link in measured(*given)]  # type: ignore[assignment]
    try:
        preflight.check_together(run, record, ranks, 1, RankConsensus(8), torch.device("cpu"))
    except WrongNodesError as error:
        return str(error)
    except RuntimeError as error:  # the connection to the one that left
        return f"lost: {type(error).__name__}"
    return ""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = drill_spec(tmp_path)
    made = create_run(spec, make_plan(spec)).run
    made.attempt(made.new_attempt())
    return made


def test_ranks_measure_themselves_and_each_other(run: RunDir) -> None:
    assert on_ranks(4, checked, run.path, None, "slurm") == ["", "", "", ""]
    reported = json.loads((run.attempt(1) / "preflight.json").read_text())
    assert reported["all_reduce_seconds"] > 0
    assert [len(rank["links"]) for rank in reported["ranks"]] == [3, 3, 3, 3]
    assert all(link > 0 for rank in reported["ranks"] for link in rank["links"])
    assert reported["findings"] == []


def test_a_rank_with_a_slow_device_reports_it_and_exits(run: RunDir) -> None:
    reported = on_ranks(4, checked, run.path, 2, "slurm")
    assert reported[2].startswith("rank 2: CPU process 2 computes 1e-12 TFLOP/s")
    assert all(word.startswith("lost") for rank, word in enumerate(reported) if rank != 2)
    (finding,) = json.loads((run.attempt(1) / "preflight.json").read_text())["findings"]
    assert (finding["rank"], finding["keeps_off"]) == (2, True)


def test_without_other_nodes_a_slow_device_is_a_warning(run: RunDir) -> None:
    assert on_ranks(4, checked, run.path, 2, "local") == ["", "", "", ""]
    (finding,) = json.loads((run.attempt(1) / "preflight.json").read_text())["findings"]
    assert (finding["rank"], finding["keeps_off"], finding["costs_speed"]) == (2, False, True)


def test_a_run_that_was_moved_before_is_not_moved_again_for_speed(run: RunDir) -> None:
    record_event(run, "attempt-ended", attempt=1, reason="wrong-nodes")
    assert on_ranks(4, checked, run.path, 2, "slurm") == ["", "", "", ""]
