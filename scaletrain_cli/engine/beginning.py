"""Where an attempt begins: at step 0, or at the newest sound checkpoint, which all ranks verify together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.engine.process_group import Agreement, Ranks
from scaletrain_cli.errors import UsageError, WrongNodesError
from scaletrain_cli.rundir.checkpoints import Checkpoint, committed_folders, read_checkpoint, verify
from scaletrain_cli.rundir.committing import set_aside_newer
from scaletrain_cli.rundir.journal import has_committed, read_events, read_metrics
from scaletrain_cli.rundir.paths import RunDir


@dataclass(frozen=True)
class Beginning:
    """``step`` steps are done, ``evaluated`` if their validation loss is logged; with those logged so far."""

    checkpoint: Checkpoint | None
    step: int
    evaluated: bool
    validation_losses: list[float]
    lost_steps: int
    passed_over: list[str]
    problem: str = ""


def find_beginning(run: RunDir, folder: Path, attempt: int, ranks: Ranks, agreement: Agreement) -> Beginning:
    """The same on every rank: verify what is in ``folder``, set aside what is damaged. Collective.

    Raises UsageError when there should be a checkpoint and none is sound.
    """
    checkpoint, passed_over = newest_sound(folder, ranks, agreement)
    found = _beginning(run, folder, attempt, checkpoint, passed_over) if ranks.rank == 0 else None
    begin = agreement.follow_rank_zero(found)
    assert begin is not None
    if begin.problem:
        raise UsageError(begin.problem)
    return begin


def newest_sound(
    folder: Path, ranks: Ranks, agreement: Agreement, *, clean: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and what was wrong with each newer one. Each rank hashes its share of files.

    ``clean``: only of those that are marked so.
    """
    passed_over: list[str] = []
    for name in agreement.follow_rank_zero([path.name for path in reversed(committed_folders(folder))]):
        found = agreement.follow_rank_zero(read_checkpoint(folder / name) if ranks.rank == 0 else "")
        if isinstance(found, str):
            passed_over.append(f"{name}/{found}")
        elif found.clean or not clean:
            problems = _verify_together(found, ranks, agreement)
            if not problems:
                return found, passed_over
            passed_over += [f"{name}/{problem}" for problem in problems]
    return None, passed_over


def _verify_together(checkpoint: Checkpoint, ranks: Ranks, agreement: Agreement) -> list[str]:
    share = sorted(checkpoint.files)[ranks.rank :: ranks.world_size]  # mostly the file that this rank will read
    try:
        found = verify(checkpoint, share, unreadable_is_damaged=False)
    except OSError as error:
        raise WrongNodesError(f"{checkpoint.path} cannot be read on this node: {error}") from error
    parts = agreement.gather(found)
    return agreement.follow_rank_zero([] if parts is None else [problem for part in parts for problem in part])


def _beginning(
    run: RunDir, folder: Path, attempt: int, checkpoint: Checkpoint | None, passed_over: list[str]
) -> Beginning:
    step = checkpoint.step if checkpoint is not None else 0
    problem = ""
    # Damaged folders count too: a kill, or a lost file, may have cost the event that tells of them.
    told_to_start_over = any(event["event"] == "from-scratch" for event in read_events(run))
    if checkpoint is None and (has_committed(run) or (passed_over and not told_to_start_over)):
        damage = "; ".join(passed_over[:5]) or "those that were committed are gone"
        problem = f"no sound checkpoint: {damage}. `scaletrain resume --from-scratch` starts over."
    else:
        set_aside_newer(folder, step, attempt)
    metrics = read_metrics(run)
    lines = [line for line in metrics if line["step"] <= step]
    # What was lost before an attempt came to train was counted then, whether or not it logged a step of its own.
    begins = ("started", "resumed", "rolled-back")
    begun = max((event["time"] for event in read_events(run) if event["event"] in begins), default=0.0)
    logged = [line["step"] for line in metrics if line.get("time", begun) >= begun]
    return Beginning(
        checkpoint=checkpoint,
        step=step,
        evaluated=bool(lines) and lines[-1]["step"] == step and "validation_loss" in lines[-1],
        validation_losses=[line["validation_loss"] for line in lines if "validation_loss" in line],
        lost_steps=max(0, max(logged, default=0) - step),
        passed_over=passed_over,
        problem=problem,
    )
