"""Checks before a submission: problems that keep the job from ever running, notes on waits, the estimated start.

All problems are reported at once, each with the given value, the allowed values and a remedy. Slurm accepts many of
these jobs and leaves them pending indefinitely.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import Problem, SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.backends.base import PreflightResult, Start
from scaletrain_cli.launch.backends.slurm import tables
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, proxies_with_password
from scaletrain_cli.launch.backends.slurm.script import cores_per_node, sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, gpus_for, preemption_notes, type_of_accelerator, types_of
from scaletrain_cli.launch.backends.slurm.tables import Limit, Node, Partition
from scaletrain_cli.launch.shared_folder import unshared_notes
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.slurm import UNLIMITED_SECONDS
from scaletrain_cli.text import nearest_name


def check_job(site: Site, spec: RunSpec, exclude: str | None) -> PreflightResult:
    """Return the estimated start and the notes of a job that can run. ``exclude``: a hostlist in place of the spec's.

    Raises SchedulerError with every problem that keeps the job from ever running, or with Slurm's message.
    """
    given, planned = spec.cluster.node_range, spec.cluster.nodes  # planned: the most nodes of a range
    sizes = () if given is None or given.min == planned else (given.min, planned)
    least = (sizes[0] if sizes else planned) + spec.cluster.spare_nodes
    verdict = check_site(site, spec.with_changes("cluster", nodes=least))
    if verdict.problems:
        raise SchedulerError(Reason("slurm.never-runs"), verdict.problems)
    options = (f"#SBATCH --{option}" for option in sbatch_options(spec, "preflight", exclude, sizes))
    script = "\n".join(["#!/bin/bash", *options, "true", ""])
    try:
        answer = call_slurm(["sbatch", "--test-only"], text=script, without=spec.secret_env)
    except SchedulerSilentError:
        raise
    except SchedulerError as error:
        # Slurm 22.05 refuses a nodelist with fewer nodes than the job, and every job for seconds after a restart of the
        # controller, when the nodes are not registered yet. sbatch may accept it: the nodes fit the spec.
        slurm, said = spec.cluster.slurm, "" if error.reason is None else str(error.reason.params.get("said", ""))
        if not (_NOT_AVAILABLE in said and slurm.constraint is None and not slurm.extra):
            raise with_key(spec, error) from error
        refused = Reason("slurm.note-test-refused", {"said": _NOT_AVAILABLE})
        return PreflightResult(Start(None, Reason("slurm.no-estimate")), (*verdict.notes, refused))
    start, messages = read_estimate(answer.stderr, site.now, hidden_reservations=site.hides_reservations)
    if spec.cluster.slurm.extra.get("hold") is True:
        start = Start(None, Reason("slurm.start-on-hold"))
    shared = unshared_notes(runs_root(), spec.cluster.nodes)
    return PreflightResult(start, (*verdict.notes, *shared, *map(recorded, messages)))


# "sbatch: Job 12 to start at 2026-11-22T00:30:00 using 16 processors on nodes n[1-2] in partition main". Since 25.05
# the text is "a using", with "on cluster NAME" before it where Slurm names the cluster.
_ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<at>\S+)"
    r"(?:.*? processors on (?:nodes )?(?P<nodes>\S+))?(?: in partition (?P<partition>\S+))?"
)


def read_estimate(text: str, now: float, *, hidden_reservations: bool = False) -> tuple[Start, list[str]]:
    """Return Slurm's estimate of the start, and the other lines that Slurm or a plugin of the site printed."""
    start: Start | None = None
    rest = []
    for line in (line.removeprefix("sbatch: ") for line in text.splitlines() if line.strip()):
        match = _ESTIMATE.search(line)
        at = tables.moment(match["at"]) if match is not None else None
        if match is None or at is None:
            rest.append(line)
            continue
        source = Reason("slurm.estimate")
        if match["nodes"] and match["partition"]:
            source = Reason("slurm.estimate-on", {"nodes": match["nodes"], "partition": match["partition"]})
        if hidden_reservations:
            source = Reason("slurm.estimate-with-hidden", {"estimate": source})
        start = Start(at, Reason("slurm.estimate-may-slip", {"estimate": source}) if at > now + 60 else source)
    return start or Start(None, Reason("slurm.no-estimate")), rest


