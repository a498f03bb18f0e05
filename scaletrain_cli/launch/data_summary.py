"""Summarize the data of a run for `scaletrain plan`: tokens and epochs of each source, and files it could not use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import InfeasibleError, Problem, sentences
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.plan.data_size import data_size
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED_SOURCES
from scaletrain_cli.spec.evaluation import LossTask

if TYPE_CHECKING:
    from scaletrain_cli.data.estimate import SourceSize

# Repeated text is almost as good as new up to this number of epochs (Muennighoff et al., arXiv 2305.16264).
MOST_EPOCHS = 4.0
# Problems of files that are not on this machine now; a plan is often made before the data are there.
_ABSENT = (
    "checks.no-source",
    "checks.weights-missing",
    "checks.adapter-missing",
    "checks.tokenizer-missing",
    "checks.template-missing",
    "checks.no-folder",
    "checks.no-program",
    "document_steps.files-missing",
    "images.nothing-there",
    "remote.no-credentials",
    "remote.profile-without-keys",
    "remote.unavailable",
)


@dataclass(frozen=True)
class PlannedSource:
    """A source of text in a run. ``size``: None if it is not known here; ``share``: of the samples of the run.

    ``samples``, ``epochs``: over the whole run with all stages; None if unknown. ``advice``: None if there is none.
    """

    name: str
    size: SourceSize | None
    sequences: int | None
    share: float | None
    samples: int | None
    epochs: float | None
    advice: Reason | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with those of the size beside them."""
        size = self.size
        return {
            "name": self.name,
            "exact": None if size is None else size.exact,
            "files": None if size is None else size.files,
            "stored_bytes": None if size is None else size.stored_bytes,
            "tokens": None if size is None else size.tokens,
            "sequences": self.sequences,
            "share": self.share,
            "samples": self.samples,
            "epochs": self.epochs,
            "advice": None if self.advice is None else self.advice.to_json(),
        }


@dataclass(frozen=True)
class DataSummary:
    """``absent``: problems of files that this machine does not have now; ``wrong``: of files that it has.

    ``preparation_seconds``: with all CPU cores of this machine; None if unknown.
    """

    sources: tuple[PlannedSource, ...]
    preparation_seconds: float | None
    absent: tuple[Problem, ...]
    wrong: tuple[Problem, ...]
    notes: tuple[Reason, ...]
    infeasible: Reason | None = None  # why the run cannot have the epochs of its sources, if their sizes are exact

    def to_json(self) -> dict[str, Any]:
        """Return the summary as the key ``data`` of a plan."""
        return {
            "sources": [source.to_json() for source in self.sources],
            "preparation_seconds": self.preparation_seconds,
            "missing": [problem.to_json() for problem in self.absent],
            "unusable": [problem.to_json() for problem in self.wrong],
            "not_checked": [sentences(note) for note in self.notes],
            "not_checked_reasons": [note.to_document() for note in self.notes],
        }


def names_files(spec: RunSpec) -> bool:
    """Return True if the built-in engine would read files of this machine or of a store: there is something to see."""
    if spec.code.own_program:
        return False
    paths: list[str | None] = [path for _, path in spec.data_paths()]
    adapter = getattr(spec.model, "adapter", None)
    paths += [spec.data.tokenizer.path, spec.data.chat_template, getattr(spec.model, "weights", None)]
    paths += [None if adapter is None else adapter.weights]
    paths += [task.source for task in spec.evaluation.tasks if isinstance(task, LossTask)]
    steps = any(step.step in ("contamination", "quality") for step in spec.data.prepare)
    return steps or any(path is not None and path not in EMBEDDED_SOURCES and not is_reference(path) for path in paths)


