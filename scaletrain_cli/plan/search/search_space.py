"""All layouts that a search may try, in groups, and a reason for each excluded degree."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from scaletrain_cli.plan.axes import AXES, Axes, resolve_axes
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Rejection
from scaletrain_cli.plan.search.engine_support import axis_rules, capabilities, opened, searches_engine
from scaletrain_cli.plan.search.layouts import broken_rules, micro_batch_sizes, offload_modes, zero_stages
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

# Maximum number of degrees to try per axis. Powers of two have fewer divisors; other cluster sizes must not take
# minutes.
_MOST_DEGREES = 16


# More reasons than this with the same code are merged into one, to keep the list readable.
_MOST_PER_CODE = 6


class RejectionCounts:
    """Counts how many layouts each reason excludes, with an example; reasons in the order of first appearance."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[int, str]] = {}

    def add(self, reason: Reason, example: str | Callable[[], str], count: int = 1) -> None:
        """Add ``count`` layouts, or degrees, to a reason; it keeps its first example, which may be a function."""
        if count:
            key = reason.code, tuple(reason.params.items())
            earlier, first = self._found.get(key) or (0, example if isinstance(example, str) else example())
            self._found[key] = earlier + count, first

    def rejections(self) -> tuple[Rejection, ...]:
        """Return all reasons; many that differ only in numbers are merged into one, with N in place of the numbers."""
        families: dict[tuple[Any, ...], list[tuple[str, tuple[tuple[str, Any], ...]]]] = {}
        for code, params in self._found:
            words = tuple((name, None if _is_number(value) else value) for name, value in params)
            families.setdefault((code, words), []).append((code, params))
        rejections = []
        for reasons in families.values():
            merged = len(reasons) > _MOST_PER_CODE
            for group in [reasons] if merged else [[reason] for reason in reasons]:
                count = sum(self._found[reason][0] for reason in group)
                code, params = group[0]
                shown = {name: "N" if merged and _is_number(value) else value for name, value in params}
                rejections.append(Rejection(Reason(code, shown), count, self._found[group[0]][1]))
        return tuple(rejections)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class Group(NamedTuple):
    """Layouts that differ only in micro-batch, activation checkpointing and offload."""

    axes: Axes
    zero_stage: int
    offload: tuple[str, ...]
    micro_batches: tuple[int, ...]


def axes_to_try(
    spec: RunSpec, counts: RejectionCounts | None = None, worthwhile: Callable[[Axes], bool] | None = None
) -> list[Axes]:
    """Return all combinations of degrees that break no rule, simplest first; count the others in ``counts``.

    ``worthwhile``: leave out combinations that it refuses, uncounted. It must also refuse those whose data parallelism
    is divided into pipeline stages.
    """
    spec, counted, counts = opened(spec), counts is not None, counts or RejectionCounts()
    degrees = {axis: degrees_to_try(spec, axis, counts) for axis in AXES}
    by_engine = searches_engine(spec)  # which tries all combinations if it can run none
    early = None if counted or by_engine else worthwhile
    combinations = []
    for axes in _combinations(spec, degrees, counts, every=counted, worthwhile=early):
        if early is not None and not early(axes):
            continue
        if (rule := next(broken_rules(spec, axes), None)) is None:
            combinations.append(axes)
        elif counted:
            counts.add(rule.rejection, partial(_spelled, axes))
    combinations = _runnable(spec, combinations, counts) if by_engine else combinations
    if worthwhile is not None and early is None:
        combinations = list(filter(worthwhile, combinations))
    _count_zero_stages(spec, combinations, counts)
    return combinations


