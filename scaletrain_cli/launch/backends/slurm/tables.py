"""Parsers of the output of Slurm's commands: partitions, nodes, reservations, settings, QOS, limits. Pure functions.

The text formats are those of Slurm 22.05 and later: scontrol of 22.05 has no JSON.
"""

import dataclasses
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Columns of `sinfo --Format`, separated by bars, which keeps sinfo from truncating them.
NODES = "NodeList:|,StateCompact:|,Gres:|,GresUsed:|,PartitionName:|,CPUs:|,Memory:|"
QOS_COLUMNS = "name,preempt,preemptmode,gracetime,flags,limitfactor"  # of `sacctmgr show qos`
# ext: a node outside of this cluster, since Slurm 25.05.
_UNUSABLE = ("boot", "down", "drain", "drng", "err", "ext", "fail", "futr", "inval", "maint", "unk")
_PAIR = re.compile(r"(\S+?)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)")
_HOSTLIST_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")  # a comma separates numbers inside brackets, names outside
_GRES = re.compile(
    r"(?:^|,)(?P<name>[^:,()]+)(?::(?P<type>[^,()]+?))??(?::(?P<count>\d+)(?P<unit>[KMGTP]?))?(?=\(|,|$)"
)
_AMOUNT = re.compile(r"([\w/:.\-]+)=(N|[\d.]+)(?:\(([\d.]+)\))?")
_SCALAR = re.compile(r"(N|[\d.]+)(?:\(([\d.]+)\))?")
_NAMES = {"gres/gpu": "GPUs", "node": "nodes", "cpu": "CPUs", "mem": "MiB of memory", "jobs": "jobs"}
GPU = "gres/gpu"
_ACCOUNT_LINE = re.compile(r"^ClusterName=\S* Account=(\S+) UserName= .*$", re.MULTILINE)
AT_LEAST = "MinTRESPJ"  # the only minimum: a job that requests less stays pending until it is changed
PER_NODE = "MaxTRESPN"


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
    max_cores_per_node: int | None = None
    total_nodes: int = 0
    gives_cores: bool = False  # DefCpuPerGPU: a job gets CPU cores for its GPUs without requesting them


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
    gres: str = ""  # all generic resources, as Slurm prints them

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
    is_flexible: bool = False  # FLEX: its jobs may begin before it, end after it, and use other nodes


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
    by_name: dict[str, Node] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 7:
            continue
        name, state, gres, used, partition, cpus, memory = (field.strip() for field in fields[:7])
        before = by_name[name].partitions if name in by_name else frozenset()
        by_name[name] = Node(
            *(name, state, gpus(gres), gpus(used), before | {partition}, _integer(cpus) or 0, _integer(memory) or 0),
            gres,
        )
    return tuple(by_name.values())


def reservations(text: str) -> tuple[Reservation, ...]:
    """Return the reservations in ``scontrol -o show reservation``."""
    return tuple(
        Reservation(
            record["ReservationName"],
            moment(record.get("StartTime", "")) or 0.0,
            moment(record.get("EndTime", "")) or float("inf"),
            frozenset(node_names(_value(record.get("Nodes", "")) or "")),
            *(flag in record.get("Flags", "") for flag in ("MAINT", "FLEX")),
        )
        for record in records(text)
        if "ReservationName" in record
    )


def node_names(hostlist: str) -> tuple[str, ...]:
    """Return the names in a Slurm hostlist such as ``rack[1-2]n[08-10,12],login1``, in order."""
    return tuple(name for part in _HOSTLIST_PART.findall(hostlist) for name in _expanded(part))


