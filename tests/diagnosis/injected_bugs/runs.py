"""Train a tiny run with a bug injected into it, and diagnose it after each few steps. No tests here."""

import bisect
import contextlib
import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.diagnosis.case import Case, read_case
from scaletrain_cli.diagnosis.checks import diagnose
from scaletrain_cli.diagnosis.findings import Finding
from scaletrain_cli.diagnosis.history import History
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec.loading import parse_spec
from scaletrain_cli.telemetry.series import Series
from tests.diagnosis.injected_bugs.specs import SPECS, write_data
from tests.drills.campaign.forked_attempts import ForkedRun

INJECT = "SCALETRAIN_TEST_INJECT"
_EVERY = 10  # steps between two diagnoses


@dataclass(frozen=True)
class Trial:
    """A run: a base of ``SPECS`` and overrides, a fault of ``$SCALETRAIN_FAULT``, and what ``injection`` injects.

    ``attempts``: maximum number; a fault ends all but the last one.
    """

    base: str
    overrides: tuple[str, ...] = ()
    fault: str = ""
    injected: str = ""
    attempts: int = 1


@dataclass(frozen=True)
class Found:
    """A finding at the end of a run. ``code``: without the table's name; ``keys``: of the changes that it names.

    ``place``: of the first change. ``figures``: whether it has a number as evidence. ``since``: the step from which on
    it was among the first two; None if it is not.
    """

    code: str
    severity: str
    text: str
    keys: tuple[str, ...]
    place: str
    figures: bool
    since: int | None


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: its last step of all, the seconds of its attempts, and the findings in order.

    ``log``: the end of its log.
    """

    name: str
    steps: int
    total: int
    seconds: float
    found: tuple[Found, ...]
    log: str = ""


def outcomes_of(names: Sequence[str], table: str, folder: Path, *, workers: int = 2) -> Iterator[Outcome]:
    """Yield the outcomes of trials in their order. ``table``: ``module:NAME`` of the mapping that has them by name.

    ``folder``: for data and runs. ``workers``: runs at a time, each in a process that forks its ranks; 0: here.
    """
    if not folder.exists():
        folder.mkdir()
        write_data(folder)
    if not workers:
        yield from (outcome_of(table, folder, name) for name in names)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(partial(outcome_of, table, folder), names)


def outcome_of(table: str, folder: Path, name: str) -> Outcome:
    """Train the run of a trial in this process' forks, and return what is found in it."""
    module, _, attribute = table.partition(":")
    trial: Trial = getattr(importlib.import_module(module), attribute)[name].trial
    with contextlib.chdir(folder), patch.dict(os.environ, {"SCALETRAIN_RUNS": str(folder), INJECT: trial.injected}):
        return _trained(name, trial, folder)


def _trained(name: str, trial: Trial, folder: Path) -> Outcome:
    from tests.diagnosis.injected_bugs import injection

    spec = parse_spec(SPECS[trial.base], file="run.yaml", base_dir=folder, overrides=trial.overrides)
    if spec.training.objective in ("sft", "dpo"):
        prepare_data(spec)
    else:  # in this process, which costs no start of another
        prepare_run_datasets(spec, folder, {}, 1, lambda *_: None)
    forked = ForkedRun.create(spec, injection.be_rank)
    began = time.monotonic()
    for _ in range(trial.attempts):
        with injection.around(trial.injected) as strike:
            attempt = forked.attempt(strike, trial.fault)
        if attempt.exit_codes is not None:
            break
    seconds = time.monotonic() - began
    case = read_case(forked.run, read_record(forked.run))
    return Outcome(name, case.history.last_step, spec.total_steps, seconds, _found(case), forked.log()[-1500:])


def _found(case: Case) -> tuple[Found, ...]:
    since: dict[str, int] = {}
    for step in range(_EVERY, case.history.last_step, _EVERY):
        codes = [finding.code for finding in diagnose("", _until(case, step)).findings[:2]]
        since = {code: since.get(code, step) for code in codes}
    found = diagnose("", case)
    assert not [str(reason) for reason in found.not_concluded if reason.code == "diagnosis.check-failed"]
    last = case.history.last_step
    at_end = [finding.code for finding in found.findings[:2]]
    return tuple(_of(each, since.get(each.code, last) if each.code in at_end else None) for each in found.findings)


def _of(finding: Finding, since: int | None) -> Found:
    changes = [cause.change for cause in finding.causes if cause.change is not None]
    keys, place = tuple(change.key for change in changes), changes[0].place if changes else ""
    figures = any(type(value) in (int, float) for value in finding.reason.params.values())
    return Found(
        finding.code.removeprefix("diagnosis."), finding.severity, str(finding.reason), keys, place, figures, since
    )


def _until(case: Case, step: int) -> Case:
    """Return what was known of a run after a step."""
    history = case.history
    count = sum(at <= step for at in history.steps)
    columns = {name: values[:count] for name, values in history.columns.items()}
    validations = [validation for validation in history.validations if validation.step <= step]
    times = columns.get("time") or [0.0]
    then = History(history.steps[:count], columns, validations, history.is_whole, history.size_bytes)
    events = [event for event in case.events if _time_of(event) <= times[-1]]
    seen = {
        name: {key: _rows_until(series, step) for key, series in getattr(case.telemetry, name).items()}
        for name in ("ranks", "gpus", "nodes", "layers")
    }
    return replace(case, history=then, events=events, telemetry=replace(case.telemetry, **seen))


def _rows_until(series: Series, step: int) -> Series:
    count = bisect.bisect_right(series.steps, step)
    columns = {
        name: {column: values[:count] for column, values in getattr(series, name).items()}
        for name in ("mean", "lowest", "highest")
    }
    return Series(series.subject, series.times[:count], series.steps[:count], series.counts[:count], **columns)


def _time_of(event: Any) -> float:
    found = event.get("time", 0.0)
    return float(found) if isinstance(found, int | float) else 0.0
