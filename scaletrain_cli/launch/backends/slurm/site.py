"""A Slurm site: its partitions and nodes, the limits of this user, its preemption rules, the nodes to exclude.

Sites may hide any of this from users: an unknown value is empty, or None.
"""

import contextlib
import dataclasses
import os
import pwd
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm import tables
from scaletrain_cli.launch.backends.slurm.commands import call_slurm
from scaletrain_cli.launch.backends.slurm.tables import Association, Limit, Node, Partition, QosRule
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import Exclusion, next_exclusion
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import ClusterSpec, RunSpec


@dataclass(frozen=True)
class Site:
    """The current state of the site. ``account`` and ``qos``: those that the job would get; "" for none.

    ``reservations`` is None if Slurm did not answer. ``accounts``: the account and those above it; empty if not known.
    """

    user: str
    now: float
    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    reservations: tuple[tables.Reservation, ...] | None
    associations: tuple[Association, ...]
    qos_rules: tuple[QosRule, ...]
    account: str
    qos: str
    limits: tuple[Limit, ...]
    accounts: tuple[str, ...] = ()
    cores_per_gpu: int | None = None

    def with_cores(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the CPU cores that its job requests; unchanged where Slurm's default applies."""
        if self.cores_per_gpu is None:
            return spec
        return spec.with_changes("cluster", cpus_per_gpu=self.cores_per_gpu)

    @property
    def has_accounting(self) -> bool:
        return self.config.get("AccountingStorageType", "").endswith("slurmdbd")

    def enforces(self, what: str) -> bool:
        """Return whether Slurm enforces ``associations``, ``limits`` or ``qos``."""
        enforced = set(self.config.get("AccountingStorageEnforce", "").lower().split(","))
        implied = {"associations": {"limits", "qos", "safe"}, "limits": {"safe"}, "qos": set[str]()}[what]
        return self.has_accounting and bool(enforced & ({what, "all"} | implied))

    @property
    def may_rewrite_jobs(self) -> bool:
        """Return whether a plugin of the site may change the partition, account or QOS of a job."""
        return self.config.get("JobSubmitPlugins", "(null)") not in ("", "(null)")

    @property
    def hides_reservations(self) -> bool:
        """Return whether Slurm shows only reservations that the user may use; most maintenance is then hidden."""
        private = self.config.get("PrivateData", "").lower().split(",")
        return bool({"reservations", "all"} & set(private)) and self.user != "root"

    def qos_has(self, flag: str) -> bool:
        """Return whether the job's own QOS has this flag, such as ``NoReserve``; the partition's QOS is ignored."""
        return any(rule.name == self.qos and flag.lower() in rule.flags for rule in self.qos_rules)

    def qos_may_lift(self, flag: str) -> bool:
        """Return whether the job's QOS may lift a partition's limit: it has the flag, or is hidden from the user."""
        hidden = bool(self.qos) and self.has_accounting and all(rule.name != self.qos for rule in self.qos_rules)
        return hidden or self.qos_has(flag)

    def partitions_of(self, cluster: ClusterSpec) -> list[Partition]:
        """Return the existing partitions that the job may run in."""
        return _chosen(self.partitions, cluster)


def query_site(cluster: ClusterSpec, without: Sequence[str] = ()) -> Site:
    """Return the site as slurmctld, and slurmdbd if there is one, report it. Raises SchedulerError without an answer.

    ``without``: names of variables that are removed from the environment of Slurm's commands.
    """
    user, slurm = user_name(), cluster.slurm
    config = tables.settings(call_slurm(["scontrol", "show", "config"], without=without).stdout)

    def output_of(*command: str) -> str | None:
        """Return the output, or None if the command fails: a site may disable it."""
        try:
            return call_slurm(command, without=without).stdout
        except SchedulerError:
            return None

    def accounted(*command: str) -> str:
        """Return the output about the accounting, or an empty text if there is none or the command fails."""
        has_accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
        return (output_of(*command) if has_accounting else None) or ""

    there = tables.partitions(output_of("scontrol", "--all", "-o", "show", "partition") or "")
    mine = ["where", f"user={user}", f"cluster={config.get('ClusterName', '')}", "format=account,qos,defaultqos"]
    associations = tables.read_associations(accounted("sacctmgr", "-nP", "show", "associations", *mine))
    rules = tables.read_qos_rules(accounted("sacctmgr", "-nP", "show", "qos", f"format={tables.QOS_COLUMNS}"))
    account, qos = (slurm.account or "").lower(), (slurm.qos or "").lower()  # as Slurm reads them
    account = account or accounted("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount").strip()
    if not qos and (own := next((one for one in associations if one.account == account), None)) is not None:
        qos = own.default_qos or ("normal" if "normal" in own.qos else "")
    managed = accounted("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos", f"users={user}")
    accounts = tables.account_and_parents(managed, account)
    binding = binding_qos(rules, [partition.qos for partition in _chosen(there, cluster)], qos)
    factor = limit_factor(rules, binding)
    limits = tables.limits_of(managed, user=user, uid=os.getuid(), account=account, qos=binding, factor=factor)
    reserved = output_of("scontrol", "-o", "show", "reservation")
    site = Site(
        user=user,
        now=time.time(),
        config=config,
        partitions=there,
        nodes=tables.nodes(output_of("sinfo", "--noheader", "--Node", "--all", f"--Format={tables.NODES}") or ""),
        reservations=None if reserved is None else tables.reservations(reserved),
        associations=associations,
        qos_rules=rules,
        account=account,
        qos=qos,
        limits=limits,
        accounts=tuple(accounts) if all(accounts.values()) else (),
    )
    return dataclasses.replace(site, cores_per_gpu=cores_per_gpu(site, cluster))


def binding_qos(rules: Sequence[QosRule], partitions: Sequence[str], own: str) -> list[str]:
    """Return the QOS whose limits apply, by precedence: the partition's first, unless the job's has OverPartQOS.

    ``partitions``: the QOS of each partition that the job may run in, "" for none. If they differ, only the job's own
    QOS is returned, since the partition is not known.
    """
    chosen = set(partitions)
    if len(chosen) != 1 or chosen == {""}:
        return [own]
    above = any(rule.name == own and "overpartqos" in rule.flags for rule in rules)
    return [own, *chosen] if above else [*chosen, own]


def limit_factor(rules: Sequence[QosRule], binding: Sequence[str]) -> float:
    """Return the factor for associations' limits: the first positive LimitFactor of these QOS, else 1."""
    factors = {rule.name: rule.limit_factor for rule in rules}
    return next((factor for name in binding if (factor := factors.get(name))), 1.0)


def _chosen(partitions: Sequence[Partition], cluster: ClusterSpec) -> list[Partition]:
    names = (cluster.slurm.partition or "").split(",")
    return [one for one in partitions if one.name in names or (names == [""] and one.is_default)]


def user_name() -> str:
    """Return the name of the user of this process, by its uid: $USER may be wrong."""
    with contextlib.suppress(KeyError):  # a uid without an entry in the user database, as in a container
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def preemption_rule(site: Site, cluster: ClusterSpec) -> str:
    """Return the site's preemption rule as one paragraph for the script; empty if Slurm did not answer."""
    kind = site.config.get("PreemptType", "")
    if kind in ("preempt/none", "(null)"):
        return "Preemption: none on this cluster (PreemptType=preempt/none)."
    if kind == "preempt/qos":
        if not (preemptors := _preemptors(site)):
            return f"Preemption: by QOS. No QOS preempts {site.qos or 'that of this job'}."
        effect = _effect(site, *_qos_mode(site))
        return f"Preemption: by QOS. Jobs of {site.qos} are preempted by {', '.join(preemptors)}: {effect}"
    if kind == "preempt/partition_prio":
        rules = " ".join(_by_partition(site, partition) for partition in site.partitions_of(cluster))
        return f"Preemption: by PriorityTier of partitions. {rules}" if rules else ""
    return f"Preemption: by {kind}, which this version does not recognize." if kind else ""


def preemption_notes(site: Site, cluster: ClusterSpec) -> Iterator[Reason]:
    """Yield notes on what the spec should change under the site's preemption rule."""
    for where, mode, grace in _rules(site, cluster):
        kill_wait = _kill_wait_seconds(site)
        granted = grace or kill_wait
        name = "GraceTime" if grace else "no GraceTime, so KillWait"
        if "OFF" in mode:
            continue
        params = {"where": where, "mode": mode, "granted": granted, "source": name, "requested": cluster.grace_seconds}
        if "CANCEL" in mode:
            yield Reason("slurm.note-preemption-cancels", params)
        elif "SUSPEND" in mode:
            yield Reason("slurm.note-preemption-suspends", params)
        if "SUSPEND" not in mode and granted < cluster.grace_seconds:
            yield Reason("slurm.note-grace-too-short", params)


def _rules(site: Site, cluster: ClusterSpec) -> Iterator[tuple[str, str, float]]:
    """Yield the preemption rules that apply to the job: name, mode and grace time in seconds."""
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
        why = "PreemptMode=OFF" if "OFF" in partition.preempt_mode else "no partition has a higher tier"
        return f"Jobs of {partition.name} are not preempted ({why})."
    effect = _effect(site, partition.preempt_mode, partition.grace_seconds)
    return f"Jobs of {partition.name} are preempted by {', '.join(higher)}: {effect}"


def _effect(site: Site, mode: str, grace_seconds: float) -> str:
    """Return which signals a preempted job gets, and what requeues it."""
    kill_wait = _kill_wait_seconds(site)
    if "SUSPEND" in mode:  # gang scheduling: no signal that a process could handle, and the memory stays in use
        return f"PreemptMode={mode}. Slurm suspends the job (SIGTSTP, then SIGSTOP) and continues it later."
    if grace_seconds:
        when = f"SIGTERM to the node agents, GraceTime {grace_seconds:g} s, KillWait {kill_wait:g} s, SIGKILL."
        back = "This script requeues the job if it ends in time, otherwise Slurm does."
    else:
        when = f"SIGTERM to the node agents, KillWait {kill_wait:g} s (no GraceTime), SIGKILL."
        back = "Slurm requeues the job."
    if "REQUEUE" not in mode:
        back = "Slurm does not requeue the job."
    return f"PreemptMode={mode}. {when} {back}"


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
    match = re.match(r"\d+", site.config.get("KillWait", ""))
    return float(match[0]) if match else 30.0


def exclusion_for(run: RunDir, spec: RunSpec) -> Exclusion:
    """Return the bad nodes that the next attempt excludes; none, with the reason, if Slurm does not answer.

    With a range of nodes, at least its smallest size remains.
    """
    slurm, given = spec.cluster.slurm, spec.cluster.node_range
    needed = (spec.cluster.nodes if given is None else given.min) + spec.cluster.spare_nodes
    return next_exclusion(run, lambda: nodes_of(spec.cluster), needed, tables.node_names(slurm.nodelist or ""))


def record_exclusion(run: RunDir, excluded: Exclusion) -> None:
    """Record in the run's events which nodes the next attempt excludes, if others than before, or cannot exclude."""
    if excluded.spared or excluded.nodes != last_exclusion(run):
        record_event(run, "nodes-excluded", **excluded.to_event())


def last_exclusion(run: RunDir) -> tuple[str, ...]:
    """Return the nodes that the run's job excludes beyond those of the spec."""
    events = (event for event in reversed(read_events(run)) if event["event"] == "nodes-excluded")
    return tuple(next(events, {"nodes": ()})["nodes"])


def exclude_option(spec: RunSpec, excluded: Exclusion) -> str | None:
    """Return the nodes of the spec's ``exclude`` and of ``excluded`` as one hostlist; None for none."""
    return ",".join([*([spec.cluster.slurm.exclude] if spec.cluster.slurm.exclude else []), *excluded.nodes]) or None


def nodes_of(cluster: ClusterSpec) -> dict[str, bool]:
    """Return the nodes of the job's partition, or of all, and whether the job may use each now, whether busy or not.

    A usable one is in the job's partition, or in the default one. It has its GPUs and the features of its constraint,
    is not left out by ``exclude``, and is in its reservation if that names its nodes. Slurm holds a job that is left
    with too few of them (BadConstraints).
    """
    slurm, inside = cluster.slurm, None
    if slurm.reservation is not None:
        shown = tables.reservations(call_slurm(["scontrol", "--oneliner", "show", "reservation"]).stdout)
        own = [one for one in shown if one.name in slurm.reservation.split(",")]  # none if the site hides it
        inside = None if any(one.is_flexible for one in own) else {name for one in own for name in one.nodes} or None
    chosen = [f"--partition={slurm.partition}"] if slurm.partition else []
    answer = call_slurm(["sinfo", "--noheader", "--Node", "--format=%N|%t|%P|%G|%f", *chosen])
    left_out, usable = tables.node_names(slurm.exclude or ""), dict[str, bool]()
    for name, state, of, gres, features in (
        line.strip().split("|") for line in answer.stdout.splitlines() if line.count("|") == 4
    ):
        usable[name] = usable.get(name, False) or (
            tables.is_usable(state)
            and (slurm.partition is not None or of.endswith("*"))
            and has_gpus(cluster, tables.gpus(gres))
            and tables.may_satisfy(features.split(","), slurm.constraint or "")
            and name not in left_out
            and (inside is None or name in inside)
        )
    return usable


# The types of the GPUs of nodes, and whether a node has the GPUs that a job requests.
#
# A type is a word of the site: ``h100``, ``nvidia_h100_80gb_hbm3``, ``a100_1g.10gb`` (a MIG instance); "" for GPUs
# without one. A job that requests no type gets any GPUs, also of several types in one job or on one node (seen in Slurm
# 22.05 to 26.05).


_MIG = re.compile(r"\d+g\.\d+gb")


def gpus_for(cluster: ClusterSpec, gpus: Mapping[str, int]) -> int:
    """Return how many of a node's GPUs the job may use: those of its type, or all if it requests none.

    Where Slurm does not manage GPUs (``gpu_request: none``), every node counts as one that has those of the spec.
    """
    kind = cluster.slurm.gres_type
    if cluster.slurm.gpu_request == "none":
        return cluster.gpus_per_node
    return gpus.get(kind, 0) if kind is not None else sum(gpus.values())


def cores_per_gpu(site: Site, cluster: ClusterSpec) -> int | None:
    """Return the CPU cores of a node for each of its GPUs, which ``cluster.cpus_per_gpu: auto`` requests.

    Without DefCpuPerGPU, Slurm gives a job that requests no cores one per node, and memory in proportion. None where
    the site has that default, or nothing is known of the nodes.
    """
    partitions = site.partitions_of(cluster)
    names = {partition.name for partition in partitions}
    fitting = [node for node in site.nodes if node.cpus and node.partitions & names and has_gpus(cluster, node.gpus)]
    by_default = "DefCpuPerGPU" in site.config.get("JobDefaults", "") or any(one.gives_cores for one in partitions)
    if cluster.gpu == "cpu" or cluster.cpus_per_gpu != "auto" or by_default or not fitting:
        return None
    least = min(fitting, key=lambda node: node.cpus / gpus_for(cluster, node.gpus))
    limits = [one.max_cores_per_node for one in partitions if one.max_cores_per_node is not None]
    return min([_cores_for_jobs(least), *limits]) // gpus_for(cluster, least.gpus) or None


def _cores_for_jobs(node: Node) -> int:
    """Return the CPUs of a node without those that the site keeps for its system (CoreSpecCount)."""
    try:
        shown = call_slurm(["scontrol", "--oneliner", "show", "node", node.name]).stdout
    except SchedulerError:
        return node.cpus
    effective = next(tables.records(shown), {}).get("CPUEfctv", "")  # since Slurm 22.05
    return int(effective) if effective.isdigit() else node.cpus


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
    kinds = [kind for kind in types if family in re.split(r"[^a-z0-9]+", kind.lower()) and not _MIG.search(kind)]
    return kinds[0] if len(kinds) == 1 else None
