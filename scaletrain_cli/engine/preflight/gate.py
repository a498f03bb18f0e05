"""Before step 1: measure, compare, write attempts/NNNN/preflight.json, and keep the job off a node that is bad."""

from __future__ import annotations

import dataclasses
import os
import socket

import torch

from scaletrain_cli.engine.preflight.judging import Expected, Finding, RankMeasures, judge
from scaletrain_cli.engine.preflight.measuring import REDUCED_BYTES, all_reduce_seconds, measure
from scaletrain_cli.engine.process_group import Agreement, Ranks
from scaletrain_cli.engine.telling import say
from scaletrain_cli.errors import WrongNodesError
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.catalogue.networks import cluster_link
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord

SCHEMA = "scaletrain.preflight/v1"
ONLY = "SCALETRAIN_ONLY"  # what `scaletrain preflight` sets: nothing is trained


def is_wanted(record: RunRecord) -> bool:
    """By default on GPUs alone: the ranks of a CPU run share their cores, and say nothing of each other."""
    wanted = record.spec.guard.preflight
    return wanted == "always" or (wanted == "auto" and record.spec.cluster.gpu != "cpu")


def check_together(
    run: RunDir, record: RunRecord, ranks: Ranks, attempt: int, agreement: Agreement, device: torch.device
) -> None:
    """Collective. Raises WrongNodesError on the ranks that the findings are about; the others learn of it by them."""
    cluster = record.spec.cluster
    free = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    # First of all: NCCL makes a group's communicator at its first operation, for which it needs every rank of it.
    reduced = all_reduce_seconds(device)
    own = measure(ranks, cluster.gpus_per_node, device, agreement, _node_name(), free)
    gathered = agreement.gather(own)
    findings: list[Finding] = []
    if gathered is not None:
        link = cluster_link(cluster, find_accelerator(cluster))
        planned = link.reduce(REDUCED_BYTES[device.type], ranks.world_size) if device.type == "cuda" else 0.0
        found = judge(gathered, Expected(record.plan.memory.peak, planned, reduced))
        findings = found if _may_be_moved(run, record) else [_as_a_word(finding) for finding in found]
        _write(run, attempt, gathered, findings, reduced, planned)
        for finding in findings:
            say("preflight", **dataclasses.asdict(finding))
    findings = agreement.follow_rank_zero(findings)
    bad = [finding for finding in findings if finding.keeps_off]
    mine = [finding.message for finding in bad if finding.rank == ranks.rank]
    if mine:
        raise WrongNodesError(f"rank {ranks.rank}: {'; '.join(mine)} (guard.preflight: never leaves this out)")
    if bad:
        agreement.barrier()  # until the agents end this attempt: they have been told by those who raised


def _may_be_moved(run: RunDir, record: RunRecord) -> bool:
    """Whether another attempt could have better nodes: once the run has been moved in vain, slow is what there is."""
    ended = (event for event in read_events(run) if event["event"] == "attempt-ended")
    return record.spec.cluster.scheduler != "local" and not any(event["reason"] == "wrong-nodes" for event in ended)


def _as_a_word(finding: Finding) -> Finding:
    """What only costs speed no longer keeps the job off."""
    return dataclasses.replace(finding, keeps_off=finding.keeps_off and not finding.costs_speed)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("SCALETRAIN_NODE_NAME") or socket.gethostname()


def _write(
    run: RunDir,
    attempt: int,
    measures: list[RankMeasures],
    findings: list[Finding],
    reduced: float,
    planned: float,
) -> None:
    write_document(
        run.attempt(attempt) / "preflight.json",
        {
            "schema": SCHEMA,
            "all_reduce_seconds": reduced,
            "all_reduce_planned_seconds": planned,
            "ranks": [dataclasses.asdict(one) for one in measures],
            "findings": [dataclasses.asdict(finding) for finding in findings],
        },
    )
