"""Weights & Biases: one run over all attempts, resumed by its id; the x axis is the optimizer step."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from scaletrain_cli.tracking.base import Outcome, TrackedRun, Tracker, TrackerOptions


class WandbOptions(TrackerOptions):
    """Weights & Biases options. ``offline`` writes files that ``wandb sync`` uploads later; ``disabled``: off."""

    # As wandb checks them when a run starts, which then has no tracking.
    project: Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00/\\#?%:]+$")] = "scaletrain"
    entity: Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\s/]+$")] | None = None
    mode: Literal["online", "offline", "disabled"] = "online"

    @property
    def enabled(self) -> bool:
        return self.mode != "disabled"


class WandbTracker(Tracker[WandbOptions]):
    """Metrics are named ``train/<name>``, with ``train/step`` as their step; events count in ``events/<name>``."""

    options_model = WandbOptions

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = importlib.import_module("wandb")
        self._folder = run.folder
        self._run: Any = wandb.init(
            project=self.options.project,
            entity=self.options.entity,
            id=run.tracking_id,
            name=run.run_id,
            resume="allow",
            mode=self.options.mode,
            dir=str(run.folder),
            config=dict(run.config),
        )
        self._run.define_metric("train/*", step_metric="train/step")
        self._run.define_metric("events/*", step_metric="train/step")
        self._step = run.last_step
        return None

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._step = step
        self._run.log({"train/step": step, "train/time": seconds, **{f"train/{k}": v for k, v in values.items()}})

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        step = details.get("step")
        self._run.log({"train/step": self._step if step is None else step, f"events/{name}": 1})

    def artifact(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(self._folder), policy="now")

    def finish(self, outcome: Outcome) -> None:
        """Upload the rest; the run is marked as crashed if training failed."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
