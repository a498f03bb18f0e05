"""Which rule of the site takes a job's nodes away, in words, and what of it the run should know. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scaletrain_cli.launch.slurm_site import Site
from scaletrain_cli.launch.slurm_tables import Partition
from scaletrain_cli.spec import ClusterSpec


def preemption_rule(site: Site, cluster: ClusterSpec) -> str:
    """One paragraph, for the script; empty where Slurm did not tell."""
    kind = site.config.get("PreemptType", "")
    if kind in ("preempt/none", "(null)"):
        return "Preemption: none on this cluster (PreemptType=preempt/none)."
    if kind == "preempt/qos":
        return f"Preemption: by QOS. {_by_qos(site)}"
    if kind == "preempt/partition_prio":
        told = " ".join(_by_partition(site, partition) for partition in site.partitions_of(cluster))
        return f"Preemption: by the tiers of partitions. {told}" if told else ""
    return f"Preemption: by {kind}, which is not known here." if kind else ""


def preemption_notes(site: Site, cluster: ClusterSpec) -> Iterator[str]:
    """What the spec should say otherwise under this rule."""
    for where, mode, grace in _rules(site, cluster):
        kill_wait = _kill_wait_seconds(site)
        given = grace or kill_wait
        name = "GraceTime" if grace else "no GraceTime, so KillWait"
        if "OFF" in mode:
            continue
        if "CANCEL" in mode:
            yield f"{where} cancels what it preempts (PreemptMode={mode}): `scaletrain resume` brings a run back."
        elif "SUSPEND" in mode:
            yield f"{where} suspends what it preempts (PreemptMode={mode}): the job keeps its memory and waits."
        if "SUSPEND" not in mode and given < cluster.grace_seconds:
            yield (
                f"cluster.grace_seconds = {cluster.grace_seconds:g}, but {where} gives a preempted job {given:g} s "
                f"({name}): set it to {given:g}, or what is not saved by then is lost."
            )


def _rules(site: Site, cluster: ClusterSpec) -> Iterator[tuple[str, str, float]]:
    """Who preempts: its name, how, and with which grace time."""
    kind = site.config.get("PreemptType", "")
    if kind == "preempt/partition_prio":
        for partition in site.partitions_of(cluster):
            if _higher(site, partition):
                yield f"partition {partition.name}", partition.preempt_mode, partition.grace_seconds
    elif kind == "preempt/qos" and _preemptors(site):
        mode, grace = _qos_mode(site)
        yield f"QOS {site.qos}", mode, grace


def _by_partition(site: Site, partition: Partition) -> str:
    higher = _higher(site, partition)
    if "OFF" in partition.preempt_mode or not higher:
        why = "PreemptMode=OFF" if "OFF" in partition.preempt_mode else "no partition of a higher tier"
        return f"Jobs of {partition.name} keep their nodes ({why})."
    return (
        f"{partition.name} loses nodes to {', '.join(higher)}: "
        f"{_way(site, partition.preempt_mode, partition.grace_seconds)}"
    )


def _by_qos(site: Site) -> str:
    preemptors = _preemptors(site)
    if not preemptors:
        return f"No QOS preempts {site.qos or 'that of this job'}."
    return f"{site.qos} loses nodes to {', '.join(preemptors)}: {_way(site, *_qos_mode(site))}"


def _way(site: Site, mode: str, grace_seconds: float) -> str:
    """What a preempted job gets, and who brings it back."""
    kill_wait = _kill_wait_seconds(site)
    if grace_seconds:
        when = f"SIGTERM to the agents, GraceTime {grace_seconds:g} s, then KillWait {kill_wait:g} s and SIGKILL."
        back = "This script requeues what has saved in time, Slurm what has not."
    else:
        when = f"no GraceTime: SIGTERM, KillWait {kill_wait:g} s, SIGKILL."
        back = "Slurm requeues it."
    if "REQUEUE" not in mode:
        back = f"Slurm does not requeue it (PreemptMode={mode})."
    return f"PreemptMode={mode}, {when} {back}"


def _higher(site: Site, partition: Partition) -> list[str]:
    here = {node.name for node in site.nodes if partition.name in node.partitions}
    shared = {name for node in site.nodes if node.name in here for name in node.partitions}
    return [other.name for other in site.partitions if other.tier > partition.tier and other.name in shared]


def _preemptors(site: Site) -> list[str]:
    return [rule.name for rule in site.qos_rules if site.qos in rule.preempts]


def _qos_mode(site: Site) -> tuple[str, float]:
    cluster_wide = site.config.get("PreemptMode", "OFF")
    rule = next((rule for rule in site.qos_rules if rule.name == site.qos), None)
    if rule is None:
        return cluster_wide, 0.0
    return (cluster_wide if rule.mode in ("", "cluster") else rule.mode.upper()), rule.grace_seconds


def _kill_wait_seconds(site: Site) -> float:
    found = re.match(r"\d+", site.config.get("KillWait", ""))
    return float(found[0]) if found else 30.0
