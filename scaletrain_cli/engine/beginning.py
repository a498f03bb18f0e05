"""Where an attempt begins: at step 0, or at the newest sound checkpoint. Reads the run directory; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.checkpoints import Checkpoint, newest_that_verifies, remove_staging, set_aside_newer
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

    def checked(self) -> Beginning:
        """Itself. Raises UsageError when there should be a checkpoint and none is sound."""
        if self.problem:
            raise UsageError(self.problem)
        return self


def find_beginning(run: RunDir, folder: Path) -> Beginning:
    """For one rank: verify what is in ``folder`` and clear away what earlier attempts left unfinished or damaged."""
    remove_staging(folder)
    checkpoint, passed_over = newest_that_verifies(folder)
    step = checkpoint.step if checkpoint is not None else 0
    problem = ""
    # Damaged folders count too: a kill, or a lost file, may have cost the event that tells of them.
    told_to_start_over = any(event["event"] == "from-scratch" for event in read_events(run))
    if checkpoint is None and (has_committed(run) or (passed_over and not told_to_start_over)):
        damage = "; ".join(passed_over[:5]) or "those that were committed are gone"
        problem = f"no sound checkpoint: {damage}. `scaletrain resume --from-scratch` starts over."
    else:
        set_aside_newer(folder, step)
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
