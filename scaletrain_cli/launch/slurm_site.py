"""A Slurm site as one object: what it has, what it allows this user, by which rule it preempts. Judges nothing.

Every question may stay without an answer, since sites hide things from users: what is not known is empty, or None.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.slurm_commands import call_slurm, node_names
from scaletrain_cli.launch.slurm_limits import Limit, limits_of
from scaletrain_cli.launch.slurm_tables import (
    NODES,
    Node,
    Partition,
    Reservation,
    limit_seconds,
    nodes,
    partitions,
    reservations,
    settings,
)
from scaletrain_cli.spec import ClusterSpec

QOS_COLUMNS = "name,preempt,preemptmode,gracetime,flags,limitfactor"


@dataclass(frozen=True)
class Association:
    """One account that the user may charge, with the QOS that it may have there."""

    account: str
    qos: frozenset[str]
    default_qos: str


@dataclass(frozen=True)
class QosRule:
    """How jobs of a QOS are preempted and which QOS they preempt; ``flags``, in lower case, are what else it does.

    ``limit_factor`` multiplies what associations allow.
    """

    name: str
    preempts: frozenset[str]
    mode: str
    grace_seconds: float
    flags: frozenset[str] = frozenset()
    limit_factor: float | None = None


@dataclass(frozen=True)
class Site:
    """What the site says now. ``account`` and ``qos`` are those that the job would have; "" where Slurm has none.

    ``reservations`` is None where Slurm tells of none at all.
    """

    user: str
    now: float
    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] | None
    associations: tuple[Association, ...]
    qos_rules: tuple[QosRule, ...]
    account: str
    qos: str
    limits: tuple[Limit, ...]

    @property
    def has_accounting(self) -> bool:
        return self.config.get("AccountingStorageType", "").endswith("slurmdbd")

    def enforces(self, what: str) -> bool:
        """Whether Slurm holds jobs to ``associations``, ``limits`` or ``qos``."""
        told = set(self.config.get("AccountingStorageEnforce", "").lower().split(","))
        implied = {"associations": {"limits", "qos", "safe"}, "limits": {"safe"}, "qos": set[str]()}[what]
        return self.has_accounting and bool(told & ({what, "all"} | implied))

    @property
    def may_rewrite_jobs(self) -> bool:
        """Whether a plugin of the site sees each job first, which may give it another partition, account or QOS."""
        return self.config.get("JobSubmitPlugins", "(null)") not in ("", "(null)")

    @property
    def hides_reservations(self) -> bool:
        """Whether Slurm shows a user those alone that the user may use, which leaves out most maintenance."""
        private = self.config.get("PrivateData", "").lower().split(",")
        return bool({"reservations", "all"} & set(private)) and self.user != "root"

    def qos_says(self, flag: str) -> bool:
        """Whether the job's own QOS has this flag, as ``NoReserve``. That of a partition's QOS says nothing of jobs."""
        return any(rule.name == self.qos and flag.lower() in rule.flags for rule in self.qos_rules)

    def qos_may_lift(self, flag: str) -> bool:
        """Whether a partition's limit may not count for the job: its QOS has the flag, or is hidden from the user."""
        hidden = bool(self.qos) and self.has_accounting and all(rule.name != self.qos for rule in self.qos_rules)
        return hidden or self.qos_says(flag)

    def partitions_of(self, cluster: ClusterSpec) -> list[Partition]:
        """Those that the job may run in, of those that are there."""
        return _chosen(self.partitions, cluster)


