"""Degrees of tensor parallelism that divide and that our engine cannot run all the same, and what would do.

A plan may show them, with a warning; the search does not propose them and nobody can submit them. Knows no sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from scaletrain_cli.plan.memory.states import weight_bytes
from scaletrain_cli.plan.search.rejections import Rule, near
from scaletrain_cli.spec import ModelSpec, RunSpec

# A vocabulary is padded to a multiple of this at most, in a hint.
_PADDED = 128
_ROW_BYTES = 16


def engine_rules(spec: RunSpec, tensor: int) -> Iterator[Rule]:
    """What forbids this degree of tensor parallelism in our engine, one rule after another."""
    if not isinstance(spec.model, ModelSpec):
        return
    if spec.model.num_experts:
        yield from _expert_rules(spec, spec.model, tensor)
    if tensor > 1:
        yield from _tensor_rules(spec, spec.model, tensor)


def _tensor_rules(spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
    kv_heads, vocabulary = model.num_key_value_heads, model.vocab_size
    if kv_heads % tensor:
        message = f"must divide {kv_heads} key-value heads, which this engine does not repeat."
        yield Rule("layout.tensor_parallel", tensor, message, near(gcd(kv_heads, model.num_attention_heads), tensor))
    if vocabulary % tensor:
        multiple = max(_PADDED, tensor)
        message = f"must divide model.vocab_size = {vocabulary}, because embedding and head are cut over it."
        hint = f"Pad model.vocab_size to {_up(vocabulary, multiple)}, or use 1."
        yield Rule("layout.tensor_parallel", tensor, message, hint)
    widths = {"intermediate_size": model.intermediate_size}
    widths["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    for key, width in widths.items() if model.num_experts else ():
        if width % tensor and (key != "intermediate_size" or model.first_k_dense_replace):
            yield Rule("layout.tensor_parallel", tensor, f"must divide {key} = {width}.", near(width, tensor))
    if spec.layout.expert_tensor_parallel not in ("auto", tensor):
        message = "this engine cuts experts over the same ranks as other matrices."
        yield Rule("layout.expert_tensor_parallel", spec.layout.expert_tensor_parallel, message, "Use auto.")
    if spec.training.cross_entropy == "liger":
        message = f"needs the whole vocabulary on each rank, and tensor_parallel = {tensor} cuts it."
        yield Rule("training.cross_entropy", "liger", message, "Use chunked or auto.")


def _expert_rules(spec: RunSpec, model: ModelSpec, tensor: int) -> Iterator[Rule]:
    """Grouped products want rows of multiples of 16 bytes (torch, ``nn.functional.grouped_mm``)."""
    multiple = _ROW_BYTES // weight_bytes(spec.training.precision)
    width, key = model.expert_size // tensor, "moe_intermediate_size" if model.moe_intermediate_size else ""
    if model.hidden_size % multiple:
        message = f"must be a multiple of {multiple} with experts in {spec.training.precision}."
        yield Rule("model.hidden_size", model.hidden_size, message, f"Use {_up(model.hidden_size, multiple)}.")
    if width % multiple:
        message = f"must be a multiple of {multiple} on each of {tensor} tensor ranks, in {spec.training.precision}."
        hint = f"Use {_up(model.expert_size, multiple * tensor)}."
        yield Rule(f"model.{key or 'intermediate_size'}", model.expert_size, message, hint)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
