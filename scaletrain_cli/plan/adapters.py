"""Settings of ``model.adapter`` and ``model.quantization`` that the model, the device or other settings rule out."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.parameters import base_shapes, modules_with_adapter
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import AdapterSpec, adaptable_modules, unmatched_targets
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES

_GROUPED_MULTIPLE = 8  # elements: 16 bytes of a 16-bit format, which grouped products require of each row


def check_adapter(spec: RunSpec) -> None:
    """Raise UsageError with all problems if the adapter or the quantization does not fit the model."""
    if not isinstance(spec.model, ModelSpec):
        return
    rules = list(adapter_rules(spec.model))
    if spec.model.adapter is not None:
        rules.append(Rule("model.adapter", None, "adapter-unavailable"))
    if spec.model.quantization != "none":
        rules.append(Rule("model.quantization", spec.model.quantization, "adapter-unavailable"))
    if rules:
        problems = tuple(rule.problem(spec.where(rule.key)) for rule in rules)
        raise UsageError(Reason("plan.adapter-invalid", {"problems": len(rules)}), problems)


def adapter_rules(model: ModelSpec) -> Iterator[Rule]:
    """Yield the settings of an adapter that the model does not support."""
    adapter = model.adapter
    if adapter is None:
        return
    if model.family not in BUILT_IN_FAMILIES:
        yield Rule("model.adapter", None, "adapter-built-in-families", {"family": model.family})
        return
    yield from _unmatched(model, adapter)
    kinds = {module.kind for module in modules_with_adapter(model)}
    if adapter.dora and kinds & {"embedding", "head"}:
        yield Rule("model.adapter.dora", True, "dora-on-embeddings")
    if "experts" not in kinds:
        return
    if adapter.dora:
        yield Rule("model.adapter.dora", True, "adapter-on-experts", {"allowed": "false"})
    if adapter.dropout:
        yield Rule("model.adapter.dropout", adapter.dropout, "adapter-on-experts", {"allowed": "0"})
    if adapter.rank % _GROUPED_MULTIPLE:
        yield Rule("model.adapter.rank", adapter.rank, "adapter-rank-on-experts", {"multiple": _GROUPED_MULTIPLE})


def _unmatched(model: ModelSpec, adapter: AdapterSpec) -> Iterator[Rule]:
    shapes, tied = base_shapes(model), model.tie_word_embeddings
    for pattern in unmatched_targets(adapter, shapes, tied=tied):
        names = {module.name.rpartition(".")[2] for module in adaptable_modules(shapes, tied=tied)}
        yield Rule("model.adapter.targets", pattern, "adapter-matches-nothing", fix={"names": sorted(names)})