_NOT_AVAILABLE = "Requested node configuration is not available"
# Messages of sbatch about the value of one key (schedmd/slurm, slurm_errno.c).
_MESSAGES_OF_KEYS: dict[str, tuple[str, ...]] = {
    "constraint": ("Invalid feature specification", _NOT_AVAILABLE),
    "licenses": ("Invalid license specification", "Licenses are not available"),
    "reservation": ("Requested reservation is invalid", "reservation not usable"),
    "account": ("Invalid account",),
    "qos": ("Invalid qos",),
    "partition": ("Invalid partition",),
    "gres_type": ("Invalid generic resource",),
    "gres": ("Invalid generic resource",),
    "nodelist": ("Invalid node name",),
    "time": ("Requested time limit is invalid",),
}


def with_key(spec: RunSpec, error: SchedulerError) -> SchedulerError:
    """Return sbatch's refusal as a problem of the key that it is about; unchanged if the key is not certain."""
    said = "" if error.reason is None else str(error.reason.params.get("said", ""))
    for name, phrases in _MESSAGES_OF_KEYS.items():
        value = getattr(spec.cluster.slurm, name)
        if value and any(phrase in said for phrase in phrases):
            key = f"cluster.slurm.{name}"
            problem = Problem.because(
                spec.where(key), key, Reason("slurm.refused-value", {"said": said.rstrip(".")}), value
            )
            return SchedulerError(Reason("slurm.refused"), (problem,))
    return error


def too_small(spec: RunSpec, node: Node) -> Iterator[str]:
    """Yield the keys of the spec that request more than the node has; what Slurm does not report counts as enough."""
    cluster, slurm = spec.cluster, spec.cluster.slurm
    if cluster.gpu != "cpu":
        if slurm.gres_type is not None and not node.gpus.get(slurm.gres_type):
            yield "cluster.slurm.gres_type"
        elif gpus_for(cluster, node.gpus) < cluster.gpus_per_node:
            yield "cluster.gpus_per_node"
    if node.cpus and (cores_per_node(spec) or 0) > node.cpus:
        yield "cluster.cpus_per_gpu"
    there = tables.amounts_of_gres(node.gres)
    for index, wanted in enumerate(slurm.gres):
        if any(amount > there.get(name, 0) for name, amount in tables.amounts_of_gres(wanted).items()):
            yield f"cluster.slurm.gres.{index}"
    if node.memory_mib and (slurm.memory_per_node or 0) > node.memory_mib * 2**20:
        yield "cluster.slurm.memory_per_node"


def shortages(spec: RunSpec, partition: str, nodes: Sequence[Node]) -> Iterator[Problem]:
    """Yield a problem for each resource that all of these nodes lack or, if there is none, that any of them lacks.

    Nodes without GPUs of the requested type do not count if others have some.
    """
    if (kind := spec.cluster.slurm.gres_type) is not None:
        nodes = [node for node in nodes if node.gpus.get(kind)] or nodes
    lacking = [set(too_small(spec, node)) for node in nodes]
    for key in sorted(set.intersection(*lacking) or set.union(*lacking)):
        yield _shortage(spec, partition, nodes, key)


