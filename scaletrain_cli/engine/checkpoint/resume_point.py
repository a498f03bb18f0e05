"""Find the checkpoint that an attempt resumes from; all ranks verify it together."""

import math
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from scaletrain_cli.engine.checkpoint.copy_transfer import needed_at, transfer_copies, transfers_to_resume
from scaletrain_cli.engine.checkpoint.shard_file import shard_name
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import ScaletrainError, UsageError, WrongNodesError
from scaletrain_cli.plan.reliability.durability import MEMORY_SHARE
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import (
    STATE_FILE,
    Checkpoint,
    Defect,
    checkpoint_path,
    committed_folders,
    find_defects,
    read_checkpoint,
)
from scaletrain_cli.rundir.documents import DamagedError
from scaletrain_cli.rundir.evaluations import PREFIX
from scaletrain_cli.rundir.journal import has_committed, read_events, read_metrics, steps_logged_since_begun
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.checkpoint_commit import set_aside_newer
from scaletrain_cli.worker.memory_copies import free_bytes, place_of, read_copies
from scaletrain_cli.worker.remote_run import VARIABLE

T = TypeVar("T")
_MOST_PROBLEMS_SHOWN = 5


class UnreadableCheckpointsError(ScaletrainError):
    """No node can read any checkpoint; the file system may come back (exit 1)."""

    failure_reason = "unreadable"


class OtherNodeUnfitError(ScaletrainError):
    """Another node cannot read what this one can, and reports so itself (exit 1)."""


@dataclass(frozen=True)
class ResumePoint:
    """The state that an attempt starts from.

    ``step``: steps trained. ``evaluated``: the validation loss after them is logged. ``validations``: those of the spec
    up to there, in order, each with its measures by name; one at the end of a run that was continued with more steps is
    left out. ``passed_over``: a line for each newer checkpoint that is not valid. ``in_memory``: the checkpoint is a
    copy in host memory, in the folder of this node; ``saved_step``: that of the latest valid one on disk, 0 without
    one. ``copies_key``: that of the copies which this attempt makes.
    """

    checkpoint: Checkpoint | None
    step: int
    evaluated: bool
    validations: list[dict[str, float]]
    lost_steps: int
    passed_over: list[str]
    problem: Reason | None = None
    in_memory: bool = False
    saved_step: int = 0
    copies_key: str = ""


class Search(NamedTuple):
    """The latest valid checkpoint, a line for each newer invalid one, and whether some could not be read."""

    checkpoint: Checkpoint | None
    passed_over: list[str]
    unreadable: bool

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_resume_point(context: RankContext, folder: Path, copies: Path | None = None) -> ResumePoint:
    """Verify the checkpoints in ``folder``, move corrupt ones aside, and return where to resume. Collective.

    A newer copy in host memory is used if the nodes have it whole together; ``copies``: the folder of this node's, None
    to use none. Only copies of the same revision of the run count, since it last started from scratch.
    Raises UsageError if there should be a checkpoint and none is valid, or if the latest one has more steps than
    the spec; UnreadableCheckpointsError if no node can read one, and WrongNodesError on a node that cannot read what
    others can.
    """
    run, spec, ranks, consensus = context.run, context.spec, context.ranks, context.long_consensus
    search = find_latest_valid(folder, ranks, consensus)
    copy, key, damaged = None, "", list[str]()
    if copies is not None:
        if ranks.rank == 0:
            starts = sum(event["event"] == "from-scratch" for event in read_events(run))
            key = f"revision {context.record.revision}, start {starts}"
        key = consensus.follow_rank_zero(key)
        copy, damaged = _find_copy(copies, key, search.step, ranks, consensus)
    begin = consensus.from_rank_zero(lambda: _resume_point(run, folder, context.attempt, spec, search, copy))
    begin = replace(
        begin, checkpoint=copy or begin.checkpoint, passed_over=[*damaged, *begin.passed_over], copies_key=key
    )
    if begin.problem:
        raise UnreadableCheckpointsError(begin.problem) if search.unreadable else UsageError(begin.problem)
    if begin.step > spec.total_steps:  # the launcher sees no checkpoints on a volume of the nodes
        raise UsageError(Reason("engine.beyond-last-step", {"step": begin.step, "steps": spec.total_steps}))
    return begin


def find_latest_valid(folder: Path, ranks: Ranks, consensus: RankConsensus, *, clean: bool = False) -> Search:
    """Return the latest checkpoint that verifies; each rank hashes a share of the files. Collective.

    ``clean``: consider only checkpoints that are marked clean. Raises UnreadableCheckpointsError and WrongNodesError.
    """
    passed_over: list[str] = []
    unreadable = False

    def newest_first() -> list[str]:
        try:
            return [path.name for path in reversed(committed_folders(folder))]
        except DamagedError as error:
            params = {"folder": str(folder), "error": str(error.__cause__)}
            raise UnreadableCheckpointsError(Reason("engine.checkpoint-folder-unreadable", params)) from error

    for name in consensus.from_rank_zero(newest_first, UnreadableCheckpointsError):
        manifest = _read_manifest(folder / name, ranks, consensus)
        if isinstance(manifest, Defect):
            passed_over.append(f"{name}/{manifest}")
            unreadable |= manifest.kind == "unreadable"
        elif manifest.clean or not clean:
            defects = _verify_together(manifest, ranks, consensus)
            if not defects:
                return Search(manifest, passed_over, unreadable)
            passed_over += [f"{name}/{file}: {defect}" for file, defect in defects.items()]
            unreadable |= any(defect.kind == "unreadable" for defect in defects.values())
    return Search(None, passed_over, unreadable)


