"""A Slurm site as data: its partitions and nodes, the limits of this user, and its preemption rules.

Sites may hide any of this from users: a value that is not known is empty, or None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, node_names
from scaletrain_cli.launch.backends.slurm.tables import (
    NODES,
    Node,
    Partition,
    Reservation,
    limit_seconds,
    nodes,
    partitions,
    records,
    reservations,
    settings,
)
from scaletrain_cli.spec import ClusterSpec

_AMOUNT = re.compile(r"([\w/:.\-]+)=(N|[\d.]+)(?:\(([\d.]+)\))?")
_SCALAR = re.compile(r"(N|[\d.]+)(?:\(([\d.]+)\))?")
_NAMES = {"gres/gpu": "GPUs", "node": "nodes", "cpu": "CPUs", "mem": "MiB of memory", "jobs": "jobs"}
GPU = "gres/gpu"
AT_LEAST = "MinTRESPJ"  # the only minimum: a job that requests less stays pending until it is changed
PER_NODE = "MaxTRESPN"


@dataclass(frozen=True)
class Limit:
    """One limit: ``owner`` may use ``allowed`` of ``resource``, per job or, if ``used`` is set, over all its jobs."""

    owner: str
    kind: str  # Slurm's name for it
    resource: str
    allowed: float
    used: float | None

    @property
    def in_words(self) -> str:
        return resource_in_words(self.resource)


@dataclass(frozen=True)
class Fit:
    """``never``: limits that the job alone exceeds; ``busy``: limits that it exceeds only with the current usage."""

    never: tuple[Limit, ...]
    busy: tuple[Limit, ...]


def limits_of(
    text: str, *, user: str, uid: int, account: str, qos: Sequence[str], factor: float = 1.0
) -> tuple[Limit, ...]:
    """Return the limits that apply to a job of the user. ``qos``: names in order of precedence.

    The limit of a QOS on a resource overrides those of later QOS and of associations; ``factor`` multiplies the limits
    of associations (LimitFactor of the QOS).
    """
    found: list[Limit] = []
    for limits in (_of_qos(text, name, uid, account) for name in qos):
        said = {(limit.kind, limit.resource) for limit in found}
        found += [limit for limit in limits if (limit.kind, limit.resource) not in said]
    # An association's per-user limit applies where no QOS has a limit per user or per account on that resource.
    said = {(_SET_ASIDE.get(limit.kind, limit.kind), limit.resource) for limit in found}
    for limit in _of_associations(text, user, account):
        if (limit.kind, limit.resource) not in said:
            scaled = limit.kind in ("GrpTRES", "MaxTRESPJ")
            found.append(dataclasses.replace(limit, allowed=limit.allowed * factor) if scaled else limit)
    return tuple(found)


def fit(limits: Sequence[Limit], request: Mapping[str, float], seconds: float | None, nodes: int = 1) -> Fit:
    """Return the limits that a job on ``nodes`` nodes exceeds.

    ``request``: the amount of each resource for the whole job; ``seconds``: its time limit, if any.
    """
    never, busy = [], []
    for limit in limits:
        asked = seconds if limit.resource == "seconds" else 1.0 if limit.resource == "jobs" else None
        asked = request.get(limit.resource, asked)
        if asked is None:
            continue
        if limit.kind == AT_LEAST:
            if asked < limit.allowed:
                never.append(limit)
        elif limit.kind == PER_NODE:
            if asked / nodes > limit.allowed:
                never.append(limit)
        elif limit.kind == "GrpTRESMins":  # a budget of TRES minutes, which may be used up
            if limit.used is not None and limit.used >= limit.allowed:
                busy.append(limit)
        elif asked > limit.allowed:
            never.append(limit)
        elif limit.used is not None and asked > limit.allowed - limit.used:
            busy.append(limit)
    return Fit(tuple(never), tuple(busy))


def resource_in_words(resource: str) -> str:
    """Return the name of a resource for people: ``GPUs of type h100`` for ``gres/gpu:h100``."""
    if resource.startswith(f"{GPU}:"):
        return f"GPUs of type {resource.removeprefix(f'{GPU}:')}"
    return _NAMES.get(resource, resource)


def _of_associations(text: str, user: str, account: str) -> Iterator[Limit]:
    """Yield the limits of the user's association in the account, then of the account, then of its parents."""
    lines = [record for record in records(text) if "ClusterName" in record]
    for record in lines:
        if record.get("Account") == account and record.get("UserName", "").partition("(")[0] == user:
            yield from _limits(f"user {user} in account {account}", record, _GROUP | _PER_JOB | _OWN)
    above, seen = account, set[str]()
    while above and above not in seen:
        seen.add(above)
        record = next((line for line in lines if line["Account"] == above and not line.get("UserName")), {})
        yield from _limits(f"account {above}", record, _GROUP)
        above = record.get("ParentAccount", "").partition("(")[0]


