"""The course of a rehearsal on each rank: the items in order, then a short run that a preemption interrupts.

The first attempt does the items, and writes rehearsal.json before and after each; then it trains the first steps as a
run, sends itself SIGTERM, and exits with 75. The next attempt resumes the run, judges the preemption, and times steps.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.history import History
from scaletrain_cli.diagnosis.rehearsal import (
    LOG_PREFIX,
    VARIABLE,
    Item,
    Options,
    Rehearsal,
    read_rehearsal,
    write_rehearsal,
)
from scaletrain_cli.engine import faults
from scaletrain_cli.engine.rehearsal import data_items, step_items
from scaletrain_cli.engine.rehearsal.learning_rate import learning_rate
from scaletrain_cli.engine.rehearsal.overfit import overfit
from scaletrain_cli.engine.rehearsal.trials import Trials
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.own_processes import usable_cores
from scaletrain_cli.reasons import Reason

_TIMED_SHARE = 0.2  # of the budget, for the steps that are timed after the preemption
_FEWEST_TIMED, _MOST_TIMED = 8, 30
logger = logging.getLogger(__name__)
_OF_STEPS = ("gradients", "speed", "memory", "data-rate", "learning-rate", "overfit", "restore", "preemption")


def rehearse(trainer: Trainer, environment: Mapping[str, str]) -> ExitCode:
    """Rehearse a run with the parts of its training loop; return the exit code of the rank. Collective."""
    options = Options.from_text(environment.get(VARIABLE, ""))
    leads = trainer.context.rank == 0
    known = read_rehearsal(trainer.context.run) if leads else None
    preempted_at = trainer.context.consensus.follow_rank_zero(None if known is None else known.preempted_at)
    if preempted_at is not None:
        return _after_preemption(trainer, options, preempted_at, known)
    course = _Course(trainer, options)
    if not trainer.prepare_batches(0):
        return ExitCode.PREEMPTED
    with contextlib.closing(trainer.loader):
        course.items()
    gradients = course.found.item("gradients")
    has_failed = gradients is not None and gradients.verdict == "failed"
    if "preemption" in options.items and not has_failed:
        return course.preempted_run()
    if has_failed and "preemption" in options.items:
        course.add(Item("preemption", "skipped", Reason("rehearsal.not-after-failure", {"item": "gradients"})))
    _print(trainer, course.found)
    return ExitCode.DONE


def _after_preemption(trainer: Trainer, options: Options, preempted_at: int, known: Rehearsal | None) -> ExitCode:
    """Train the rest of the short run, judge the preemption on rank 0, and time the steps: they are those of a run."""
    steps = 0
    if known is not None and (seconds := known.measured.get("step", {}).get("step_seconds")):
        steps = min(_MOST_TIMED, int(_TIMED_SHARE * options.budget_seconds / seconds))
    steps = trainer.context.consensus.follow_rank_zero(steps if steps >= _FEWEST_TIMED else 0)
    trainer.most_steps = step_items.STEPS + steps
    code = trainer.fit()
    if code == ExitCode.DONE and known is not None:
        expected = {int(step): loss for step, loss in known.measured.get("losses", {}).items()}
        run, on_cpu = trainer.context.run, trainer.context.device.type == "cpu"
        item = step_items.preemption(run, expected, preempted_at, on_cpu=on_cpu)
        times = step_items.times_of_run(run, trainer.context.attempt, _FEWEST_TIMED)
        timed = known.measured.get("step", {}) | times
        rehearsal = replace(known.with_items([item]), running=None, measured={**known.measured, "step": timed})
        _write(trainer, rehearsal)
        _print(trainer, rehearsal)
    return code


def _write(trainer: Trainer, rehearsal: Rehearsal) -> None:
    if trainer.context.rank == 0:
        with contextlib.suppress(OSError):  # a full disk must not hide what was found: the log has it
            write_rehearsal(trainer.context.run, rehearsal)


def _print(trainer: Trainer, rehearsal: Rehearsal) -> None:
    """Write the document to the log of rank 0, for a submitter that cannot read the run directory."""
    if trainer.context.rank == 0:
        print(LOG_PREFIX + json.dumps(rehearsal.to_json()), flush=True)


@dataclass
class _Course:
    """The items of one attempt, and what is known so far; rank 0 stores it."""

    trainer: Trainer
    options: Options
    found: Rehearsal = field(init=False)

    def __post_init__(self) -> None:
        record = self.trainer.context.record
        case = Case(record.spec, record.plan, History((), {}, (), True, 0), ())
        self.trials = Trials(self.trainer, case, self.options.budget_seconds, record.plan.time.step)
        self.found = Rehearsal(self.trainer.context.run.run_id, time.time(), (), {})

    def items(self) -> None:
        """Do the items that train no run."""
        trials, wanted = self.trials, self.options.items
        for name, work in (
            ("labels", data_items.labels),
            ("duplicates", data_items.duplicates),
            ("first-loss", data_items.first_loss),
            ("causality", data_items.causality),
        ):
            if name in wanted:
                self._do(name, partial(work, trials))
        if any(name in wanted for name in _OF_STEPS):
            self._steps()
        if "learning-rate" in wanted:
            self._do("learning-rate", partial(learning_rate, trials))
        if "overfit" in wanted:
            self._do("overfit", partial(overfit, trials))

    def _steps(self) -> None:
        """Train the first steps, judge them, and rehearse a restore from where they end."""
        trials, wanted = self.trials, self.options.items
        self._now(running="gradients")
        began = time.perf_counter()
        steps = step_items.train(trials)
        seconds = time.perf_counter() - began
        judged: list[tuple[str, Callable[[], Item]]] = [
            ("gradients", partial(step_items.gradients, trials, steps)),
            ("speed", partial(step_items.speed, trials, steps)),
            ("memory", partial(step_items.memory, trials, steps)),
            ("data-rate", partial(step_items.data_rate, trials, steps)),
            ("restore", partial(step_items.restore, trials, len(steps.measures))),
        ]
        for name, work in judged:
            if name in wanted:
                self._do(name, work, seconds if name == "gradients" else 0.0)
        trials.restore()
        losses = {measure.step: measure.values["loss"] for measure in steps.measures}
        measured = _measured(self.trainer, self.found) | {"losses": {str(step): loss for step, loss in losses.items()}}
        self._now(measured=measured)

    def _now(self, **known: Any) -> None:
        """Change what is known, and store it."""
        self.found = replace(self.found, **known)
        _write(self.trainer, self.found)

    def _do(self, name: str, work: Callable[[], Item], seconds: float = 0.0) -> None:
        self._now(running=name)
        item, own = self.trials.timed(work)
        self.add(replace(item, seconds=own + seconds))

    def add(self, item: Item) -> None:
        self.found = self.found.with_items([item])
        self._now(running=None)
        logger.info("%s %s: %s", item.name, item.verdict, item.reason)

    def preempted_run(self) -> ExitCode:
        """Train the first steps as a run that the last rank sends SIGTERM to; return 75 once the state is saved."""
        trainer, context = self.trainer, self.trainer.context
        at = min(step_items.PREEMPTED_AT, context.spec.total_steps)
        injected = f"sigterm rank={context.ranks.world_size - 1} step={at} attempt={context.attempt}"
        given = os.environ.get(faults.VARIABLE, "")
        text = f"{given}; {injected}" if given else injected
        trainer.faults = faults.Faults(text, context.rank, context.attempt, trainer.checkpointer.folder)
        trainer.most_steps = step_items.STEPS
        self._now(running="preemption", preempted_at=at)
        return trainer.fit()


def _measured(trainer: Trainer, rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what was measured, and what it holds for (docs/rehearsal.md)."""
    record, device = trainer.context.record, trainer.context.device
    spec, plan = record.spec, record.plan
    figures = {name: dict(item.figures) for name in _OF_STEPS if (item := rehearsal.item(name)) is not None}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "step": figures.get("speed", {}),
        "memory": figures.get("memory", {}),
        "data": figures.get("data-rate", {}),
        "checkpoint": figures.get("restore", {}),
        "model": {
            "family": getattr(spec.model, "family", ""),
            "parameters": plan.model.parameters,
            "sequence_length": spec.language_model.seq_len if trainer.composed.model.language is not None else None,
            "objective": spec.training.objective,
            "precision": spec.training.precision,
            "optimizer": spec.training.optimizer.name,
        },
        "layout": asdict(plan.layout),
        "cluster": {
            "scheduler": spec.cluster.scheduler,
            "nodes": spec.cluster.nodes,
            "gpus_per_node": spec.cluster.gpus_per_node,
            "gpu": spec.cluster.gpu_name,
            "device": name,
            "cores": usable_cores(),
        },
        "versions": {**record.versions, "cuda": torch.version.cuda},
    }
