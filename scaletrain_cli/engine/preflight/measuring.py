"""What one rank measures of its device and of its links, in a second or two. Every function is collective."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from scaletrain_cli.engine.preflight.judging import RankMeasures
from scaletrain_cli.engine.process_group import Agreement, Ranks

REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
_SENT_BYTES = {"cuda": 128 << 20, "cpu": 1 << 20}
_MATRIX = {"cuda": 8192, "cpu": 256}
_REPEATED = {"cuda": 10, "cpu": 3}
_PARTNERS = 3  # each node with so many others: one that is slow with all of them is slow itself


def measure(
    ranks: Ranks, per_node: int, device: torch.device, agreement: Agreement, node: str, free: tuple[int, int]
) -> RankMeasures:
    """This rank's own figures; ``free`` and total bytes of the device, (0, 0) where they do not count."""
    agreement.barrier()
    clock = time.time()
    return RankMeasures(
        rank=ranks.rank,
        node_rank=ranks.rank // per_node,
        node=node,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU process {ranks.rank}",
        total_bytes=free[1],
        free_bytes=free[0],
        flops=_flops(device),
        links=tuple(_links(ranks, per_node, device, agreement)),
        clock=clock,
        versions=_versions(device),
    )


def all_reduce_seconds(device: torch.device) -> float:
    """Of REDUCED_BYTES over all ranks, the fastest of a few."""
    data = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
    return min(_timed(device, lambda: dist.all_reduce(data), 1) for _ in range(_REPEATED[device.type]))


def partners(node: int, nodes: int) -> Iterator[int]:
    """With whom a node exchanges in each round, itself where it has nobody; no two rounds pair the same nodes.

    The circle method: one node stays, the others go round. Every node of a round has one partner, who has it too.
    """
    seats = nodes + nodes % 2
    for round_number in range(min(_PARTNERS, seats - 1)):
        last = seats - 1
        if node == last:
            other = round_number
        elif node == round_number:
            other = last
        else:
            other = (2 * round_number - node) % last
        yield other if other < nodes else node


def _links(ranks: Ranks, per_node: int, device: torch.device, agreement: Agreement) -> Iterator[float]:
    """Between the first ranks of two nodes, both ways at once. The others wait at the barrier of each round."""
    nodes = ranks.world_size // per_node
    if nodes < 2:
        return
    size = _SENT_BYTES[device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    mine = ranks.rank // per_node
    for partner in partners(mine, nodes):
        agreement.barrier()
        if ranks.rank % per_node == 0 and partner != mine:
            peer = partner * per_node
            seconds = min(_timed(device, lambda: _exchange(sent, received, peer), 1) for _ in range(3))  # noqa: B023
            yield 2 * size / seconds


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def _flops(device: torch.device) -> float:
    """Of a product of matrices in the type that its units are for, the fastest of a few."""
    size = _MATRIX[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = min(_timed(device, lambda: torch.mm(left, right), 5) for _ in range(_REPEATED[device.type]))
    return 5 * 2 * size**3 / seconds


def _timed(device: torch.device, work: Callable[[], object], times: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        # The libraries that NCCL loads at run time are the image's or the host's, and need not be the same.
        found["NCCL_NET_PLUGIN"] = os.environ.get("NCCL_NET_PLUGIN", "")
    return found