def _of_qos(text: str, qos: str, uid: int, account: str) -> Iterator[Limit]:
    for line in text.splitlines():
        if not line.startswith(f"QOS={qos}("):
            continue
        head, _, rest = line.partition("Account Limits=")
        accounts, _, users = rest.partition("User Limits=")
        (record,) = records(head)
        yield from _limits(f"QOS {qos}", record, _GROUP | _PER_JOB | {AT_LEAST: ""})
        for owner, key, block in ((f"each account in QOS {qos}", account, accounts), ("", str(uid), users)):
            if match := re.search(rf"(?<!\S){re.escape(key)}=\{{(.*?)\}}", block):
                (record,) = list(records(match[1])) or [{}]
                yield from _limits(owner or f"each user in QOS {qos}", record, _SHARES)


# The resource that each field limits: "" for TRES lists, which name their resources.
_GROUP = {"GrpTRES": "", "GrpTRESMins": "", "GrpJobs": "jobs", "GrpSubmitJobs": "jobs"}
_PER_JOB = {"MaxTRESPJ": "", PER_NODE: "", "MaxWallPJ": "seconds"}
_OWN = {"MaxJobs": "jobs", "MaxSubmitJobs": "jobs"}
_SHARES = {f"{kind}P{of}": resource for of in "UA" for kind, resource in (("MaxTRES", ""), *_OWN.items())}
_SET_ASIDE = {f"{kind}P{of}": kind for of in "UA" for kind in _OWN}


def _limits(owner: str, record: Mapping[str, str], fields: Mapping[str, str]) -> Iterator[Limit]:
    for kind, resource in fields.items():
        value = record.get(kind, "")
        if resource == "":
            for match in _AMOUNT.finditer(value):
                if match[2] != "N":
                    yield Limit(owner, kind, match[1], float(match[2]), _used(match[3], kind))
        elif (scalar := _SCALAR.fullmatch(value)) and scalar[1] != "N":
            allowed = float(scalar[1]) * (60 if resource == "seconds" else 1)
            yield Limit(owner, kind, resource, allowed, _used(scalar[2], kind))


def _used(text: str | None, kind: str) -> float | None:
    return None if text is None or kind in _PER_JOB or kind == AT_LEAST else float(text)


QOS_COLUMNS = "name,preempt,preemptmode,gracetime,flags,limitfactor"


@dataclass(frozen=True)
class Association:
    """One account that the user may charge, with the QOS that are available in it."""

    account: str
    qos: frozenset[str]
    default_qos: str


@dataclass(frozen=True)
class QosRule:
    """One QOS: how its jobs are preempted, which QOS they preempt, and its ``flags`` in lower case.

    ``limit_factor`` multiplies the limits of associations.
    """

    name: str
    preempts: frozenset[str]
    mode: str
    grace_seconds: float
    flags: frozenset[str] = frozenset()
    limit_factor: float | None = None


