"""Findings of the preflight: which device or node is worse than the others, and which is not."""

from dataclasses import replace

import pytest

from scaletrain_cli.engine.health.preflight import Expected, RankMeasures, compare_ranks

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
