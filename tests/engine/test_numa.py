from pathlib import Path

import pytest
import torch

from scaletrain_cli.engine import numa
from scaletrain_cli.engine.numa import chosen_cores, node_of_pci_device, numa_cores, pin_to_numa_node, spread

TWO_NODES = {0: frozenset({*range(8), *range(16, 24)}), 1: frozenset({*range(8, 16), *range(24, 32)})}
ALL = TWO_NODES[0] | TWO_NODES[1]


def machine(sys: Path, cpulists: dict[str, str], gpus: dict[str, str]) -> Path:
    for name, cores in cpulists.items():
        folder = sys / "devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for address, node in gpus.items():
        folder = sys / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return sys


def test_the_topology_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    lists = {"node0": "0-7,16-23", "node1": "8-15,24-31", "node2": ""}  # the last one has memory alone
    sys = machine(tmp_path, lists, {"0000:3b:00.0": "1", "0000:5e:00.0": "-1"})
    assert numa_cores(sys) == TWO_NODES
    assert node_of_pci_device(sys, "0000:3b:00.0") == 1
    assert node_of_pci_device(sys, "0000:5e:00.0") is None, "the firmware does not say"
    assert node_of_pci_device(sys, "0000:99:00.0") is None
    assert numa_cores(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("nodes", "rank", "allowed", "kept"),
    [
        ([0, 0, 1, 1], 2, ALL, TWO_NODES[1]),
        ([0, 0, 1, 1], 2, frozenset(range(4, 14)), frozenset(range(8, 14))),
        ([0, 0, 1, 1], 2, TWO_NODES[1], frozenset()),
        ([0, 0, 1, 1], 2, TWO_NODES[0], frozenset()),
        ([0, 0, 1, 1], 2, frozenset({0, 1, 2, 8, 9, 10}), frozenset()),
        ([None] * 4, 2, ALL, frozenset()),
        ([0], 2, ALL, frozenset()),
    ],
    ids=["all cores", "some cores", "bound already", "bound elsewhere", "too few cores", "unknown", "more ranks"],
)
def test_a_rank_is_bound_to_those_cores_of_its_node_that_the_scheduler_assigned(
    nodes: list[int | None], rank: int, allowed: frozenset[int], kept: frozenset[int]
) -> None:
    assert chosen_cores(TWO_NODES, nodes, rank, allowed) == kept


def test_ranks_without_gpus_are_spread_over_the_nodes() -> None:
    assert spread(4, [0, 1]) == [0, 0, 1, 1]
    assert spread(1, [0, 1]) == [0]
    assert spread(3, [0, 1]) == [0, 0, 1]


def test_a_rank_is_bound_with_several_numa_nodes_unless_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    cpu = torch.device("cpu")
    monkeypatch.setattr(numa, "_SYS", machine(tmp_path / "one", {"node0": "0-31"}, {}))
    assert pin_to_numa_node(cpu, 1, 2, {}) == ""
    monkeypatch.setattr(numa, "_SYS", machine(tmp_path / "two", {"node0": "0-7,16-23", "node1": "8-15,24-31"}, {}))
    assert pin_to_numa_node(cpu, 1, 2, {"SCALETRAIN_NUMA": "off"}) == ""
    assert bound == []
    assert pin_to_numa_node(cpu, 1, 2, {}) == "rank on NUMA node 1: 16 cores"
    assert bound == [TWO_NODES[1]]