def _expanded(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield head
        return
    numbers, _, tail = rest.partition("]")
    for item in numbers.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{head}{number:0{len(first)}d}{end}" for end in _expanded(tail))


def gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a GRES text such as ``gpu:h100:8(S:0-1),gpu:a100:2``."""
    counts: dict[str, int] = {}
    for name, kind, count in _gres(gres):
        if name == "gpu":
            counts[kind] = counts.get(kind, 0) + count
    return counts


def amounts_of_gres(gres: str) -> dict[str, int]:
    """Return the amount of each generic resource, of all its types, in a GRES text such as ``nvme:500,tmpfs:2T``."""
    amounts: dict[str, int] = {}
    for name, _, count in _gres(gres):
        amounts[name] = amounts.get(name, 0) + count
    return amounts


def _gres(text: str) -> Iterator[tuple[str, str, int]]:
    for match in _GRES.finditer(text):
        unit = 1024 ** " KMGTP".index(match["unit"] or " ")
        yield match["name"], match["type"] or "", int(match["count"] or 1) * unit


def is_usable(state: str) -> bool:
    """Return whether Slurm runs jobs on a node in this compact state, idle or busy."""
    return not state.startswith(_UNUSABLE) and not state.endswith("*")  # *: not responding


def may_satisfy(features: Collection[str], constraint: str) -> bool:
    """Return whether a node may be one of those of a constraint such as ``a100&ib``, ``[rack1|rack2]``, ``big*2&ib*4``.

    A node has the features of one alternative; after a count (``*2``), an ``&`` is between nodes. Parentheses are
    ignored.
    """
    words = re.sub(r"[()\[\]]|\*\d+", "", constraint)
    alternatives = re.split(r"[|&,]" if "*" in constraint else r"\|", words)
    return any(set(filter(None, re.split("[&,]", one))) <= set(features) for one in alternatives)


def limit_seconds(text: str) -> float | None:
    """Return the seconds in ``1-02:03:04``, ``02:03:04`` or ``03:04``; None for UNLIMITED, NONE and the like."""
    if (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


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
        min_nodes=_integer(record.get("MinNodes", "")) or 0,
        max_nodes=_integer(record.get("MaxNodes", "")),
        allowed_accounts=_names(record.get("AllowAccounts", "ALL")),
        denied_accounts=_names(record.get("DenyAccounts", "")) or frozenset(),
        allowed_qos=_names(record.get("AllowQos", "ALL")),
        denied_qos=_names(record.get("DenyQos", "")) or frozenset(),
        preempt_mode=mode,
        grace_seconds=float(_integer(record.get("GraceTime", "")) or 0),
        tier=_integer(record.get("PriorityTier", "")) or 0,
        qos=(_value(record.get("QoS", "")) or "").lower(),
        max_cores_per_node=_integer(record.get("MaxCPUsPerNode", "")),
        total_nodes=_integer(record.get("TotalNodes", "")) or 0,
        gives_cores="DefCpuPerGPU" in record.get("JobDefaults", ""),
    )


def _names(text: str) -> frozenset[str] | None:
    """Return the accounts or QOS of a list; None for all. Slurm writes them in small letters, and reads any."""
    return None if text == "ALL" else frozenset(name.lower() for name in text.split(",") if _value(name))


def _value(text: str) -> str | None:
    return text if text.strip() not in ("", "(null)", "N/A", "NONE") else None


def _integer(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


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
    applicable: list[Limit] = []
    for limits in (_of_qos(text, name, uid, account) for name in qos):
        limited = {(limit.kind, limit.resource) for limit in applicable}
        applicable += [limit for limit in limits if (limit.kind, limit.resource) not in limited]
    # An association's per-user limit applies where no QOS has a limit per user or per account on that resource.
    limited = {(_OVERRIDDEN.get(limit.kind, limit.kind), limit.resource) for limit in applicable}
    for limit in _of_associations(text, user, account):
        if (limit.kind, limit.resource) not in limited:
            scaled = limit.kind in ("GrpTRES", "MaxTRESPJ")
            applicable.append(dataclasses.replace(limit, allowed=limit.allowed * factor) if scaled else limit)
    return tuple(applicable)


def fit(limits: Sequence[Limit], request: Mapping[str, float], seconds: float | None, nodes: int = 1) -> Fit:
    """Return the limits that a job on ``nodes`` nodes exceeds.

    ``request``: the amount of each resource for the whole job; ``seconds``: its time limit, if any.
    """
    never, busy = [], []
    for limit in limits:
        amount = seconds if limit.resource == "seconds" else 1.0 if limit.resource == "jobs" else None
        amount = request.get(limit.resource, amount)
        if amount is None:
            continue
        if limit.kind == AT_LEAST:
            if amount < limit.allowed:
                never.append(limit)
        elif limit.kind == PER_NODE:
            if amount / nodes > limit.allowed:
                never.append(limit)
        elif limit.kind == "GrpTRESMins":  # a budget of TRES minutes, which may be used up
            if limit.used is not None and limit.used >= limit.allowed:
                busy.append(limit)
        elif amount > limit.allowed:
            never.append(limit)
        elif limit.used is not None and amount > limit.allowed - limit.used:
            busy.append(limit)
    return Fit(tuple(never), tuple(busy))


def resource_in_words(resource: str) -> str:
    """Return the name of a resource for people: ``GPUs of type h100`` for ``gres/gpu:h100``."""
    if resource.startswith(f"{GPU}:"):
        return f"GPUs of type {resource.removeprefix(f'{GPU}:')}"
    return _NAMES.get(resource, resource)


def _of_associations(text: str, user: str, account: str) -> Iterator[Limit]:
    """Yield the limits of the user's association in the account, then of the account, then of its parents."""
    for record in records("\n".join(line for line in text.splitlines() if f" UserName={user}(" in line)):
        if record.get("Account") == account:
            yield from _limits(f"user {user} in account {account}", record, _GROUP | _PER_JOB | _OWN)
    for name, record in account_and_parents(text, account).items():
        yield from _limits(f"account {name}", record, _GROUP)


def account_and_parents(text: str, account: str) -> dict[str, dict[str, str]]:
    """Return the association of an account and those of the accounts above it, by name; empty for one not in ``text``.

    ``text``: ``scontrol -o show assoc_mgr``.
    """
    there = {line[1]: line[0] for line in _ACCOUNT_LINE.finditer(text)}
    accounts: dict[str, dict[str, str]] = {}
    while account and account not in accounts:
        accounts[account] = next(records(there.get(account, "")), {})
        account = accounts[account].get("ParentAccount", "").partition("(")[0]
    return accounts


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
_OVERRIDDEN = {f"{kind}P{of}": kind for of in "UA" for kind in _OWN}


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