def _find_copy(
    folder: Path, key: str, saved_step: int, ranks: Ranks, consensus: RankConsensus
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest copy in host memory after ``saved_step`` that can be used, and a line for each that cannot.

    A node receives what it does not have of it from one that does. The files of the copy are those that the ranks of
    this node need.
    """
    # By step and attempt: two attempts may have reached one step in different ways.
    usable: dict[tuple[int, int], dict[int, tuple[tuple[int, ...], int]]] = {}
    before = read_copies(folder, key)
    for step, copies in before.items():
        for rank, copy in copies.items():
            if step > saved_step and copy.world_size == ranks.world_size:
                usable.setdefault((step, copy.attempt), {})[rank] = (copy.needs, copy.size_bytes)
    everywhere = consensus.gather_everywhere((place_of(folder), usable))
    places = [place for place, _ in everywhere]
    here = [rank for rank, place in enumerate(places) if place == places[ranks.rank]]
    passed_over: list[str] = []
    for step, attempt in sorted({point for _, copies in everywhere for point in copies}, reverse=True):
        held = [copies.get((step, attempt), {}) for _, copies in everywhere]
        stated = {rank: about for of_rank in held for rank, about in of_rank.items()}
        if len(stated) < ranks.world_size:
            continue
        needs = {rank: others for rank, (others, _) in stated.items()}
        transfers = transfers_to_resume(places, held, needs)
        arriving = sum(stated[transfer.owner][1] for transfer in transfers if transfer.destination in here)
        needed, path = sorted(needed_at(here, needs)), checkpoint_path(folder, step)
        problems: dict[str, object] = {}
        if ranks.rank == here[0] and arriving and arriving > MEMORY_SHARE * free_bytes():
            problems[path.name] = f"{arriving} bytes of other nodes do not fit here"
        if _has_problems(problems, consensus, step, passed_over):
            continue
        own = (ranks.rank, *(set(needed) - set(here) if ranks.rank == here[0] else ()))
        # What arrives is verified while it is received, so that only the rest is read here, meanwhile.
        received = {transfer.owner for transfer in transfers if transfer.destination in here}
        early = [rank for rank in own if rank in held[ranks.rank] and rank not in received]
        with ThreadPoolExecutor(max_workers=1) as thread:
            defects = [thread.submit(find_defects, before[step][rank]) for rank in early]
            try:
                if transfers:
                    transfer_copies(path, transfers, ranks.rank, consensus)
            except OSError as error:
                problems[path.name] = error
            for future in defects:
                problems |= future.result()
        consensus.barrier()  # the files that the other ranks of this node receive are here
        whole = {rank: copy for rank, copy in read_copies(folder, key).get(step, {}).items() if copy.attempt == attempt}
        for rank in own:
            if rank not in whole:
                problems[shard_name(rank)] = "not received"
            elif rank not in received and rank not in early:  # this rank could not read its manifest before
                problems |= find_defects(whole[rank])
        if _has_problems(problems, consensus, step, passed_over):
            continue
        state = consensus.follow_rank_zero((path / STATE_FILE).read_bytes().decode() if ranks.rank == 0 else "")
        try:
            if ranks.rank == here[0] != 0:
                replace_file(path / STATE_FILE, state)
        except OSError as error:
            problems[STATE_FILE] = error
        if not _has_problems(problems, consensus, step, passed_over):
            files = {name: digest for rank in needed for name, digest in whole[rank].files.items()}
            return replace(whole[ranks.rank], files=files), passed_over
    return None, passed_over


def _has_problems(problems: Mapping[str, object], consensus: RankConsensus, step: int, passed_over: list[str]) -> bool:
    """Return whether a rank has problems with the copy of a step; add a line for each. Collective."""
    parts = consensus.gather_everywhere([f"{name}: {problem}" for name, problem in problems.items()])
    lines = [f"copy of step {step} in host memory, {line}" for part in parts for line in part]
    passed_over += lines
    return bool(lines)


def _read_manifest(path: Path, ranks: Ranks, consensus: RankConsensus) -> Checkpoint | Defect:
    manifest = consensus.from_rank_zero(lambda: read_checkpoint(path))
    if isinstance(manifest, Checkpoint):
        return replace(manifest, path=path)
    if manifest.kind == "unreadable":
        results = _on_each_node(lambda: read_checkpoint(path), ranks, consensus)
        failing = {node: str(answer) for node, answer in results if _is_unreadable(answer)}
        _raise_for_nodes(path, failing, len(results))
        (_, manifest), *_ = results
    return manifest


def _verify_together(checkpoint: Checkpoint, ranks: Ranks, consensus: RankConsensus) -> dict[str, Defect]:
    """Return the defect of each invalid file. A file that a rank could not read is read again on each node."""
    here = [rank for rank, has_folder in enumerate(consensus.gather_everywhere(_has_folder())) if has_folder]
    share: list[str] = []
    if ranks.rank in here:  # of mostly the file that this rank will read
        share = sorted(checkpoint.files)[here.index(ranks.rank) :: len(here)]
    parts = consensus.gather_everywhere(find_defects(checkpoint, share))
    defects = dict(sorted((name, defect) for part in parts for name, defect in part.items()))
    unreadable = [name for name, defect in defects.items() if _is_unreadable(defect)]
    if not unreadable or len(unreadable) < len(defects):  # corrupt, whichever nodes can read the other files
        return defects
    results = _on_each_node(lambda: find_defects(checkpoint, unreadable), ranks, consensus)
    for name in unreadable:
        failing = {node: str(of_node[name]) for node, of_node in results if _is_unreadable(of_node.get(name))}
        _raise_for_nodes(checkpoint.path / name, failing, len(results))
    (_, of_rank_zero), *_ = results
    return of_rank_zero


def _is_unreadable(answer: object) -> bool:
    return isinstance(answer, Defect) and answer.kind == "unreadable"


def _on_each_node(check: Callable[[], T], ranks: Ranks, consensus: RankConsensus) -> list[tuple[str, T]]:
    """Return what the first rank of each node that has the folder finds; the same on every rank. Collective."""
    reads = ranks.local_rank == 0 and _has_folder()
    parts = consensus.gather_everywhere((_own_node(), check()) if reads else None)
    return [part for part in parts if part is not None]


def _has_folder() -> bool:
    """Return whether this node has the folder of the checkpoints: in pods without a shared volume, only pod 0 does."""
    return not os.environ.get(VARIABLE)


def _own_node() -> str:
    """Return the number of this node in the job and its host name, which nodes on one machine share."""
    return f"node {os.environ.get('NODE_RANK', '0')} ({socket.gethostname()})"


def _raise_for_nodes(path: Path, failing: Mapping[str, str], nodes: int) -> None:
    """Raise on every rank if only some nodes cannot read the file: the nodes are at fault, not the file."""
    if not failing or len(failing) == nodes:
        return
    if (why := failing.get(_own_node())) is not None:
        params = {"path": str(path), "node": _own_node(), "problem": why}
        raise WrongNodesError(Reason("engine.checkpoint-unreadable-here", params))
    raise OtherNodeUnfitError(
        Reason("engine.checkpoint-unreadable-elsewhere", {"path": str(path), "nodes": sorted(failing)})
    )


def _resume_point(
    run: RunDir, folder: Path, attempt: int, spec: RunSpec, search: Search, copy: Checkpoint | None
) -> ResumePoint:
    checkpoint, passed_over = copy or search.checkpoint, search.passed_over
    step = checkpoint.step if checkpoint is not None else 0
    problem: Reason | None = None
    # Corrupt folders count too, because a kill or a lost file may have lost the event of the commit.
    from_scratch = any(event["event"] == "from-scratch" for event in read_events(run))
    if checkpoint is None and (has_committed(run) or (passed_over and not from_scratch)):
        problems = "; ".join(search.passed_over[:_MOST_PROBLEMS_SHOWN]) or "the committed checkpoints are missing"
        if len(search.passed_over) > _MOST_PROBLEMS_SHOWN:
            problems += f"; and {len(search.passed_over) - _MOST_PROBLEMS_SHOWN} more problems"
        code = "engine.checkpoints-unreadable" if search.unreadable else "engine.no-valid-checkpoint"
        problem = Reason(code, {"folder": str(folder), "problems": problems})
    else:
        set_aside_newer(folder, search.step, attempt)
    metrics = read_metrics(run)
    # The validation after a copy is repeated: what was to follow it, as the save of the best one, may be missing.
    lines = [line for line in metrics if line["step"] <= step - (copy is not None)]
    # Steps lost before an earlier attempt started to train were counted then, even if it logged no step of its own.
    shown = {line["step"] for line in metrics}
    logged = [number for number in steps_logged_since_begun(run) if number in shown]
    return ResumePoint(
        checkpoint=checkpoint,
        step=step,
        evaluated=bool(lines) and lines[-1]["step"] == step and "validation_loss" in lines[-1],
        validations=[
            {
                key: math.nan if value is None else value  # null was not finite, and counts as it did then
                for key, value in line.items()
                if key.startswith(PREFIX) and isinstance(value, int | float | None)
            }
            for line in lines
            if "validation_loss" in line and spec.evaluates_after(line["step"])
        ],
        lost_steps=max(0, max(logged, default=0) - step),
        passed_over=passed_over,
        problem=problem,
        in_memory=copy is not None,
        saved_step=search.step,
    )
