"""Usable and lost nodes, and the time limit of a job, as sinfo and squeue report them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, node_names
from scaletrain_cli.launch.backends.slurm.script import lead_seconds
from scaletrain_cli.launch.backends.slurm.tables import is_usable, limit_seconds, moment
from scaletrain_cli.launch.node_exclusion import Exclusion, exclusion
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import ClusterSpec, RunSpec

_EARLY_SECONDS = 60.0  # Slurm may send the signal of --signal up to a minute early


def exclusion_for(run: RunDir, spec: RunSpec) -> Exclusion:
    """Return the bad nodes that the next attempt excludes; none, with the reason, if Slurm does not answer."""
    bad = read_bad_nodes(run.path.parent, time.time())
    if not bad:
        return Exclusion()
    slurm = spec.cluster.slurm
    try:
        usable = usable_nodes(spec.cluster) - set(node_names(slurm.exclude or ""))
        pinned = set(node_names(slurm.nodelist or ""))
    except SchedulerError as error:
        return Exclusion(
            spared=tuple(sorted(node.node for node in bad)), reason=error.reason or recorded(error.message)
        )
    return exclusion(bad, usable=usable, needed=spec.cluster.nodes, pinned=pinned)


def record_exclusion(run: RunDir, excluded: Exclusion) -> None:
    """Record in the run's events which nodes the next attempt excludes, and which it cannot exclude."""
    record_event(run, "nodes-excluded", **excluded.to_event())


def last_exclusion(run: RunDir) -> tuple[str, ...]:
    """Return the nodes that the run's job excludes beyond those of the spec."""
    events = (event for event in reversed(read_events(run)) if event["event"] == "nodes-excluded")
    return tuple(next(events, {"nodes": ()})["nodes"])


def exclude_option(spec: RunSpec, excluded: Exclusion) -> str | None:
    """Return the nodes of the spec's ``exclude`` and of ``excluded`` as one hostlist; None for none."""
    return ",".join([*([spec.cluster.slurm.exclude] if spec.cluster.slurm.exclude else []), *excluded.nodes]) or None


def usable_nodes(cluster: ClusterSpec) -> set[str]:
    """Return the usable nodes of the job's partition, or of the default one, busy or not."""
    partition = cluster.slurm.partition
    chosen = [f"--partition={partition}"] if partition else []
    answer = call_slurm(["sinfo", "--noheader", "--Node", "--format=%N|%t|%P", *chosen])
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 2]
    return {name for name, state, of in rows if is_usable(state) and (partition or of.strip().endswith("*"))}


def down_nodes(names: tuple[str, ...]) -> frozenset[str]:
    """Return those of these nodes that Slurm reports as lost; none if it does not answer."""
    if not names:
        return frozenset()
    try:
        answer = call_slurm(["sinfo", "--noheader", "--Node", "--format=%N|%t", f"--nodes={','.join(names)}"])
    except SchedulerError:
        return frozenset()
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 1]
    return frozenset(name for name, state in rows if state.startswith("down") or state.rstrip().endswith("*"))


def time_is_up(job_id: str, cluster: ClusterSpec, environment: Mapping[str, str], now: float) -> bool:
    """Return whether the job ends because of its time limit. SLURM_JOB_END_TIME exists since Slurm 23.02."""
    stated = environment.get("SLURM_JOB_END_TIME", "")
    end = float(stated) if stated.isdigit() else _end_by_limit(job_id)
    return end is not None and now >= end - lead_seconds(cluster) - _EARLY_SECONDS


def _end_by_limit(job_id: str) -> float | None:
    """Return the Unix time of the limit. squeue's own end time is now for a job that is being cancelled."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%S|%l"]
    try:
        start, _, limit = call_slurm(command, accept=("Invalid job id",)).stdout.strip().partition("|")
    except SchedulerError:
        return None
    began, lasts = moment(start), limit_seconds(limit)  # None for N/A and UNLIMITED
    return began + lasts if began is not None and lasts is not None else None
