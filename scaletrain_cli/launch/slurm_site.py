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


@dataclass(frozen=True)
class Association:
    """One account that the user may charge, with the QOS that it may have there."""

    account: str
    qos: frozenset[str]
    default_qos: str


@dataclass(frozen=True)
class QosRule:
    """How jobs of a QOS are preempted, and which QOS they preempt."""

    name: str
    preempts: frozenset[str]
    mode: str
    grace_seconds: float


@dataclass(frozen=True)
class Site:
    """What the site says now. ``account`` and ``qos`` are those that the job would have; "" where Slurm has none."""

    user: str
    now: float
    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...]
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

    def partitions_of(self, cluster: ClusterSpec) -> list[Partition]:
        """Those that the job may run in, of those that are there."""
        return _chosen(self.partitions, cluster)


def ask_site(cluster: ClusterSpec, without: Sequence[str] = ()) -> Site:
    """Ask Slurm's controller, and slurmdbd where there is one. Raises SchedulerError when the controller is silent.

    ``without`` names variables that no Slurm command must see.
    """
    user, slurm = _user(), cluster.slurm
    config = settings(call_slurm(["scontrol", "show", "config"], without=without).stdout)

    def told(*command: str) -> str:
        """The answer, or nothing: a site may hide this from its users, or have it switched off."""
        try:
            return call_slurm(command, without=without).stdout
        except SchedulerError:
            return ""

    associations: tuple[Association, ...] = ()
    rules: tuple[QosRule, ...] = ()
    limits: tuple[Limit, ...] = ()
    account, qos = slurm.account or "", slurm.qos or ""
    there = partitions(told("scontrol", "--all", "-o", "show", "partition"))
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        mine = ["where", f"user={user}", f"cluster={config.get('ClusterName', '')}", "format=account,qos,defaultqos"]
        associations = read_associations(told("sacctmgr", "-nP", "show", "associations", *mine))
        rules = read_qos_rules(told("sacctmgr", "-nP", "show", "qos", "format=name,preempt,preemptmode,gracetime"))
        account = account or told("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount").strip()
        qos = qos or _default_qos(associations, account)
        managed = told("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos", f"users={user}")
        chosen = {partition.qos for partition in _chosen(there, cluster)}
        binding = [*(chosen if len(chosen) == 1 else ()), qos]  # which of several partitions it will be, nobody knows
        limits = limits_of(managed, user=user, uid=os.getuid(), account=account, qos=binding)
    return Site(
        user=user,
        now=time.time(),
        config=config,
        partitions=there,
        nodes=nodes(told("sinfo", "--noheader", "--Node", "--all", f"--Format={NODES}")),
        reservations=reservations(
            told("scontrol", "-o", "show", "reservation"), lambda hosts: node_names(hosts, without)
        ),
        associations=associations,
        qos_rules=rules,
        account=account,
        qos=qos,
        limits=limits,
    )


def _chosen(partitions: Sequence[Partition], cluster: ClusterSpec) -> list[Partition]:
    names = (cluster.slurm.partition or "").split(",")
    return [one for one in partitions if one.name in names or (names == [""] and one.is_default)]


def read_associations(text: str) -> tuple[Association, ...]:
    """``sacctmgr -nP show associations format=account,qos,defaultqos``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(Association(row[0], frozenset(row[1].split(",")), row[2]) for row in rows if len(row) == 3)


def read_qos_rules(text: str) -> tuple[QosRule, ...]:
    """``sacctmgr -nP show qos format=name,preempt,preemptmode,gracetime``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(
        QosRule(row[0], frozenset(filter(None, row[1].split(","))), row[2], limit_seconds(row[3]) or 0.0)
        for row in rows
        if len(row) == 4
    )


def _user() -> str:
    """Whom Slurm takes this process for; $USER may say anything."""
    with contextlib.suppress(KeyError):  # an id that no user database knows, as in a container
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _default_qos(associations: Sequence[Association], account: str) -> str:
    mine = next((one for one in associations if one.account == account), None)
    if mine is None:
        return ""
    return mine.default_qos or ("normal" if "normal" in mine.qos else "")