def least_of_axes(spec: RunSpec, at_least: Callable[[Axes], float], value: Callable[[Axes], float]) -> float:
    """Return the least ``value`` of the combinations that ``axes_to_try`` returns; infinite if there is none.

    ``at_least``: a lower bound on ``value`` that takes less time, and is no less for data parallelism divided into
    pipeline stages. Rules are checked only where it is below the least value so far.
    """
    if searches_engine(spec):
        return min(map(value, axes_to_try(spec)), default=math.inf)
    least, counts, allowing = math.inf, RejectionCounts(), opened(spec)
    degrees = {axis: degrees_to_try(allowing, axis, counts) for axis in AXES}

    def may_be_less(axes: Axes) -> bool:
        return at_least(axes) < least

    for axes in _combinations(allowing, degrees, counts, every=False, worthwhile=may_be_less):
        if may_be_less(axes) and not any(broken_rules(allowing, axes)):
            least = min(least, value(axes))
    return least


def _runnable(spec: RunSpec, all_axes: list[Axes], counts: RejectionCounts) -> list[Axes]:
    """Return the combinations that the engine can run; if there are none, all of them, to be planned with a warning."""
    broken = {axes: next(axis_rules(spec, axes), None) for axes in all_axes}
    runnable = [axes for axes, rule in broken.items() if rule is None]
    for axes, rule in broken.items() if runnable else ():
        if rule is not None:
            counts.add(rule.rejection, partial(_spelled, axes))
    return runnable or all_axes


def _count_zero_stages(spec: RunSpec, all_axes: list[Axes], counts: RejectionCounts) -> None:
    """Count the ZeRO stages that zero_stages() leaves out; none if the spec sets the stage."""
    framework = framework_of(spec)
    stages = capabilities(spec).zero_stages if spec.layout.zero_stage == "auto" else ()
    piped = [axes for axes in all_axes if axes.pipeline > 1]
    flat = [axes for axes in all_axes if axes.pipeline == 1]
    named = {"framework": framework.name, "precision": spec.training.precision}
    if piped:
        left_out = sum(stage > framework.highest_zero_stage(spec, True) for stage in stages)
        reason = Reason("plan.zero-with-pipeline", {"framework": framework.name})
        counts.add(reason, f"zero_stage 3, {_spelled(piped[0])}", len(piped) * left_out)
    if 0 in stages and all_axes and framework.lowest_zero_stage(spec, False) > 0:
        reason = Reason("plan.no-zero-0", named)
        counts.add(reason, f"zero_stage 0, {_spelled(all_axes[0])}", len(all_axes))
    if 3 in stages and flat and framework.highest_zero_stage(spec, False) < 3:
        reason = Reason("plan.no-zero-3", named)
        counts.add(reason, f"zero_stage 3, {_spelled(flat[0])}", len(flat))


def groups(spec: RunSpec, all_axes: Sequence[Axes]) -> Iterator[Group]:
    """Yield the groups of all layouts with these degrees."""
    allowed: dict[tuple[bool, bool], dict[int, tuple[str, ...]]] = {}  # offload modes by ZeRO stage and kind of degrees
    sizes: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for axes in all_axes:
        kind = (axes.pipeline > 1, axes.shards > 1)
        if kind not in allowed:
            pairs = [(stage, mode) for mode in offload_modes(spec, axes) for stage in zero_stages(spec, axes, mode)]
            stages = sorted({stage for stage, _ in pairs})
            allowed[kind] = {stage: tuple(mode for at, mode in pairs if at == stage) for stage in stages}
        cut = (axes.data, axes.pipeline, axes.virtual)
        if cut not in sizes:
            sizes[cut] = tuple(micro_batch_sizes(spec, axes))
        micro_batches = sizes[cut]
        for stage, modes in allowed[kind].items() if micro_batches else ():
            yield Group(axes, stage, modes, micro_batches)


