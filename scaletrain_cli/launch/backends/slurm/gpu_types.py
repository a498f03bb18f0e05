"""The types of the GPUs of nodes, and whether a node has the GPUs that a job requests.

A type is a word of the site: ``h100``, ``nvidia_h100_80gb_hbm3``, ``a100_1g.10gb`` (a MIG instance); "" for GPUs
without one. A job that requests no type gets any GPUs, also of several types in one job or on one node (seen in Slurm
22.05 to 26.05).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from scaletrain_cli.launch.backends.slurm.tables import Node
from scaletrain_cli.spec import ClusterSpec

_MIG = re.compile(r"\d+g\.\d+gb")


def gpus_for(cluster: ClusterSpec, gpus: Mapping[str, int]) -> int:
    """Return how many of a node's GPUs the job may use: those of its type, or all if it requests none."""
    kind = cluster.slurm.gres_type
    return gpus.get(kind, 0) if kind is not None else sum(gpus.values())


def has_gpus(cluster: ClusterSpec, gpus: Mapping[str, int]) -> bool:
    """Return whether a node with these GPUs has those that the job requests on each node."""
    return cluster.gpu == "cpu" or gpus_for(cluster, gpus) >= cluster.gpus_per_node


def types_of(nodes: Iterable[Node]) -> list[str]:
    """Return the types of the GPUs of these nodes, sorted; "" for GPUs without a type."""
    return sorted({kind for node in nodes for kind, count in node.gpus.items() if count})


def type_of_accelerator(name: str, types: Sequence[str]) -> str | None:
    """Return the one type that has the family of an accelerator of the catalogue (``h100``) in it, if there is one.

    MIG instances are left out: they are parts of a GPU.
    """
    family = name.partition("-")[0].lower()
    found = [kind for kind in types if family in re.split(r"[^a-z0-9]+", kind.lower()) and not _MIG.search(kind)]
    return found[0] if len(found) == 1 else None
