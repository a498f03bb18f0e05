"""Measure the devices and links before step 1, and reject bad nodes; writes attempts/NNNN/preflight.json."""

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import WrongNodesError
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

logger = logging.getLogger(__name__)
REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
_SENT_BYTES = {"cuda": 128 << 20, "cpu": 1 << 20}
_MATRIX = {"cuda": 8192, "cpu": 256}
_REPEATED = {"cuda": 10, "cpu": 3}
_PARTNERS = 3  # each node with this many others: a node that is slow with all of them is slow itself


def measure(
    ranks: Ranks, per_node: int, device: torch.device, consensus: RankConsensus, node: str, free: tuple[int, int]
) -> "RankMeasures":
    """Measure this rank; ``free`` and total bytes of the device, (0, 0) without a GPU."""
    consensus.barrier()
    clock = time.time()
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        # The libraries that NCCL loads at run time come from the image or the host, and may differ between nodes.
        versions["NCCL_NET_PLUGIN"] = os.environ.get("NCCL_NET_PLUGIN", "")
    return RankMeasures(
        rank=ranks.rank,
        node_rank=ranks.rank // per_node,
        node=node,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU process {ranks.rank}",
        total_bytes=free[1],
        free_bytes=free[0],
        flops=_measure_flops(device),
        links=tuple(_measure_links(ranks, per_node, device, consensus)),
        clock=clock,
        versions=versions,
    )


def all_reduce_seconds(device: torch.device) -> float:
    """Return the seconds of an all-reduce of REDUCED_BYTES over all ranks, the fastest of a few."""
    data = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
    return min(_timed(device, lambda: dist.all_reduce(data), 1) for _ in range(_REPEATED[device.type]))


def partners(node: int, nodes: int) -> Iterator[int]:
    """Return the partner of each node in each round, itself if it has none; no two rounds pair the same nodes.

    The circle method of round-robin tournaments: one node stays, the others rotate.
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


def _measure_links(ranks: Ranks, per_node: int, device: torch.device, consensus: RankConsensus) -> Iterator[float]:
    """Measure links between the first ranks of two nodes, both ways at once; other ranks wait."""
    nodes = ranks.world_size // per_node
    if nodes < 2:
        return
    size = _SENT_BYTES[device.type]
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    mine = ranks.rank // per_node
    for partner in partners(mine, nodes):
        consensus.barrier()
        if ranks.rank % per_node == 0 and partner != mine:
            peer = partner * per_node
            seconds = min(_timed(device, lambda: _exchange(sent, received, peer), 1) for _ in range(3))  # noqa: B023
            yield 2 * size / seconds


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def _measure_flops(device: torch.device) -> float:
    """Return FLOPs per second of a matrix product in the dtype of the tensor cores, the fastest of a few."""
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


# A GPU throttled by heat or power loses a third or more; healthy ones of a kind differ by a few percent.
_SLOW_DEVICE = 0.7
# A link that fell back to TCP, or to fewer lanes, is several times slower.
_SLOW_NODE = 0.5
_SLOW_ALL = 0.3
_FEWEST_TO_COMPARE = 3  # with two, it is unknown which one is wrong
_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class RankMeasures:
    """Measures of one rank. ``links``: bytes per second, both ways at once, to a rank of each partner node."""

    rank: int
    node_rank: int
    node: str
    device: str
    total_bytes: int
    free_bytes: int
    flops: float
    links: tuple[float, ...]
    clock: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Expected:
    """The plan: bytes of a rank's peak memory, planned seconds of the all-reduce, and its measured seconds."""

    peak_bytes: int
    all_reduce_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class PreflightFinding:
    """A finding about a rank, -1 for none in particular. ``keeps_off``: no attempt should run on that node.

    ``costs_speed``: the job would run, but slower.
    """

    rank: int
    node: str
    reason: Reason
    keeps_off: bool
    costs_speed: bool = False

    def to_document(self) -> dict[str, Any]:
        """Return the finding as JSON values, with the code, the parameters and the text of its reason."""
        return {
            "rank": self.rank,
            "node": self.node,
            "message": str(self.reason),
            **self.reason.to_document(),
            "keeps_off": self.keeps_off,
            "costs_speed": self.costs_speed,
        }


def compare_ranks(measures: Sequence[RankMeasures], expected: Expected) -> list[PreflightFinding]:
    """Return everything that is wrong with these ranks, the findings that reject a node first."""
    return sorted(_findings(measures, expected), key=lambda finding: not finding.keeps_off)


