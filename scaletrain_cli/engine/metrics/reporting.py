"""The reports of rank 0 while it trains: events, and the metrics of each step; in files, in its log and to trackers."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from scaletrain_cli.engine.metrics.memory_measurement import peak_memory_bytes
from scaletrain_cli.event_texts import event_sentence
from scaletrain_cli.plan.vision.llava import language_share
from scaletrain_cli.rundir.documents import json_value
from scaletrain_cli.rundir.evaluations import ended_evaluations, measures_in, write_validation
from scaletrain_cli.rundir.journal import append_lines, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import LlavaSpec
from scaletrain_cli.text import measures_text
from scaletrain_cli.tracking.guard import Trackers
from scaletrain_cli.tracking.jsonl import JsonlWriter
from scaletrain_cli.worker.progress import progress_line, rate_name
from scaletrain_cli.worker.trackers import log_evaluations, start_trackers

_SECONDS_BETWEEN_EVALUATIONS = 30.0
logger = logging.getLogger(__name__)


def report_event(run: RunDir, rank: int, name: str, /, **details: Any) -> None:
    """Record an event in events.jsonl and log it, on rank 0; do nothing on other ranks."""
    if rank == 0:
        details = json_value(details)
        record_event(run, name, **details)
        log_event(name, **details)


def log_event(name: str, /, **details: Any) -> None:
    logger.info("%s: %s", name, event_sentence({"event": name, **details}))


class MetricsLog:
    """Writes metrics on rank 0; on other ranks every method does nothing."""

    def __init__(self, run: RunDir, record: RunRecord, rank: int, attempt: int, device: torch.device) -> None:
        self._run, self._record, self._attempt, self._device = run, record, attempt, device
        self._active = rank == 0
        self._writer = JsonlWriter(run.metrics, append_lines)
        # First the evaluations: one that ends meanwhile may be passed on twice, and is never left out.
        self._evaluated = {one.run_id for one in ended_evaluations(run)} if self._active else set()
        self._looked = time.monotonic()
        self._trackers = start_trackers(run, record, attempt) if self._active else Trackers()
        self._latest: dict[str, float] = {}
        self.finished = False  # set by the loop after the last step
        # MFU is model FLOPs per second over peak FLOPs per second; the plan has it for its own speed.
        plan = record.plan.time
        known = record.spec.cluster.gpu != "cpu" and plan.tokens_per_second > 0
        self._mfu_per_unit_per_second = plan.mfu / plan.tokens_per_second if known else None
        self._language_share = language_share(record.spec) if isinstance(record.spec.model, LlavaSpec) else 0.0

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._writer.close()
        except OSError:
            if error is None:
                raise
        if self._active:
            self._pass_on_evaluations()
        self._trackers.finish("failed" if error is not None else "finished" if self.finished else "preempted")

    def log(
        self, step: int, *, units: int, step_seconds: float, tokens: float | None = None, **measured: float
    ) -> None:
        """Record optimizer step ``step`` (1-based), which trained on ``units`` of ``RunSpec.unit`` on all ranks.

        ``tokens``: of its sequences, padding included; None: not counted, or the units are all tokens of the step. The
        MFU of sequences with images counts these tokens, and an image for each sequence.
        """
        if not self._active:
            return
        per_second = units / step_seconds
        factor, unit = self._mfu_per_unit_per_second, self._record.spec.unit
        line: dict[str, Any] = {"step": step, **measured, rate_name(unit): round(per_second, 1)}
        if tokens is not None and unit != "tokens":
            line["tokens_per_second"] = round(tokens / step_seconds, 1)
        if factor is not None and tokens is not None and self._language_share:
            planned = units * self._record.spec.language_model.seq_len
            factor *= 1.0 - self._language_share * (1.0 - tokens / planned)
        line |= {
            "step_seconds": round(step_seconds, 5),
            "memory_bytes": peak_memory_bytes(self._device),
            "mfu": None if factor is None else round(factor * per_second, 4),
            "attempt": self._attempt,
            "time": round(time.time(), 3),
        }
        self._append(line)
        shared = ("noise_scale", "mfu", rate_name(unit), "tokens_per_second")
        self._latest = {name: line[name] for name in shared if line.get(name) is not None}
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_EVALUATIONS:
            self._pass_on_evaluations()
        total = self._record.spec.total_steps
        parts = [f"step {line['step']}/{total}", f"loss {line['loss']:.4f}"]
        skipped = "skipped, the gradient overflowed"
        parts += [f"grad norm {line['grad_norm']:.3f}" if "grad_norm" in line else skipped]
        parts += [f"lr {line['learning_rate']:.2e}"]
        parts += [f"{line[rate_name(unit)]:,.0f} {unit}/s", f"{line['step_seconds']:.2f} s/step"]
        parts.append(f"{line['memory_bytes'] / 1e9:.2f} GB")
        if line["mfu"] is not None:
            parts.append(f"MFU {100 * line['mfu']:.1f} %")
        logger.info("  ".join(parts))
        print(progress_line(step, total, measured["loss"], line[rate_name(unit)], unit), flush=True)

    def take_latest(self) -> dict[str, float]:
        """Return rates and noise scale of the latest step that was recorded, as in its line; once."""
        latest, self._latest = self._latest, {}
        return latest

    def flush(self) -> None:
        """Wait until every line is in the file. Raises OSError."""
        self._writer.flush()

    def log_validation(
        self, step: int, samples: int, details: Mapping[str, Any] | None = None, /, **measures: float
    ) -> None:
        """Record losses and other measures after ``step`` steps, over ``samples`` samples, as a line of its own.

        ``details``: figures for the file of the validation, see ``rundir.evaluations``.
        """
        if not self._active:
            return
        unit = self._record.spec.unit
        counted = {f"validation_{'sequences' if unit == 'tokens' else unit}": samples}
        self._append({"step": step, **measures, **counted, "attempt": self._attempt, "time": round(time.time(), 3)})
        others = measures_in(measures)
        if details:
            write_validation(self._run, step, others, details)
        parts = [f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in measures.items() if name.endswith("loss")]
        parts += [measures_text(others)] if measures_text(others) else []
        logger.info("step %d/%d  %s", step, self._record.spec.total_steps, "  ".join(parts))

    def _pass_on_evaluations(self) -> None:
        """Pass metrics that evaluation jobs have appended to metrics.jsonl on to the trackers."""
        self._looked = time.monotonic()
        evaluations = ended_evaluations(self._run) if self._record.spec.evaluation.tasks else []
        if new := [one.step for one in evaluations if one.run_id not in self._evaluated]:
            log_evaluations(self._run, self._trackers, min(new))
        self._evaluated = {one.run_id for one in evaluations}

    def _append(self, line: dict[str, Any]) -> None:
        line = json_value(line)  # JSON has no NaN, such as the loss of a validation that overflows in fp16
        self._writer.put(line)
        self._trackers.log(line)
