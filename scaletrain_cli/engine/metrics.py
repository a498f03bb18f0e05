"""What each step measured: one line in metrics.jsonl, the truth; a line for people; a mirror in Weights & Biases."""

from __future__ import annotations

import importlib
import os
import resource
import time
from types import TracebackType
from typing import Any

import torch

from scaletrain_cli.rundir.journal import append_line
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


class MetricsLog:
    """Writes on rank 0 only; elsewhere every call does nothing."""

    def __init__(self, run: RunDir, record: RunRecord, rank: int, attempt: int) -> None:
        self._run, self._record, self._attempt = run, record, attempt
        self._active = rank == 0
        self._wandb = _open_wandb(run, record) if self._active else None
        # MFU is model FLOPs per second over peak FLOPs per second; the plan states it for its own speed.
        plan = record.plan.time
        known = record.spec.cluster.gpu != "cpu" and plan.tokens_per_second > 0
        self._mfu_per_token_per_second = plan.mfu / plan.tokens_per_second if known else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)

    def log(self, step: int, *, tokens: int, step_seconds: float, **measured: float) -> None:
        """Record optimizer step ``step`` (1-based), which trained on ``tokens`` tokens over all ranks."""
        if not self._active:
            return
        tokens_per_second = tokens / step_seconds
        factor = self._mfu_per_token_per_second
        line: dict[str, Any] = {
            "step": step,
            **measured,
            "tokens_per_second": round(tokens_per_second, 1),
            "step_seconds": round(step_seconds, 5),
            "memory_bytes": peak_memory_bytes(),
            "mfu": None if factor is None else round(factor * tokens_per_second, 4),
            "attempt": self._attempt,
            "time": round(time.time(), 3),
        }
        append_line(self._run.metrics, line)
        if self._wandb is not None:
            self._wandb.log({f"train/{name}": value for name, value in line.items() if value is not None})
        print(_for_people(line, self._record.spec.total_steps), flush=True)


def peak_memory_bytes() -> int:
    """Most bytes this process ever held: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _for_people(line: dict[str, Any], total_steps: int) -> str:
    parts = [f"step {line['step']:>6}/{total_steps}", f"loss {line['loss']:.4f}"]
    if "validation_loss" in line:
        parts.append(f"validation {line['validation_loss']:.4f}")
    parts += [f"grad norm {line['grad_norm']:.3f}", f"lr {line['learning_rate']:.2e}"]
    parts += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{line['step_seconds']:.2f} s/step"]
    parts.append(f"{line['memory_bytes'] / 1e9:.2f} GB")
    if line["mfu"] is not None:
        parts.append(f"MFU {100 * line['mfu']:.1f} %")
    return "  ".join(parts)


def _open_wandb(run: RunDir, record: RunRecord) -> Any:
    """One Weights & Biases run over all attempts. The step is a metric there, since a resumed run repeats steps."""
    settings = record.spec.tracking.wandb
    if settings.mode == "disabled":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    wandb = importlib.import_module("wandb")
    mirror = wandb.init(
        project=settings.project,
        id=record.wandb_run_id,
        name=record.run_id,
        resume="allow",
        mode=settings.mode,
        dir=str(run.path),
        config=record.spec.model_dump(mode="json", by_alias=True),
    )
    mirror.define_metric("train/*", step_metric="train/step")
    return mirror