def _findings(measures: Sequence[RankMeasures], expected: Expected) -> Iterator[PreflightFinding]:
    for one in measures:
        if one.total_bytes and one.free_bytes < expected.peak_bytes:
            params = {"device": one.device, "free_bytes": one.free_bytes, "total_bytes": one.total_bytes}
            reason = Reason("engine.device-memory-short", {**params, "peak_bytes": expected.peak_bytes})
            yield PreflightFinding(one.rank, one.node, reason, keeps_off=True)
    flops = median(one.flops for one in measures)
    for one in measures if len(measures) >= _FEWEST_TO_COMPARE else ():
        if one.flops < _SLOW_DEVICE * flops:
            speeds = {"device": one.device, "tflops": one.flops / 1e12, "usual_tflops": flops / 1e12}
            yield PreflightFinding(
                one.rank, one.node, Reason("engine.device-slow", speeds), keeps_off=True, costs_speed=True
            )
    # The best link of each node: a healthy node is slow with a bad partner, but not with all partners.
    best = {one.rank: (one.node, max(one.links)) for one in measures if one.links}
    usual = median(link for _, link in best.values()) if len(best) >= _FEWEST_TO_COMPARE else 0.0
    for rank, (node, link) in best.items():
        if link < _SLOW_NODE * usual:
            reason = Reason("engine.network-slow", {"gbps": link / 1e9, "usual_gbps": usual / 1e9})
            yield PreflightFinding(rank, node, reason, keeps_off=True, costs_speed=True)
    for name in sorted({name for one in measures for name in one.versions}):
        versions = [one.versions.get(name, "none") for one in measures]
        common = max(sorted(set(versions)), key=versions.count)
        for one, version in zip(measures, versions, strict=True):
            if version != common:
                reason = Reason("engine.version-differs", {"library": name, "version": version, "usual": common})
                yield PreflightFinding(one.rank, one.node, reason, keeps_off=False)
    clock = median(one.clock for one in measures)
    for one in measures:
        if abs(one.clock - clock) > _CLOCK_SECONDS:
            code = "engine.clock-ahead" if one.clock > clock else "engine.clock-behind"
            yield PreflightFinding(
                one.rank, one.node, Reason(code, {"seconds": abs(one.clock - clock)}), keeps_off=False
            )
    if expected.all_reduce_seconds and expected.measured_seconds * _SLOW_ALL > expected.all_reduce_seconds:
        times = {"measured": expected.measured_seconds, "planned": expected.all_reduce_seconds}
        yield PreflightFinding(-1, "", Reason("engine.all-reduce-slow", times), keeps_off=False)


SCHEMA = "scaletrain.preflight/v1"
ONLY = "SCALETRAIN_ONLY"  # what the ranks do instead of training: ``preflight`` or ``rehearsal``


def is_enabled(record: RunRecord) -> bool:
    """Return True if the preflight runs; by default on GPUs only, because CPU ranks share their cores."""
    setting = record.spec.guard.preflight
    return setting == "always" or (setting == "auto" and record.spec.cluster.gpu != "cpu")


def check_together(
    run: RunDir, record: RunRecord, ranks: Ranks, attempt: int, consensus: RankConsensus, device: torch.device
) -> None:
    """Measure and compare all ranks. Collective. Raises WrongNodesError on the ranks that findings reject."""
    cluster = record.spec.cluster
    free = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    # Before anything else: NCCL creates a group's communicator at its first operation, which needs all ranks.
    reduced = all_reduce_seconds(device)
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("SCALETRAIN_NODE_NAME") or socket.gethostname()
    gathered = consensus.gather(measure(ranks, cluster.gpus_per_node, device, consensus, node, free))
    findings: list[PreflightFinding] = []
    if gathered is not None:
        link = cluster_link(cluster, find_accelerator(cluster))
        planned = link.reduce(REDUCED_BYTES[device.type], ranks.world_size) if device.type == "cuda" else 0.0
        compared = compare_ranks(gathered, Expected(record.plan.memory.peak, planned, reduced))
        findings = compared
        ended = (event for event in read_events(run) if event["event"] == "attempt-ended")
        if cluster.traits.runs_here or any(event["reason"] == "wrong-nodes" for event in ended):
            # No other attempt could get better nodes, or one has tried: what only costs speed is a warning.
            keeps = [finding.keeps_off and not finding.costs_speed for finding in compared]
            findings = [dataclasses.replace(fault, keeps_off=off) for fault, off in zip(compared, keeps, strict=True)]
        write_document(
            run.attempt(attempt) / "preflight.json",
            {
                "schema": SCHEMA,
                "all_reduce_seconds": reduced,
                "all_reduce_planned_seconds": planned,
                "ranks": [dataclasses.asdict(one) for one in gathered],
                "findings": [finding.to_document() for finding in findings],
            },
        )
        for finding in findings:
            place = f"rank {finding.rank} on {finding.node}: " if finding.node else ""
            logger.warning("preflight: %s%s", place, finding.reason)
    findings = consensus.follow_rank_zero(findings)
    bad = [finding for finding in findings if finding.keeps_off]
    mine = [str(finding.reason) for finding in bad if finding.rank == ranks.rank]
    if mine:
        raise WrongNodesError(Reason("engine.preflight-failed", {"rank": ranks.rank, "problems": "; ".join(mine)}))
    if bad:
        consensus.barrier()  # wait until the agents end this attempt; the rejected ranks have reported themselves
