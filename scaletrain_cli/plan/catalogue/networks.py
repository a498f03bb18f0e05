"""The network catalogue: bandwidth and latency of links, and the seconds of one collective on them.

Rates are per GPU and direction, in bytes/s, also those in a spec. Bus bandwidths and their sources are in
networks.json. A collective takes its latency, plus the bytes that each rank sends divided by the bus bandwidth. Over n
ranks an all-gather or reduce-scatter sends (n - 1) / n of the buffer, an all-reduce twice that (nccl-tests,
doc/PERFORMANCE.md).
"""

import math
from dataclasses import dataclass
from functools import cache

from scaletrain_cli.plan.catalogue.hardware import SLOWEST, Accelerator, near_ranks, unknown_name
from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.spec import ClusterSpec
from scaletrain_cli.text import nearest_name

_CATALOGUE = "plan/catalogue/networks.json"
# GPUs of the largest nodes for which the largest rate of a node and the latency of each rank in it are known, and those
# of the usual node, whose figures stand for NVLink domains.
_LARGEST_NODE, _USUAL_NODE = 16, 8


@dataclass(frozen=True)
class Link:
    """The links of one cluster: ``inside`` a node, and ``between`` nodes of ``per_node`` GPUs. Latencies in seconds.

    Nodes that NVLink connects count as one here, in which ``sharing`` GPUs share what a usual node reaches at most.
    """

    name: str
    per_node: int
    sharing: int
    inside: float  # bytes/s per GPU
    inside_latency: float  # of one collective
    inside_hop: float  # latency per rank
    inside_shares: tuple[float, float, float]  # of ``inside`` that all-reduce, all-gather and send reach
    between: float  # bytes/s per GPU
    between_latency: float  # per node
    between_least: float  # least seconds of a collective, per node
    message_latency: float  # of one send
    point_share: float  # of ``between`` that a send or an all-to-all reaches
    reduce_shares: tuple[tuple[float, float], ...]  # (log2 of ranks, share of ``between`` that an all-reduce reaches)
    gather_shares: tuple[tuple[float, float], ...]  # the same for all-gather and reduce-scatter
    package: int = 1  # devices of one package, and the bytes/s between them
    in_package: float = 0.0
    stall_chance: float = 0.0  # probability per node that sends to and from it stall throughout a run
    stall_seconds: float = 0.0  # that a stalled send takes longer

    def gather(self, size: float, ranks: int, stride: int = 1, most: float = math.inf) -> float:
        """Return the seconds to all-gather or reduce-scatter ``size`` bytes in total.

        ``ranks``: in the group; ``stride``: distance between neighbors of the group in rank order; ``most``: largest
        rate of a node that the caller's collectives reach, in bytes/s, which the groups on its GPUs share.
        """
        return self._collective(size, ranks, stride, 1, self.inside_shares[1], self.gather_shares, most)

    def reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds to all-reduce ``size`` bytes; ``ranks`` and ``stride``: see ``gather``."""
        return self._collective(size, ranks, stride, 2, self.inside_shares[0], self.reduce_shares)

    def exchange(self, size: float, ranks: int, stride: int = 1, copies: int = 1) -> float:
        """Return the seconds of an all-to-all in which each rank sends ``size`` bytes.

        ``copies``: the number of different random ranks that each element goes to; copies for one node cross the
        network once (DeepEP, github.com/deepseek-ai/DeepEP).
        """
        if ranks <= 1 or not size:
            return 0.0
        nodes, in_node = self.spread(ranks, stride)
        share = size * (ranks - 1) / ranks
        inside = share / (self.inside * self.inside_shares[1])
        latency = self.inside_latency + ranks * self.inside_hop
        if nodes == 1:
            return latency + inside
        # What leaves the node uses only this GPU's own network link.
        once = nodes * (1 - (1 - 1 / nodes) ** copies) / copies
        outside = once * size * (ranks - in_node) / ranks / (self.between * self.point_share)
        return latency + nodes * self.message_latency + max(inside, outside)

    def send(self, size: float, stride: int) -> float:
        """Return the seconds to send ``size`` bytes to the rank at distance ``stride``."""
        if stride < self.per_node:
            return self.inside_latency + size / (self.inside * self.inside_shares[2])
        return self.message_latency + size / (self.between * self.point_share)

    def stall_probability(self, ranks: int) -> float:
        """Return the probability that some send between the nodes of ``ranks`` ranks stalls throughout a run."""
        nodes = -(-ranks // self.per_node)
        return 1 - (1 - self.stall_chance) ** nodes if nodes > 1 else 0.0

    def spread(self, ranks: int, stride: int) -> tuple[int, int]:
        """Return (number of nodes that a group spans, its ranks in each node)."""
        in_node = max(1, min(ranks, self.per_node // stride))
        return -(-ranks // in_node), in_node

    def _collective(
        self,
        size: float,
        ranks: int,
        stride: int,
        rounds: int,
        share: float,
        shares: tuple[tuple[float, float], ...],
        most: float = math.inf,
    ) -> float:
        """Return the seconds of a ring collective; ``rounds``: how often a rank sends (n - 1) / n of the buffer."""
        if ranks <= 1 or not size:
            return 0.0
        nodes, in_node = self.spread(ranks, stride)
        sent = rounds * size * (ranks - 1) / ranks
        latency = self.inside_latency + min(ranks, self.sharing) * self.inside_hop
        inside = (self.in_package if ranks * stride <= self.package else self.inside) * share
        if nodes == 1:
            return latency + sent / inside
        # A group with k ranks per node uses k network cards, and has its share of what the node reaches at most.
        rate = min(inside, most * in_node / self.sharing, self.between * in_node * _share(shares, ranks))
        return max(self.inside_latency + nodes * self.between_latency + sent / rate, nodes * self.between_least)


def network_names() -> list[str]:
    """Return the names that ``cluster.network`` may take."""
    return list(packaged_data(_CATALOGUE)["networks"])


@cached_by_identity
def cluster_link(cluster: ClusterSpec, device: Accelerator) -> Link:
    """Return the links that the cluster section names or describes. Raises UsageError for an unknown network."""
    name, measured, per_node = cluster.network or device.network, cluster.network_figures, near_ranks(cluster)
    if (row := packaged_data(_CATALOGUE)["networks"].get(name)) is None:
        near = nearest_name(name, network_names(), 0.3)
        code = "plan.unknown-link-similar" if near else "plan.unknown-link"
        raise unknown_name("cluster.network", "plan.unknown-network", name, code, network_names(), near)
    inside, given, latency = device.intra_node_bandwidth, cluster.inter_node_bandwidth, measured.latency
    reduce, gather = measured.all_reduce, measured.all_gather
    near = next(link for link in packaged_data(_CATALOGUE)["inside"]["links"] if inside >= link["from"])
    return Link(
        name=name,
        per_node=per_node,
        sharing=per_node if per_node == cluster.gpus_per_node <= _LARGEST_NODE else _USUAL_NODE,
        inside=inside,
        inside_latency=near["latency"],
        inside_hop=near["hop"],
        inside_shares=(near["reduce"], near["gather"], near["point"]),
        between=max(row["bandwidth"] if given == "auto" else given, SLOWEST) / cluster.network_oversubscription,
        between_latency=row["latency"] if latency is None else latency,
        between_least=row.get("least", row["latency"]) if latency is None else latency,
        message_latency=row["message"] if measured.message_latency is None else measured.message_latency,
        point_share=measured.point_to_point or row["point"],
        # A measured share does not depend on the number of ranks.
        reduce_shares=_points({"2": reduce, "4": reduce} if reduce else row["reduce"]),
        gather_shares=_points({"2": gather, "4": gather} if gather else row["gather"]),
        stall_chance=row.get("stall", {}).get("chance", 0.0),
        stall_seconds=row.get("stall", {}).get("seconds", 0.0),
        package=device.package,
        in_package=device.package_bandwidth,
    )


def _points(row: dict[str, float]) -> tuple[tuple[float, float], ...]:
    return tuple((math.log2(int(ranks)), float(share)) for ranks, share in row.items())


@cache
def _share(points: tuple[tuple[float, float], ...], ranks: int) -> float:
    """Return the share at a number of ranks: interpolated on logarithmic axes, constant beyond the last point."""
    at = min(max(points[0][0], math.log2(ranks)), points[-1][0])
    index = next(i for i in range(1, len(points)) if at <= points[i][0])
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return float(y0 * (y1 / y0) ** ((at - x0) / (x1 - x0)))