def ask_site(cluster: ClusterSpec, without: Sequence[str] = ()) -> Site:
    """Ask Slurm's controller, and slurmdbd where there is one. Raises SchedulerError when the controller is silent.

    ``without`` names variables that no Slurm command must see.
    """
    user, slurm = user_name(), cluster.slurm
    config = settings(call_slurm(["scontrol", "show", "config"], without=without).stdout)

    def ask(command: Sequence[str]) -> str | None:
        """The answer, or None: a site may hide this from its users, or have it switched off."""
        try:
            return call_slurm(command, without=without).stdout
        except SchedulerError:
            return None

    def told(*command: str) -> str:
        """Where no answer means nothing."""
        return ask(command) or ""

    associations: tuple[Association, ...] = ()
    rules: tuple[QosRule, ...] = ()
    limits: tuple[Limit, ...] = ()
    account, qos = slurm.account or "", slurm.qos or ""
    there = partitions(told("scontrol", "--all", "-o", "show", "partition"))
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        mine = ["where", f"user={user}", f"cluster={config.get('ClusterName', '')}", "format=account,qos,defaultqos"]
        associations = read_associations(told("sacctmgr", "-nP", "show", "associations", *mine))
        rules = read_qos_rules(told("sacctmgr", "-nP", "show", "qos", f"format={QOS_COLUMNS}"))
        account = account or told("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount").strip()
        qos = qos or _default_qos(associations, account)
        managed = told("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos", f"users={user}")
        binding = binding_qos(rules, [partition.qos for partition in _chosen(there, cluster)], qos)
        factor = limit_factor(rules, binding)
        limits = limits_of(managed, user=user, uid=os.getuid(), account=account, qos=binding, factor=factor)
    reserved = ask(["scontrol", "-o", "show", "reservation"])
    return Site(
        user=user,
        now=time.time(),
        config=config,
        partitions=there,
        nodes=nodes(told("sinfo", "--noheader", "--Node", "--all", f"--Format={NODES}")),
        reservations=None if reserved is None else reservations(reserved, lambda hosts: node_names(hosts, without)),
        associations=associations,
        qos_rules=rules,
        account=account,
        qos=qos,
        limits=limits,
    )


def binding_qos(rules: Sequence[QosRule], partitions: Sequence[str], own: str) -> list[str]:
    """Whose limits count, the first before the second: the partition's QOS, unless the job's is above it (OverPartQOS).

    ``partitions``: the QOS of each that the job may run in, "" for none. Which of several it will be, nobody knows.
    """
    chosen = set(partitions)
    if len(chosen) != 1 or chosen == {""}:
        return [own]
    above = any(rule.name == own and "overpartqos" in rule.flags for rule in rules)
    return [own, *chosen] if above else [*chosen, own]


def limit_factor(rules: Sequence[QosRule], binding: Sequence[str]) -> float:
    """What associations' amounts are multiplied with: the factor above 0 of the first of these QOS that has one."""
    factors = {rule.name: rule.limit_factor for rule in rules}
    return next((factor for name in binding if (factor := factors.get(name))), 1.0)


def _chosen(partitions: Sequence[Partition], cluster: ClusterSpec) -> list[Partition]:
    names = (cluster.slurm.partition or "").split(",")
    return [one for one in partitions if one.name in names or (names == [""] and one.is_default)]


def read_associations(text: str) -> tuple[Association, ...]:
    """``sacctmgr -nP show associations format=account,qos,defaultqos``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(Association(row[0], frozenset(row[1].split(",")), row[2]) for row in rows if len(row) == 3)


def read_qos_rules(text: str) -> tuple[QosRule, ...]:
    """``sacctmgr -nP show qos format=QOS_COLUMNS``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(
        QosRule(
            name,
            frozenset(filter(None, preempts.split(","))),
            mode,
            limit_seconds(grace) or 0.0,
            frozenset(filter(None, flags.lower().split(","))),
            float(factor) if factor else None,
        )
        for name, preempts, mode, grace, flags, factor in (row for row in rows if len(row) == 6)
    )


def user_name() -> str:
    """Whom Slurm takes this process for; $USER may say anything."""
    with contextlib.suppress(KeyError):  # an id that no user database knows, as in a container
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _default_qos(associations: Sequence[Association], account: str) -> str:
    mine = next((one for one in associations if one.account == account), None)
    if mine is None:
        return ""
    return mine.default_qos or ("normal" if "normal" in mine.qos else "")
