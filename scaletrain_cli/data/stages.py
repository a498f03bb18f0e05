"""The batches that a run skips, and the stages of its mixture of sources, as resumes change them.

Stages count samples by the numbers of batches, which skipped batches keep: stage ``start`` begins with the batch of
that number, whichever batches are skipped before it, so that no rollback moves a sample to another batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scaletrain_cli.errors import InfeasibleError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import DataSpec
from scaletrain_cli.spec.sources import SourceSpec

SkipRange = tuple[int, int]


def merged_skip_ranges(skip_ranges: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """Return the same batches as disjoint ranges in ascending order, with adjacent ranges merged."""
    ranges: list[SkipRange] = []
    for first, last in sorted(skip_ranges):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return tuple(ranges)


def batch_number(step: int, skip_ranges: Iterable[SkipRange]) -> int:
    """Return the ``step``-th batch (1-based) outside ``skip_ranges``, merged by ``merged_skip_ranges``."""
    number = step
    for first, last in skip_ranges:
        if first > number:
            break
        number += last - first + 1
    return number


def skipped_until(batch: int, skip_ranges: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """Return the part of skip ranges up to a batch, as disjoint ranges in ascending order."""
    return tuple((first, min(last, batch)) for first, last in merged_skip_ranges(skip_ranges) if first <= batch)


def keeps_batches(step: int, before: Iterable[SkipRange], after: Iterable[SkipRange]) -> bool:
    """Return True if the first ``step`` steps have the same batches with the ranges ``after`` as with ``before``."""
    given = tuple(before)  # which may be an iterator, and is used twice
    trained = batch_number(step, merged_skip_ranges(given)) if step else 0
    return skipped_until(trained, given) == skipped_until(trained, after)


MIXTURE_EVENT = "mixture"


class MixtureStage(NamedTuple):
    """Shares of the samples by the source's name, from sample ``first`` of the run on, counted from 0.

    Sources without a share are left out.
    """

    first: int
    shares: dict[str, float]


def shares_of(sources: Sequence[SourceSpec], sequences: Mapping[str, int], samples: int) -> dict[str, float]:
    """Return the share of each source in a run of ``samples``, by its name; the sum is 1.

    ``sequences``: training sequences of each source. A source with ``epochs`` has that many times its sequences, and
    the other sources have the rest by weight. If all sources have ``epochs``, their ratio alone counts. Raises
    InfeasibleError if epochs take all samples of the run, so that none are left for the weights.
    """
    if len(sources) == 1:
        return {sources[0].name: 1.0}
    by_epochs = {source.name: source.epochs * sequences[source.name] for source in sources if source.epochs is not None}
    weights = {source.name: source.weight for source in sources if source.weight}
    taken, total = sum(by_epochs.values()), sum(weights.values())
    if not weights:
        return _normalized(by_epochs)
    if taken >= samples:
        params = {"sources": ", ".join(by_epochs), "taken": round(taken), "samples": samples}
        raise InfeasibleError(Reason("data.epochs-exceed-run", params))
    rest = 1 - taken / samples
    shares = {name: count / samples for name, count in by_epochs.items()}
    return shares | {name: rest * weight / total for name, weight in weights.items()}


def planned_stages(
    data: DataSpec, sequences: Mapping[str, int], total_steps: int, global_batch_size: int
) -> list[MixtureStage]:
    """Return the stages that a spec asks for. Raises InfeasibleError as ``shares_of`` does."""
    stages = [MixtureStage(0, shares_of(data.all_sources, sequences, total_steps * global_batch_size))]
    for stage in data.stages:
        first = (stage.first_step(total_steps) - 1) * global_batch_size
        stages.append(MixtureStage(first, _normalized(stage.weights)))
    return _joined(stages)


def samples_by_source(
    data: DataSpec, sequences: Mapping[str, int], total_steps: int, global_batch_size: int
) -> dict[str, float]:
    """Return the samples that a run takes of each source. Raises InfeasibleError as ``shares_of`` does."""
    stages = planned_stages(data, sequences, total_steps, global_batch_size)
    ends = [*(stage.first for stage in stages[1:]), total_steps * global_batch_size]
    samples = dict.fromkeys((source.name for source in data.all_sources), 0.0)
    for stage, end in zip(stages, ends, strict=True):
        for name, share in stage.shares.items():
            samples[name] += share * (end - stage.first)
    return samples


def recorded_changes(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[MixtureStage]]]:
    """Return (first sample, planned stages) of each mixture that the events of a run record, in their order.

    A run that began again from scratch has those that were recorded since: it trains no sample of the time before.
    """
    changes: list[tuple[int, list[MixtureStage]]] = []
    for event in events:
        if event.get("event") == "from-scratch":
            changes = []
        elif event.get("event") == MIXTURE_EVENT:
            stages = [MixtureStage(int(stage["first_sample"]), dict(stage["shares"])) for stage in event["stages"]]
            changes.append((int(event["first_sample"]), stages))
    return changes


def sources_before(events: Iterable[Mapping[str, Any]], sample: int, first_source: str) -> set[str]:
    """Return the names of the sources that had a share before a sample of the run.

    ``first_source``: the one that the run had before the first event of a mixture.
    """
    changes = recorded_changes(events)
    if not changes or changes[0][0] > 0:
        changes.insert(0, (0, [MixtureStage(0, {first_source: 1.0})]))
    return {name for stage in recorded_stages(changes) if stage.first < sample for name in stage.shares}


def recorded_stages(changes: Iterable[tuple[int, list[MixtureStage]]]) -> list[MixtureStage]:
    """Return the stages of a run after all of its changes. A later change takes the place of what follows it."""
    stages: list[MixtureStage] = []
    for first, planned in changes:
        kept = [stage for stage in stages if stage.first < first]
        begun = [stage for stage in planned if stage.first <= first][-1]
        later = [stage for stage in planned if stage.first > first]
        stages = _joined([*kept, MixtureStage(first, begun.shares), *later])
    return stages


def stages_of_run(
    data: DataSpec,
    sequences: Mapping[str, int],
    total_steps: int,
    global_batch_size: int,
    events: Iterable[Mapping[str, Any]],
) -> list[MixtureStage]:
    """Return the stages of a run by its events; those that the spec asks for where no event records a mixture.

    Before the first event of a run there was one source. Raises InfeasibleError as ``shares_of`` does.
    """
    if not (changes := recorded_changes(events)):
        return planned_stages(data, sequences, total_steps, global_batch_size)
    if changes[0][0] > 0:
        changes.insert(0, (0, [MixtureStage(0, {next(iter(sequences)): 1.0})]))
    return recorded_stages(changes)


def _normalized(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight}


def _joined(stages: Iterable[MixtureStage]) -> list[MixtureStage]:
    """Return the stages without those that have the shares of the stage before."""
    changes: list[MixtureStage] = []
    for stage in stages:
        if not changes or changes[-1].shares != stage.shares:
            changes.append(stage)
    return changes