@dataclass(frozen=True)
class Site:
    """The current state of the site. ``account`` and ``qos``: those that the job would get; "" for none.

    ``reservations`` is None where Slurm does not answer.
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

    def qos_says(self, flag: str) -> bool:
        """Return whether the job's own QOS has this flag, such as ``NoReserve``; the partition's QOS is ignored."""
        return any(rule.name == self.qos and flag.lower() in rule.flags for rule in self.qos_rules)

    def qos_may_lift(self, flag: str) -> bool:
        """Return whether the job's QOS may lift a partition's limit: it has the flag, or is hidden from the user."""
        hidden = bool(self.qos) and self.has_accounting and all(rule.name != self.qos for rule in self.qos_rules)
        return hidden or self.qos_says(flag)

    def partitions_of(self, cluster: ClusterSpec) -> list[Partition]:
        """Return the existing partitions that the job may run in."""
        return _chosen(self.partitions, cluster)


def ask_site(cluster: ClusterSpec, without: Sequence[str] = ()) -> Site:
    """Return the site as slurmctld, and slurmdbd if there is one, report it. Raises SchedulerError without an answer.

    ``without``: names of variables that are removed from the environment of Slurm's commands.
    """
    user, slurm = user_name(), cluster.slurm
    config = settings(call_slurm(["scontrol", "show", "config"], without=without).stdout)

    def ask(command: Sequence[str]) -> str | None:
        """Return the output, or None if the command fails: a site may hide or disable it."""
        try:
            return call_slurm(command, without=without).stdout
        except SchedulerError:
            return None

    def output_of(*command: str) -> str:
        """Return the output, or an empty text if the command fails."""
        return ask(command) or ""

    associations: tuple[Association, ...] = ()
    rules: tuple[QosRule, ...] = ()
    limits: tuple[Limit, ...] = ()
    account, qos = slurm.account or "", slurm.qos or ""
    there = partitions(output_of("scontrol", "--all", "-o", "show", "partition"))
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        mine = ["where", f"user={user}", f"cluster={config.get('ClusterName', '')}", "format=account,qos,defaultqos"]
        associations = read_associations(output_of("sacctmgr", "-nP", "show", "associations", *mine))
        rules = read_qos_rules(output_of("sacctmgr", "-nP", "show", "qos", f"format={QOS_COLUMNS}"))
        account = account or output_of("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount").strip()
        qos = qos or _default_qos(associations, account)
        managed = output_of("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos", f"users={user}")
        binding = binding_qos(rules, [partition.qos for partition in _chosen(there, cluster)], qos)
        factor = limit_factor(rules, binding)
        limits = limits_of(managed, user=user, uid=os.getuid(), account=account, qos=binding, factor=factor)
    reserved = ask(["scontrol", "-o", "show", "reservation"])
    return Site(
        user=user,
        now=time.time(),
        config=config,
        partitions=there,
        nodes=nodes(output_of("sinfo", "--noheader", "--Node", "--all", f"--Format={NODES}")),
        reservations=None if reserved is None else reservations(reserved, lambda hosts: node_names(hosts, without)),
        associations=associations,
        qos_rules=rules,
        account=account,
        qos=qos,
        limits=limits,
    )


def binding_qos(rules: Sequence[QosRule], partitions: Sequence[str], own: str) -> list[str]:
    """Return the QOS whose limits apply, by precedence: the partition's first, unless the job's has OverPartQOS.

    ``partitions``: the QOS of each partition that the job may run in, "" for none. With several different ones only the
    job's own QOS is returned, since the partition is not known.
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


def read_associations(text: str) -> tuple[Association, ...]:
    """Return the associations in ``sacctmgr -nP show associations format=account,qos,defaultqos``."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(Association(row[0], frozenset(row[1].split(",")), row[2]) for row in rows if len(row) == 3)


def read_qos_rules(text: str) -> tuple[QosRule, ...]:
    """Return the QOS in ``sacctmgr -nP show qos format=QOS_COLUMNS``."""
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
    """Return the name of the user of this process, by its uid: $USER may be wrong."""
    with contextlib.suppress(KeyError):  # a uid without an entry in the user database, as in a container
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _default_qos(associations: Sequence[Association], account: str) -> str:
    mine = next((one for one in associations if one.account == account), None)
    if mine is None:
        return ""
    return mine.default_qos or ("normal" if "normal" in mine.qos else "")
