"""Bind a rank to the cores of the NUMA node that its GPU is attached to, as far as the kernel reports it.

Memory that the rank touches first, such as pinned buffers, is then allocated on that node. Reads /sys.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

OFF = "SCALETRAIN_NUMA"  # "off": do not bind ranks
_FEWEST_CORES_PER_RANK = 2  # one for the rank, one for the threads that write checkpoints and read batches
_SYS = Path("/sys")


def pin_to_numa_node(device: torch.device, local_rank: int, local_ranks: int, environment: Mapping[str, str]) -> str:
    """Bind this process and its future threads; return a message for the log, empty if nothing was bound."""
    if environment.get(OFF) == "off":
        return ""
    cores_of = numa_cores(_SYS)
    if len(cores_of) < 2:
        return ""
    nodes: Sequence[int | None]
    if device.type == "cuda":
        nodes = [_node_of_gpu(index) for index in range(min(local_ranks, torch.cuda.device_count()))]
    else:
        nodes = spread(local_ranks, sorted(cores_of))
    chosen = chosen_cores(cores_of, nodes, local_rank, frozenset(os.sched_getaffinity(0)))
    if not chosen:
        return ""
    try:
        os.sched_setaffinity(0, chosen)
    except OSError:  # containers may forbid it
        return ""
    return f"rank on NUMA node {nodes[local_rank]}: {len(chosen)} cores"


def numa_cores(sys: Path) -> dict[int, frozenset[int]]:
    """Return cores by NUMA node, for nodes with cores; empty if the kernel does not report them."""
    by_node: dict[int, frozenset[int]] = {}
    for folder in (sys / "devices" / "system" / "node").glob("node[0-9]*"):
        try:
            cores = frozenset(_numbers((folder / "cpulist").read_text(encoding="ascii")))
        except (OSError, ValueError):
            return {}
        if cores:
            by_node[int(folder.name.removeprefix("node"))] = cores
    return by_node


def node_of_pci_device(sys: Path, address: str) -> int | None:
    """Return the NUMA node of a PCI device such as ``0000:3b:00.0``; None if the kernel does not report it."""
    try:
        node = int((sys / "bus" / "pci" / "devices" / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def spread(ranks: int, nodes: Sequence[int]) -> list[int]:
    """Return a node for each rank, balanced; neighboring ranks share a node."""
    return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]


def chosen_cores(
    cores_of: Mapping[int, frozenset[int]], nodes: Sequence[int | None], local_rank: int, allowed: frozenset[int]
) -> frozenset[int]:
    """Return the cores to bind a rank to; empty to leave it on all of its cores.

    ``nodes``: the NUMA node of each rank of this machine. ``allowed``: the cores that the scheduler assigned to this
    rank. The rank is not bound if its node is unknown, if the scheduler has bound it already, or if its node has too
    few of the allowed cores for all its ranks.
    """
    node = nodes[local_rank] if local_rank < len(nodes) else None
    here = allowed & cores_of.get(node, frozenset()) if node is not None else frozenset[int]()
    if here == allowed or len(here) < _FEWEST_CORES_PER_RANK * list(nodes).count(node):
        return frozenset()
    return here


def _node_of_gpu(index: int) -> int | None:
    properties = torch.cuda.get_device_properties(index)
    place = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in place):
        return None
    domain, bus, device = place
    return node_of_pci_device(_SYS, f"{domain:04x}:{bus:02x}:{device:02x}.0")


def _numbers(text: str) -> list[int]:
    """Parse a list of cores as the kernel writes it, ``0-3,8``. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
