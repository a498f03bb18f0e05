import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.health import preflight
from scaletrain_cli.engine.health.preflight import Expected, RankMeasures, compare_ranks
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
        preflight.check_together(run, record, ranks, 1, RankConsensus(600.0), torch.device("cpu"))
    except WrongNodesError as error:
        dist.destroy_process_group()  # as the end of its process does
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


GB = 10**9
PLANNED = Expected(peak_bytes=70 * GB, all_reduce_seconds=0.010, measured_seconds=0.012)


def gang(nodes: int = 4, per_node: int = 2) -> list[RankMeasures]:
    return [
        RankMeasures(
            rank=node * per_node + local,
            node_rank=node,
            node=f"n{node}",
            device="H100",
            total_bytes=85 * GB,
            free_bytes=84 * GB,
            flops=6e14 * (1 + 0.01 * local),
            links=(40.0 * GB, 38.0 * GB, 41.0 * GB) if local == 0 else (),
            clock=1000.0 + 0.01 * node,
            versions={"torch": "2.13.0"},
        )
        for node in range(nodes)
        for local in range(per_node)
    ]


def test_equal_ranks_have_no_findings() -> None:
    assert compare_ranks(gang(), PLANNED) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"flops": 3e14}, "H100 computes 300 TFLOP/s, the others 603"),
        ({"free_bytes": 60 * GB}, "H100 has 60.0 GB free of 85.0 GB and the plan needs 70.0 GB"),
        ({"links": (2.0 * GB, 1.9 * GB, 2.1 * GB)}, "the network transfers 2.1 GB/s, that of the other nodes 41"),
    ],
)
def test_a_worse_rank_is_reported_and_rejected(changed: dict[str, object], words: str) -> None:
    measures = gang()
    measures[4] = replace(measures[4], **changed)  # type: ignore[arg-type]
    (finding,) = compare_ranks(measures, PLANNED)
    assert (finding.rank, finding.node, finding.keeps_off) == (4, "n2", True)
    assert words in str(finding.reason)


def test_a_healthy_node_is_not_rejected_for_a_bad_partner() -> None:
    measures = gang()
    measures[4] = replace(measures[4], links=(2.0 * GB, 2.0 * GB, 2.0 * GB))
    for rank, links in ((0, (2.0, 38.0, 41.0)), (2, (40.0, 2.0, 41.0)), (6, (40.0, 38.0, 2.0))):
        measures[rank] = replace(measures[rank], links=tuple(link * GB for link in links))
    assert [finding.node for finding in compare_ranks(measures, PLANNED)] == ["n2"]


def test_with_two_ranks_that_differ_neither_is_rejected() -> None:
    measures = gang(nodes=2, per_node=1)
    measures[1] = replace(measures[1], flops=1e13, links=(1.0 * GB,))
    assert compare_ranks(measures, PLANNED) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch 2.12.0, the others have 2.13.0"),
        ({"clock": 1030.0}, "the clock is 30 s ahead of the others"),
        ({"clock": 970.0}, "the clock is 30 s behind the others"),
    ],
)
def test_different_versions_and_clocks_are_reported_and_reject_no_node(changed: dict[str, object], words: str) -> None:
    measures = gang()
    measures[3] = replace(measures[3], **changed)  # type: ignore[arg-type]
    (finding,) = compare_ranks(measures, PLANNED)
    assert (finding.rank, finding.keeps_off) == (3, False)
    assert words in str(finding.reason)


def test_a_network_that_is_slow_for_all_is_reported_with_the_planned_time() -> None:
    (finding,) = compare_ranks(gang(), replace(PLANNED, measured_seconds=0.2))
    assert (finding.rank, finding.keeps_off) == (-1, False)
    assert "takes 200 ms and the plan expects 10.0 ms" in str(finding.reason)
    assert compare_ranks(gang(), replace(PLANNED, all_reduce_seconds=0.0)) == []  # nothing is planned for CPUs
