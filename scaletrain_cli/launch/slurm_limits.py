"""Quotas of a user's associations and QOS as Slurm's controller enforces them, and whether a job fits. Pure.

Reads ``scontrol -o show assoc_mgr``: what is allowed stands there beside what is used, and it needs no slurmdbd.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scaletrain_cli.launch.slurm_tables import records

_AMOUNT = re.compile(r"([\w/:.\-]+)=(N|[\d.]+)(?:\(([\d.]+)\))?")
_SCALAR = re.compile(r"(N|[\d.]+)(?:\(([\d.]+)\))?")
_NAMES = {"gres/gpu": "GPUs", "node": "nodes", "cpu": "CPUs", "mem": "MiB of memory", "jobs": "jobs"}
GPU = "gres/gpu"
AT_LEAST = "MinTRESPJ"  # the only limit from below: a job that asks for less pends until it is changed
PER_NODE = "MaxTRESPN"


@dataclass(frozen=True)
class Limit:
    """One limit: ``owner`` may hold ``allowed`` of ``resource``; per job, or with ``used`` over all its jobs."""

    owner: str
    kind: str  # Slurm's own name of it
    resource: str
    allowed: float
    used: float | None

    @property
    def in_words(self) -> str:
        return resource_in_words(self.resource)


@dataclass(frozen=True)
class Fit:
    """Limits that the job alone exceeds, and those that leave no room for it now."""

    never: tuple[Limit, ...]
    busy: tuple[Limit, ...]


def limits_of(
    text: str, *, user: str, uid: int, account: str, qos: Sequence[str], factor: float = 1.0
) -> tuple[Limit, ...]:
    """Those that a job of the user meets. ``qos``: the one that counts first, then the other, where there are two.

    What the first says of a resource sets aside what the next ones, and at last associations, say of it; ``factor`` is
    what a QOS multiplies the associations' amounts with (LimitFactor).
    """
    found: list[Limit] = []
    for limits in (_of_qos(text, name, uid, account) for name in qos):
        said = {(limit.kind, limit.resource) for limit in found}
        found += [limit for limit in limits if (limit.kind, limit.resource) not in said]
    # What an association says of a user's jobs counts where no QOS says so much of a user's or an account's.
    said = {(_SET_ASIDE.get(limit.kind, limit.kind), limit.resource) for limit in found}
    for limit in _of_associations(text, user, account):
        if (limit.kind, limit.resource) not in said:
            scaled = limit.kind in ("GrpTRES", "MaxTRESPJ")
            found.append(dataclasses.replace(limit, allowed=limit.allowed * factor) if scaled else limit)
    return tuple(found)


def fit(limits: Sequence[Limit], request: Mapping[str, float], seconds: float | None, nodes: int = 1) -> Fit:
    """``request``: of each resource, over the whole job of so many nodes; ``seconds``: its time limit, if any."""
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
        elif limit.kind == "GrpTRESMins":  # a budget of minutes that is used up, whatever one job asks for
            if limit.used is not None and limit.used >= limit.allowed:
                busy.append(limit)
        elif asked > limit.allowed:
            never.append(limit)
        elif limit.used is not None and asked > limit.allowed - limit.used:
            busy.append(limit)
    return Fit(tuple(never), tuple(busy))


def resource_in_words(resource: str) -> str:
    """``gres/gpu:h100`` as ``GPUs of type h100``."""
    if resource.startswith(f"{GPU}:"):
        return f"GPUs of type {resource.removeprefix(f'{GPU}:')}"
    return _NAMES.get(resource, resource)


def _of_associations(text: str, user: str, account: str) -> Iterator[Limit]:
    """The user's own in the account, then the account's, then those of the accounts above."""
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


# Which fields hold which resource: "" is one of each, by name.
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
