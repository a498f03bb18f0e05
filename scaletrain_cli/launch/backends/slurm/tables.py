"""Parsers of the output of Slurm's commands: partitions, nodes, reservations, settings. Pure functions.

They parse the text formats of Slurm 22.05 and later: scontrol of 22.05 has no JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# Columns of `sinfo --Format`, separated by bars, which keeps sinfo from truncating them.
NODES = "NodeList:|,StateCompact:|,Gres:|,GresUsed:|,PartitionName:|,CPUs:|,Memory:|"
_UNUSABLE = ("down", "drain", "drng", "err", "fail", "futr", "inval", "maint", "reboot", "unk")
_PAIR = re.compile(r"(\S+?)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)")
_GRES = re.compile(r"gpu(?::(?P<type>[^:,()]+))??:(?P<count>\d+)(?:\(|,|$)")


@dataclass(frozen=True)
class Partition:
    """One partition. None: no limit; ``allowed_*``: None admits everyone."""

    name: str
    is_default: bool
    state: str
    max_seconds: float | None
    default_seconds: float | None
    min_nodes: int
    max_nodes: int | None
    allowed_accounts: frozenset[str] | None
    denied_accounts: frozenset[str]
    allowed_qos: frozenset[str] | None
    denied_qos: frozenset[str]
    preempt_mode: str
    grace_seconds: float
    tier: int
    qos: str = ""  # its limits apply to every job in the partition


@dataclass(frozen=True)
class Node:
    """One node with its GPUs by type; the key "" is for GPUs without a type."""

    name: str
    state: str
    gpus: Mapping[str, int]
    gpus_used: Mapping[str, int]
    partitions: frozenset[str]
    cpus: int
    memory_mib: int

    @property
    def is_usable(self) -> bool:
        return is_usable(self.state)


@dataclass(frozen=True)
class Reservation:
    """Nodes that are reserved for a time, in seconds since the epoch."""

    name: str
    start: float
    end: float
    nodes: frozenset[str]
    is_maintenance: bool


def records(text: str) -> Iterator[dict[str, str]]:
    """Yield one record for each line of ``scontrol -o show ...``; a value may contain blanks."""
    for line in text.splitlines():
        if "=" in line:
            yield {match[1]: match[2] for match in _PAIR.finditer(line)}


def settings(text: str) -> dict[str, str]:
    """Return the settings in ``scontrol show config`` (lines ``Name = value``)."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions in ``scontrol -o show partition``."""
    return tuple(_partition(record) for record in records(text) if "PartitionName" in record)


def nodes(text: str) -> tuple[Node, ...]:
    """Return the nodes in ``sinfo --noheader --Node --Format=NODES``, which has one line per node and partition."""
    found: dict[str, Node] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 7:
            continue
        name, state, gres, used, partition, cpus, memory = (field.strip() for field in fields[:7])
        before = found[name].partitions if name in found else frozenset()
        found[name] = Node(
            name, state, gpus(gres), gpus(used), before | {partition}, _whole(cpus) or 0, _whole(memory) or 0
        )
    return tuple(found.values())


def reservations(text: str, expand: Callable[[str], tuple[str, ...]]) -> tuple[Reservation, ...]:
    """Return the reservations in ``scontrol -o show reservation``; ``expand`` turns ``n[1-3]`` into names."""
    return tuple(
        Reservation(
            record["ReservationName"],
            moment(record.get("StartTime", "")) or 0.0,
            moment(record.get("EndTime", "")) or float("inf"),
            frozenset(expand(_given(record.get("Nodes", "")) or "")),
            "MAINT" in record.get("Flags", ""),
        )
        for record in records(text)
        if "ReservationName" in record
    )


def gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a GRES text such as ``gpu:h100:8(S:0-1),gpu:a100:2``."""
    counts: dict[str, int] = {}
    for match in _GRES.finditer(gres):
        kind = match["type"] or ""
        counts[kind] = counts.get(kind, 0) + int(match["count"])
    return counts


def is_usable(state: str) -> bool:
    """Return whether Slurm runs jobs on a node in this compact state, idle or busy."""
    return not state.startswith(_UNUSABLE) and not state.endswith("*")  # *: not responding


def limit_seconds(text: str) -> float | None:
    """Return the seconds in ``1-02:03:04``, ``02:03:04`` or ``03:04``; None for UNLIMITED, NONE and the like."""
    days, _, clock = text.strip().rpartition("-")
    if not re.fullmatch(r"\d+(:\d+){1,2}", clock) or (days and not days.isdigit()):
        return None
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return 86400.0 * int(days or 0) + seconds


def moment(text: str) -> float | None:
    """Return the Unix time of ``2026-11-21T21:12:28`` in the local time zone; None for N/A."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _partition(record: Mapping[str, str]) -> Partition:
    mode = record.get("PreemptMode", "OFF")
    return Partition(
        name=record["PartitionName"],
        is_default=record.get("Default") == "YES",
        state=record.get("State", "UP"),
        max_seconds=limit_seconds(record.get("MaxTime", "")),
        default_seconds=limit_seconds(record.get("DefaultTime", "")),
        min_nodes=_whole(record.get("MinNodes", "")) or 0,
        max_nodes=_whole(record.get("MaxNodes", "")),
        allowed_accounts=_names(record.get("AllowAccounts", "ALL")),
        denied_accounts=_names(record.get("DenyAccounts", "")) or frozenset(),
        allowed_qos=_names(record.get("AllowQos", "ALL")),
        denied_qos=_names(record.get("DenyQos", "")) or frozenset(),
        preempt_mode=mode,
        grace_seconds=float(_whole(record.get("GraceTime", "")) or 0),
        tier=_whole(record.get("PriorityTier", "")) or 0,
        qos=_given(record.get("QoS", "")) or "",
    )


def _names(text: str) -> frozenset[str] | None:
    return None if text == "ALL" else frozenset(name for name in text.split(",") if _given(name))


def _given(text: str) -> str | None:
    return text if text.strip() not in ("", "(null)", "N/A", "NONE") else None


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
