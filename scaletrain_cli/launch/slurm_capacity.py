"""Whether a node of a partition could hold its part of a job at all, and which key of the spec asks too much. Pure.

Goes by what nodes have, whatever runs on them now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.slurm_script import cores_per_node
from scaletrain_cli.launch.slurm_tables import Node
from scaletrain_cli.spec import ClusterSpec, RunSpec


def too_small(cluster: ClusterSpec, node: Node) -> Iterator[str]:
    """Keys of the spec that ask for more than the node has; what Slurm does not tell of a node is enough."""
    slurm = cluster.slurm
    if cluster.gpu != "cpu":
        if slurm.gres_type is not None and not node.gpus.get(slurm.gres_type):
            yield "cluster.slurm.gres_type"
        elif _gpus(cluster, node) < cluster.gpus_per_node:
            yield "cluster.gpus_per_node"
    if node.cpus and (cores_per_node(cluster) or 0) > node.cpus:
        yield "cluster.cpus_per_gpu"
    if node.memory_mib and (slurm.memory_per_node or 0) > node.memory_mib * 2**20:
        yield "cluster.slurm.memory_per_node"


def shortages(spec: RunSpec, partition: str, nodes: Sequence[Node]) -> Iterator[Problem]:
    """Why none of these nodes will do: what all of them lack, or else what any of them does."""
    lacking = [set(too_small(spec.cluster, node)) for node in nodes]
    for key in sorted(set.intersection(*lacking) or set.union(*lacking)):
        yield _shortage(spec, partition, nodes, key)


def _shortage(spec: RunSpec, partition: str, nodes: Sequence[Node], key: str) -> Problem:
    cluster, slurm = spec.cluster, spec.cluster.slurm
    given: object
    if key == "cluster.slurm.gres_type":
        kinds = sorted({kind or "GPUs without a type" for node in nodes for kind, count in node.gpus.items() if count})
        there = f"there are {', '.join(kinds)}" if kinds else "it has none"
        given, message = slurm.gres_type, f"no node of partition {partition} has GPUs of this type; {there}."
        hint = "Use one of these, or another partition." if kinds else "Use another partition."
    elif key == "cluster.gpus_per_node":
        most = max(_gpus(cluster, node) for node in nodes)
        given, message = cluster.gpus_per_node, f"nodes of partition {partition} have {most} GPUs."
        hint = f"Ask for {most} per node and more nodes." if most else "Use another partition."
    elif key == "cluster.cpus_per_gpu":
        most = max(node.cpus for node in nodes)
        asked = cores_per_node(cluster)
        given, message = cluster.cpus_per_gpu, f"nodes of {partition} have {most} CPUs; the job wants {asked} on each."
        enough = most // cluster.gpus_per_node
        hint = f"Set it to {enough}." if enough else "Leave it out, or ask for fewer ranks per node."
    else:
        most = max(node.memory_mib for node in nodes)
        given, message = slurm.memory_per_node, f"nodes of partition {partition} have {most} MiB."
        hint = f"Set it to {most}MiB or less."
    return Problem(spec.where(key), key, message, str(given), hint)


def _gpus(cluster: ClusterSpec, node: Node) -> int:
    """Those that the job may have of the node."""
    kind = cluster.slurm.gres_type
    return node.gpus.get(kind, 0) if kind is not None else sum(node.gpus.values())