def _shortage(spec: RunSpec, partition: str, nodes: Sequence[Node], key: str) -> Problem:
    cluster, slurm = spec.cluster, spec.cluster.slurm
    given: object
    where: dict[str, object] = {"partition": partition}
    if key == "cluster.slurm.gres_type":
        kinds = types_of(nodes)
        code = "gpu-type-elsewhere" if kinds else "no-gpus"
        given, reason = slurm.gres_type, Reason(f"slurm.{code}", where | {"types": _named(kinds)})
    elif key == "cluster.gpus_per_node":
        most = max(gpus_for(cluster, node.gpus) for node in nodes)
        code = "no-gpus" if not most else "too-many-gpus" if slurm.gres_type is None else "too-many-gpus-of-type"
        given = cluster.gpus_per_node
        reason = Reason(f"slurm.{code}", where | {"most": most, "type": slurm.gres_type})
    elif key == "cluster.cpus_per_gpu":
        most = max(node.cpus for node in nodes)
        enough = most // cluster.gpus_per_node
        params = where | {"most": most, "requested": cores_per_node(spec), "enough": enough}
        given, reason = cluster.cpus_per_gpu, Reason(f"slurm.too-many-cpus{'' if enough else '-for-one'}", params)
    elif key.startswith("cluster.slurm.gres."):
        given = slurm.gres[int(key.rpartition(".")[2])]
        reason = Reason("slurm.too-little-gres", where | {"gres": sorted({node.gres for node in nodes})})
    else:
        most = max(node.memory_mib for node in nodes)
        given, reason = slurm.memory_per_node, Reason("slurm.too-much-memory", where | {"most": most})
    return Problem.because(spec.where(key), key, reason, given)


def _named(kinds: Sequence[str]) -> list[str]:
    return [kind or "GPUs without a type" for kind in kinds]


_WHEN = "%Y-%m-%d %H:%M"
_REFUSING_STATES = ("DRAIN", "INACTIVE")


@dataclass(frozen=True)
class PreflightVerdict:
    """``problems`` keep the job from ever running; ``notes`` are about waits and other conditions."""

    problems: tuple[Problem, ...]
    notes: tuple[Reason, ...]


def check_site(site: Site, spec: RunSpec) -> PreflightVerdict:
    """Return the result of all checks of the job against the site."""
    return _SiteCheck(site, spec).verdict()


