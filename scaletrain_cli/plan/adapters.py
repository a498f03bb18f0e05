"""Settings of ``model.adapter`` and ``model.quantization`` that the model, the device or other settings rule out."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.parameters import base_shapes, has_adapter, modules_with_adapter
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.trained_parameters import trains_only_adapters
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import adaptable_modules, unmatched_targets
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES

_GROUPED_MULTIPLE = 8  # elements: 16 bytes of a 16-bit format, which grouped products require of each row


def check_adapter(spec: RunSpec) -> None:
    """Raise UsageError with all problems if the adapter or the quantization does not fit the model."""
    if not isinstance(spec.model, ModelSpec):
        return
    if rules := [*adapter_rules(spec.model), *quantization_rules(spec)]:
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
    shapes, tied = base_shapes(model), model.tie_word_embeddings
    for pattern in unmatched_targets(adapter, shapes, tied=tied):
        names = {module.name.rpartition(".")[2] for module in adaptable_modules(shapes, tied=tied)}
        yield Rule("model.adapter.targets", pattern, "adapter-matches-nothing", fix={"names": sorted(names)})
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


def trains_in_fp32(spec: RunSpec) -> bool:
    """Return True if only factors train, in fp32 over frozen weights in 16 bits, as in PEFT.

    Where base parameters train, too, and with fp16, factors have 16 bits and fp32 master weights as all others.
    """
    if not has_adapter(spec.model) or spec.training.precision == "fp16":
        return False
    return trains_only_adapters(spec)


def quantized_weights(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that ``model.quantization`` quantizes, by name: of linear layers in blocks."""
    shapes = base_shapes(model)
    modules = adaptable_modules(shapes, tied=model.tie_word_embeddings)
    return {module.parameter: shapes[module.parameter] for module in modules if module.kind == "linear"}


def quantization_rules(spec: RunSpec) -> Iterator[Rule]:
    """Yield the settings that rule out a quantized base; those of the layout are in ``quantized_layout_rules``."""
    model, key = spec.transformer, "model.quantization"
    if model.quantization == "none":
        return
    kind = model.quantization
    if spec.cluster.gpu == "cpu":
        yield Rule(key, kind, "quantization-needs-cuda")
    if model.family not in BUILT_IN_FAMILIES:
        yield Rule(key, kind, "adapter-built-in-families", {"family": model.family})
        return
    if model.weights is None:
        yield Rule(key, kind, "quantization-needs-weights")
    if model.adapter is not None and model.adapter.dora:
        yield Rule("model.adapter.dora", True, "quantization-without-dora")
    if spec.training.precision == "fp8":
        yield Rule("training.precision", "fp8", "quantization-without-fp8")
    quantized = quantized_weights(model)
    patterns = [pattern for group in spec.training.trainable for pattern in group.match]
    trained = [name for name in quantized if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if trained or (model.adapter is None and not patterns):
        yield Rule(key, kind, "quantization-needs-frozen-linears", {"example": (trained or list(quantized))[0]})


def quantized_layout_rules(spec: RunSpec, layout: Layout) -> Iterator[Rule]:
    """Yield the ZeRO stage that a quantized base rules out: bitsandbytes has no shards of its blocks.

    Tensor parallelism is ruled out by the workload (workloads/text.py).
    """
    if getattr(spec.model, "quantization", "none") == "none":
        return
    if layout.zero_stage == 3:
        yield Rule("layout.zero_stage", 3, "quantization-layout", {"allowed": "at most 2"})