def degrees_to_try(spec: RunSpec, axis: str, counts: RejectionCounts) -> list[int]:
    """Return the degrees of one axis to try: the one that the spec sets, or those that model and cluster allow.

    Smallest first. Counts the excluded degrees in ``counts``.
    """
    pinned = getattr(spec.layout, axis)
    if pinned != "auto":
        return [int(pinned)]
    if (possible := workload_of(spec.model).degrees(spec, axis)) is None:
        return [1]
    if axis not in capabilities(spec).axes:
        further = possible.dividing[1:]
        framework = framework_of(spec)
        reason = (
            Reason("plan.engine-lacks-axis", {"key": axis})
            if framework.is_engine
            else Reason("plan.framework-lacks-axis", {"key": axis, "framework": framework.name})
        )
        counts.add(reason, f"{axis} {max(possible.dividing[:2])}", len(further))
        return [1]
    for degree in possible.dividing:
        if degree > possible.largest:
            counts.add(possible.reason, f"{axis} {degree}")
    kept = [degree for degree in possible.dividing if degree <= possible.largest]
    counts.add(Reason("plan.more-degrees-than-tried", {"key": axis}), f"{axis} {kept[-1]}", len(kept[_MOST_DEGREES:]))
    return kept[:_MOST_DEGREES]


def _combinations(
    spec: RunSpec,
    degrees: dict[str, list[int]],
    counts: RejectionCounts,
    *,
    every: bool,
    worthwhile: Callable[[Axes], bool] | None = None,
) -> Iterator[Axes]:
    """Yield the combinations whose product is the number of ranks; virtual stages only if they divide the layers.

    ``every``: also those that break rules which are faster to check here: the batch divides over data-parallel ranks,
    the model over tensor, sequence and context ranks, and the blocks over stages. No rule needs virtual stages, or
    ranks that share experts, to hold. ``worthwhile``: of degrees without
    a pipeline; those that it refuses are not divided into stages either.
    """
    world, pinned_data = spec.world_size, spec.layout.data_parallel
    workload, batch = workload_of(spec.model), spec.training.global_batch_size
    layers, virtuals = workload.layers(spec), degrees["virtual_pipeline"]
    chunks = dict.fromkeys(degrees["pipeline_parallel"], virtuals)
    for pipeline in chunks if spec.layout.virtual_pipeline == "auto" else ():
        chunks[pipeline] = [n for n in virtuals if n == 1 or (pipeline > 1 and layers % (pipeline * n) == 0)]
        left_out, example = len(virtuals) - len(chunks[pipeline]), f"pipeline {pipeline} of {layers} layers"
        counts.add(Reason("plan.chunks-do-not-divide", {"key": "virtual_pipeline"}), example, left_out)
    found = False
    for tensor in degrees["tensor_parallel"]:
        for sequence in _dividing(degrees["sequence_parallel"], world, tensor):
            for context in _dividing(degrees["context_parallel"], world, tensor * sequence):
                alone = Axes(world // (tensor * sequence * context), tensor, 1, 1, sequence, context, 1)
                if not every and any(workload.rules(spec, alone)):
                    found = True
                    continue
                experts = degrees["expert_parallel"]
                if worthwhile is not None:
                    experts = [expert for expert in experts if worthwhile(alone._replace(expert=expert))]
                    found |= not experts
                for pipeline in _dividing(degrees["pipeline_parallel"], world, tensor * sequence * context):
                    data = world // (tensor * sequence * context * pipeline)
                    if pinned_data not in ("auto", data):
                        continue
                    divided = alone._replace(data=data, pipeline=pipeline)
                    if not every and (batch % data or any(broken_rules(spec, divided))):
                        found = True
                        continue
                    for virtual in chunks[pipeline]:
                        for expert in experts:
                            found = True
                            yield Axes(data, tensor, pipeline, virtual, sequence, context, expert)
    if not found:
        yield resolve_axes(spec)  # the degrees that the spec sets fit no cluster; the broken rules state why


def _dividing(degrees: Iterable[int], world: int, others: int) -> list[int]:
    return [degree for degree in degrees if world % (others * degree) == 0]


def _spelled(axes: Axes) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in zip(axes._fields, axes, strict=True) if degree > 1)