def summarize_data(spec: RunSpec) -> DataSummary | None:
    """Return the summary; None if the run reads no files. Sends no request to the hub, and never raises."""
    if not names_files(spec):
        return None
    from scaletrain_cli.launch.dataset_checks import size_problems
    from scaletrain_cli.launch.resource_checks.checks import check_files
    from scaletrain_cli.launch.resource_checks.sources import reads_text

    checked = check_files(spec)
    absent = tuple(problem for problem in checked.problems if _is_absent(problem))
    wrong = tuple(problem for problem in checked.problems if not _is_absent(problem))
    sources: tuple[PlannedSource, ...] = ()
    seconds: float | None = None
    infeasible: Reason | None = None
    if reads_text(spec):
        from scaletrain_cli.data.estimate import seconds_to_prepare, source_sizes

        sizes = source_sizes(spec.data, runs_root(), Path.cwd(), checked.files)
        sources = planned_sources(spec, sizes)
        exact = {name: size.sequences(spec.transformer.seq_len) for name, size in sizes.items() if size.exact}
        wrong = (*wrong, *(problem for problem in size_problems(spec, exact) if problem not in wrong))
        if not wrong:
            infeasible = _infeasible(spec, exact)
        if len(sizes) == len(spec.data.all_sources):
            seconds = seconds_to_prepare(spec.data, sizes, len(os.sched_getaffinity(0)))
    return DataSummary(sources, seconds, absent, wrong, checked.warnings, infeasible)


def _infeasible(spec: RunSpec, sequences: Mapping[str, int]) -> Reason | None:
    """Return why the mixture cannot be had. ``sequences``: of the prepared sources."""
    from scaletrain_cli.data.stages import planned_stages

    if all(source.name in sequences for source in spec.data.all_sources if source.epochs is not None):
        try:
            planned_stages(spec.data, sequences, spec.total_steps, spec.training.global_batch_size)
        except InfeasibleError as error:
            return error.reason
    return None


def _is_absent(problem: Problem) -> bool:
    return problem.reason is not None and problem.reason.code in _ABSENT


def planned_sources(spec: RunSpec, sizes: Mapping[str, SourceSize]) -> tuple[PlannedSource, ...]:
    """Return the use of each source over the run. ``sizes``: of those that are known."""
    from scaletrain_cli.data.stages import samples_by_source

    steps, batch, length = spec.total_steps, spec.training.global_batch_size, spec.transformer.seq_len
    sequences = {name: size.sequences(length) for name, size in sizes.items()}
    total = steps * batch
    samples: dict[str, float] | None = None
    if all(sequences.get(source.name) for source in spec.data.all_sources if source.epochs is not None):
        try:
            samples = samples_by_source(spec.data, sequences, steps, batch)
        except InfeasibleError as error:
            advice = {source.name: error.reason for source in spec.data.all_sources if source.epochs is not None}
            return tuple(
                _planned(source.name, sizes, None, total, length, advice.get(source.name))
                for source in spec.data.all_sources
            )
    is_known = data_size(spec) is not None  # the checks of the recipe state the epochs of a prepared dataset
    uses = []
    for source in spec.data.all_sources:
        planned = _planned(source.name, sizes, None if samples is None else samples[source.name], total, length, None)
        uses.append(planned if is_known else _with_advice(planned))
    return tuple(uses)


def _planned(
    name: str, sizes: Mapping[str, SourceSize], samples: float | None, total: int, seq_len: int, advice: Reason | None
) -> PlannedSource:
    size = sizes.get(name)
    count = None if size is None else size.sequences(seq_len)
    epochs = samples / count if samples is not None and count else None
    share = None if samples is None else samples / total
    return PlannedSource(name, size, count, share, None if samples is None else round(samples), epochs, advice)


def _with_advice(source: PlannedSource) -> PlannedSource:
    """Return the source with advice if it is repeated often, or is not read to its end."""
    if source.samples == 0:
        return replace(source, advice=Reason("checks.source-unused"))
    if source.sequences == 0:
        return replace(source, advice=Reason("checks.source-too-small"))
    if source.epochs is None:
        return source
    if source.epochs > MOST_EPOCHS:
        return replace(source, advice=Reason("checks.source-repeated", {"most": MOST_EPOCHS}))
    if source.epochs < 1:
        return replace(source, advice=Reason("checks.source-part-used"))
    return source