@dataclass
class _SiteCheck:
    site: Site
    spec: RunSpec

    def verdict(self) -> PreflightVerdict:
        partitions = self.site.partitions_of(self.spec.cluster)
        notes: list[Reason] = []
        named = [*self._partition_names(partitions), *self._account_and_qos()]
        problems = [] if self.site.may_rewrite_jobs else named
        if self.site.may_rewrite_jobs:  # then only sbatch --test-only can check the names
            notes += [
                Reason("slurm.note-plugin-may-change", {"subject": one.subject, "problem": one.reason or one.message})
                for one in named
            ]
        by_partition = [list(self._of_partition(partition, notes)) for partition in partitions]
        if all(by_partition):  # Slurm uses the first partition of the list that can run the job
            problems += [one for obstacles in by_partition for one in obstacles]
        accepting = [one for one, obstacles in zip(partitions, by_partition, strict=True) if not obstacles]
        problems += self._several_types(accepting, notes)
        problems += self._quotas(notes)
        problems += self._reservation(notes)
        notes += preemption_notes(self.site, self.spec.cluster)
        if left_out := set(proxies_with_password()) - set(self.spec.secret_env):
            notes.append(Reason("slurm.note-proxy-with-password", {"names": sorted(left_out)}))
        if ignored := sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS"):
            notes.append(Reason("slurm.note-options-in-environment", {"names": ignored}))
        if self.site.qos_has("NoReserve") and self.spec.cluster.nodes > 1:
            notes.append(Reason("slurm.note-no-reserve", {"qos": self.site.qos, "nodes": self.spec.cluster.nodes}))
        return PreflightVerdict(tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)))

    def _problem(self, key: str, code: str, given: object, **params: object) -> Problem:
        return Problem.because(self.spec.where(key), key, Reason(f"slurm.{code}", params), given)

    def _partition_names(self, partitions: list[Partition]) -> Iterator[Problem]:
        requested = self.spec.cluster.slurm.partition
        names = [partition.name for partition in self.site.partitions]
        if requested is None and not partitions and names:
            yield self._problem("cluster.slurm.partition", "no-default-partition", "null", partitions=names)
        elif requested is not None and names:
            for name in requested.split(","):
                if name not in names:
                    near = nearest_name(name, names)
                    code = "unknown-partition" if near is None else "misspelled-partition"
                    yield self._problem("cluster.slurm.partition", code, name, partitions=names, near=near)

    def _account_and_qos(self) -> Iterator[Problem]:
        site, slurm = self.site, self.spec.cluster.slurm
        accounts = sorted({one.account for one in site.associations})
        if site.enforces("associations") and accounts and slurm.account and slurm.account.lower() not in accounts:
            known = {"user": site.user, "accounts": accounts}
            yield self._problem("cluster.slurm.account", "account-not-yours", slurm.account, **known)
        allowed = sorted({qos for one in site.associations if one.account == site.account for qos in one.qos})
        others = [name for name in (slurm.qos or "").split(",") if name.lower() not in ("", *allowed)]
        if site.enforces("qos") and allowed and others:
            params = {"user": site.user, "qos": allowed, "account": site.account}
            yield self._problem("cluster.slurm.qos", "qos-not-yours", ",".join(others), **params)

    def _of_partition(self, partition: Partition, notes: list[Reason]) -> Iterator[Problem]:
        cluster, slurm, name = self.spec.cluster, self.spec.cluster.slurm, partition.name
        if partition.state in _REFUSING_STATES:
            yield self._problem("cluster.slurm.partition", "partition-closed", name, state=partition.state)
        elif partition.state != "UP":
            notes.append(Reason("slurm.note-partition-not-up", {"partition": name, "state": partition.state}))
        longest = None if self.site.qos_may_lift("PartitionTimeLimit") else partition.max_seconds
        if (requested := slurm.time) is not None and longest is not None and requested > longest:
            given, most = _duration(requested), _duration(longest)
            yield self._problem("cluster.slurm.time", "beyond-max-time", given, partition=name, most=most)
        most_nodes = None if self.site.qos_may_lift("PartitionMaxNodes") else partition.max_nodes
        if most_nodes is not None and cluster.nodes > most_nodes:
            yield self._problem("cluster.nodes", "beyond-max-nodes", cluster.nodes, partition=name, most=most_nodes)
        if cluster.nodes < partition.min_nodes and not self.site.qos_may_lift("PartitionMinNodes"):
            least = partition.min_nodes
            yield self._problem("cluster.nodes", "below-min-nodes", cluster.nodes, partition=name, least=least)
        accounts = self.site.accounts if self.site.enforces("associations") else ()
        # A list stands for the accounts below its own, too (Slurm 23.02); a job may have several QOS (24.11).
        for what, mine, allowed, denied, enough in (
            ("account", accounts, partition.allowed_accounts, partition.denied_accounts, any),
            ("qos", self.site.qos.split(","), partition.allowed_qos, partition.denied_qos, all),
        ):
            refused = enough(name in denied for name in mine) if allowed is None else allowed.isdisjoint(mine)
            if any(mine) and refused:
                code = "partition-denies" if allowed is None else "partition-admits-only"
                named: dict[str, object] = {"mine": mine[0], "allowed": sorted(allowed or ())}
                yield self._problem(f"cluster.slurm.{what}", code, mine[0], partition=name, what=what, **named)
        yield from self._nodes_of(partition, notes)

    def _nodes_of(self, partition: Partition, notes: list[Reason]) -> Iterator[Problem]:
        """Yield a problem if the partition has too few such nodes in any state; note the number of unusable ones."""
        cluster, slurm = self.spec.cluster, self.spec.cluster.slurm
        here = [node for node in self.site.nodes if partition.name in node.partitions]
        if len(here) < partition.total_nodes:  # Slurm hides nodes of a cloud that are powered down (PrivateData)
            here = []
        excluded = set(tables.node_names(slurm.exclude or ""))
        pinned = set(tables.node_names(slurm.nodelist or ""))
        if here and (others := sorted(pinned - {node.name for node in here})):
            where = {"nodes": others, "partition": partition.name}
            yield self._problem("cluster.slurm.nodelist", "nodes-of-other-partition", slurm.nodelist, **where)
            return
        offered = [node for node in here if node.name not in excluded]
        fitting = [node for node in offered if not any(too_small(self.spec, node))]
        if not here or len(fitting) >= cluster.nodes:
            usable = sum(node.is_usable for node in fitting)
            if here and usable < cluster.nodes:
                down = [f"{node.name} {node.state}" for node in fitting if not node.is_usable]
                counts = {"usable": usable, "fitting": len(fitting), "nodes": cluster.nodes}
                notes.append(Reason("slurm.note-nodes-down", counts | {"partition": partition.name, "down": down}))
            else:
                notes.extend(self._reserved(partition, fitting))
            return
        if fitting or not offered:
            code = "too-few-nodes" if len(fitting) == len(here) else "too-few-fitting-nodes"
            if excluded:
                code = "too-few-nodes-without-excluded"
            params: dict[str, object] = {"count": len(fitting), "most": max(1, len(fitting))}
            params |= {"partition": partition.name, "excluded": slurm.exclude}
            yield self._problem("cluster.nodes", code, cluster.nodes, **params)
            return
        yield from shortages(self.spec, partition.name, offered)

    def _several_types(self, partitions: Sequence[Partition], notes: list[Reason]) -> Iterator[Problem]:
        """Yield a problem if Slurm may give the job GPUs of several types. A constraint may keep it to one of them."""
        cluster, slurm = self.spec.cluster, self.spec.cluster.slurm
        is_known = cluster.gpu != "cpu" and slurm.gpu_request != "none"
        if not is_known or slurm.gres_type is not None or slurm.constraint is not None:
            return
        names = {partition.name for partition in partitions}
        excluded, pinned = set(tables.node_names(slurm.exclude or "")), set(tables.node_names(slurm.nodelist or ""))
        offered = [node for node in self.site.nodes if names & node.partitions and node.name not in excluded]
        if len(pinned) >= cluster.nodes:  # Slurm gives all nodes of the list
            offered = [node for node in offered if node.name in pinned]
        kinds = types_of(node for node in offered if not any(too_small(self.spec, node)))
        if len(kinds) < 2:
            return
        name = cluster.gpu_name
        own = type_of_accelerator(name, kinds)
        params = {"types": _named(kinds), "gpu": name, "type": own}
        if self.site.may_rewrite_jobs:
            notes.append(Reason("slurm.note-several-gpu-types", params))
            return
        code = "several-gpu-types" if own is None else "several-gpu-types-with-own"
        yield self._problem("cluster.slurm.gres_type", code, "null", **params)

    def _quotas(self, notes: list[Reason]) -> Iterator[Problem]:
        """Check the limits of account and QOS: yield those that the job alone exceeds, and note those in use."""
        cluster, slurm = self.spec.cluster, self.spec.cluster.slurm
        if not self.site.enforces("limits"):
            return
        request: dict[str, float] = {"node": cluster.nodes}
        if cluster.gpu != "cpu" and slurm.gpu_request != "none":
            request[tables.GPU] = cluster.nodes * cluster.gpus_per_node
            if slurm.gres_type is not None:
                request[f"{tables.GPU}:{slurm.gres_type}"] = request[tables.GPU]
        if (cores := cores_per_node(self.spec)) is not None:
            request["cpu"] = cluster.nodes * cores
        if slurm.memory_per_node is not None:
            request["mem"] = cluster.nodes * slurm.memory_per_node / 2**20
        quotas = tables.fit(self.site.limits, request, slurm.time, cluster.nodes)
        for limit in quotas.never:
            yield self._beyond(limit, request)
        for limit in quotas.busy:
            params = _limit_params(limit) | {"used": limit.used, "requested": request.get(limit.resource, 1)}
            used_up = limit.kind == "GrpTRESMins"
            notes.append(Reason("slurm.note-budget-used-up" if used_up else "slurm.note-quota-in-use", params))

    def _beyond(self, limit: Limit, request: dict[str, float]) -> Problem:
        params = _limit_params(limit)
        if limit.kind == tables.AT_LEAST:
            given = f"{request[limit.resource]:g} {limit.in_words} over all nodes"
            return self._problem("cluster.nodes", "below-least-request", given, **params)
        if limit.resource == "seconds":
            given = _duration(self.spec.cluster.slurm.time or 0)
            params["most"] = _duration(limit.allowed)
            return self._problem("cluster.slurm.time", "beyond-wall-time", given, **params)
        keys = {"mem": "cluster.slurm.memory_per_node", "cpu": "cluster.cpus_per_gpu"}
        given = f"{request.get(limit.resource, 1):g} {limit.in_words} over all nodes"
        code = "per-node" if limit.kind == tables.PER_NODE else "per-job" if limit.used is None else "at-once"
        return self._problem(keys.get(limit.resource, "cluster.nodes"), f"beyond-quota-{code}", given, **params)

    def _reservation(self, notes: list[Reason]) -> Iterator[Problem]:
        """Check the requested reservation. Where Slurm hides reservations, sbatch --test-only checks it."""
        requested, site = self.spec.cluster.slurm.reservation, self.site
        if site.qos_has("RequiresReservation") and requested is None:
            if site.may_rewrite_jobs:
                notes.append(Reason("slurm.note-qos-needs-reservation", {"qos": site.qos}))
                return
            yield self._problem("cluster.slurm.reservation", "qos-needs-reservation", "null", qos=site.qos)
        names = [one.name for one in site.reservations or ()]
        missing = ",".join(name for name in self._reservations if name not in names)
        if site.reservations is None:
            code = "note-maintenance-unknown" if requested is None else "note-reservations-unknown"
            notes.append(Reason(f"slurm.{code}", {"reservation": requested}))
        elif missing and site.hides_reservations:
            notes.append(Reason("slurm.note-reservation-hidden", {"reservation": missing}))
        elif missing:
            code = "unknown-reservation" if names else "no-reservations"
            yield self._problem("cluster.slurm.reservation", code, missing, reservations=names)

    @property
    def _reservations(self) -> list[str]:
        """The requested reservations, of which Slurm uses the first that can run the job."""
        return (self.spec.cluster.slurm.reservation or "").split(",")

    def _reserved(self, partition: Partition, fitting: list[Node]) -> Iterator[Reason]:
        """Yield notes: that the job's own reservation ends before it, and on others that leave too few nodes for it."""
        slurm, now = self.spec.cluster.slurm, self.site.now
        lasts = slurm.time or partition.default_seconds or partition.max_seconds or float("inf")
        known = self.site.reservations or ()
        for one in (one for one in known if one.name in self._reservations and not one.is_flexible):
            if one.end < max(now, one.start) + lasts:
                until = time.strftime(_WHEN, time.localtime(one.end))
                yield Reason("slurm.note-reservation-ends", {"reservation": one.name, "until": until})
            count = sum(node.name in one.nodes for node in fitting)
            if one.nodes and count < self.spec.cluster.nodes:
                yield Reason("slurm.note-reservation-small", {"reservation": one.name, "count": count})
        others = [one for one in known if one.name not in self._reservations]
        in_the_way = [one for one in others if one.start < now + lasts and one.end > now]
        taken = {name for one in in_the_way for name in one.nodes}
        if sum(node.is_usable and node.name not in taken for node in fitting) >= self.spec.cluster.nodes:
            return
        for one in sorted(in_the_way, key=lambda one: one.start):
            hit = sorted(one.nodes & {node.name for node in fitting})
            if not hit:
                continue
            began, until = (time.strftime(_WHEN, time.localtime(moment)) for moment in (one.start, one.end))
            params = {
                "what": "maintenance" if one.is_maintenance else "reservation",
                "name": one.name,
                "count": len(hit),
                "partition": partition.name,
                "began": began,
                "until": until,
                "before": _duration(one.start - now),
            }
            soon = one.start - now <= 600
            yield Reason("slurm.note-reserved" if soon else "slurm.note-reserved-later", params)


def _limit_params(limit: Limit) -> dict[str, object]:
    return {"owner": limit.owner, "allowed": limit.allowed, "resource": limit.in_words, "kind": limit.kind}


def _duration(seconds: float) -> str:
    if seconds >= UNLIMITED_SECONDS:
        return "UNLIMITED"
    minutes = int(seconds // 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{days}d"] * bool(days) + [f"{hours}h"] * bool(hours) + [f"{minutes}m"] * bool(minutes)
    return "".join(parts) or f"{seconds:g}s"
