"""Map plain dimensions and degrees to a run spec and the layout of a measured run, without its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.search.layouts import build_layout
from scaletrain_cli.spec import RunSpec

GBIT = 1e9 / 8
_MOST_LAYERS = 10_000


class Unmapped(Exception):
    """A row that no run spec describes; the message is the reason, the same for all rows of its kind."""


@dataclass(frozen=True)
class Case:
    """One run as the planner gets it; ``program``: what sizes its memory, if not the framework of the spec.

    ``skips_update``: the loss scaler skipped the update of an offloaded optimizer in the steps that were measured.
    """

    spec: RunSpec
    layout: Layout
    program: Framework | None = None
    skips_update: bool = False


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism; ``data`` counts replicas, without sequence and context ranks.

    ``sequence``: ranks of Ulysses; ``context``: of ring attention.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    sequence: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    tensor_sequence: bool | None = None
    zero_stage: int = 0
    checkpointing: str = "none"
    offload: str = "none"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence * self.context


@dataclass(frozen=True)
class Machines:
    """The cluster; ``network``: a name in the planner's network catalogue, or bytes/s per GPU and direction."""

    gpu: str
    count: int
    per_node: int = 8
    network: str | None = None
    inter_node_bandwidth: float | None = None
    cpus_per_gpu: int | None = None  # threads of a rank


def build_case(
    framework: str,
    model: Mapping[str, Any],
    degrees: Degrees,
    machines: Machines,
    *,
    global_batch: int,
    micro_batch: int,
    training: Mapping[str, Any] | None = None,
    planner: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Case:
    """Return the spec, with every axis set, and its layout. Raises Unmapped if the parts do not form a run."""
    if min(degrees.world_size, degrees.data, machines.count, machines.per_node, micro_batch, global_batch) < 1:
        raise Unmapped("a degree, a batch or a number of GPUs is below 1")
    if max(degrees.pipeline, model.get("num_hidden_layers", 1)) > _MOST_LAYERS:
        raise Unmapped("more layers or pipeline stages than any model has")
    if degrees.world_size != machines.count:
        raise Unmapped("the degrees do not multiply to the number of GPUs")
    if global_batch % (degrees.data * micro_batch):
        raise Unmapped("the global batch does not divide by replicas and micro-batch")
    raw = {
        "schema": "scaletrain/v1",
        "name": "measured",
        "model": _model(model),
        "data": {"source": "python-stdlib", "tokenizer": {"kind": "bpe", "vocab_size": 1}, **(data or {})},
        "training": {
            "global_batch_size": global_batch,
            "micro_batch_size": micro_batch,
            "steps": 1000,
            "cross_entropy": "whole",  # nobody here computed the loss in chunks
            "compile": False,
            **(training or {}),
        },
        "layout": _layout(degrees),
        "cluster": _cluster(machines),
        "planner": {"framework": framework, **(planner or {})},
        "env": dict(env or {}),
    }
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Unmapped(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    axes = resolve_axes(spec)
    return Case(spec, build_layout(spec, axes, degrees.zero_stage, degrees.checkpointing, micro_batch))


def transformer(
    family: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int,
    seq_len: int,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    """Return the model section from its dimensions; others follow the model family."""
    return {
        "family": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": hidden // heads,
        "intermediate_size": ffn or 4 * hidden,
        "vocab_size": vocab,
        "seq_len": seq_len,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": tied,
        **more,
    }


def padded_vocab(size: int, tensor: int, multiple: int = 128) -> int:
    """Return the vocabulary size padded as in Megatron-LM (make-vocab-size-divisible-by)."""
    step = multiple * tensor
    return -(-size // step) * step


def _model(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _layout(degrees: Degrees) -> dict[str, Any]:
    return {
        "data_parallel": degrees.data,
        "tensor_parallel": degrees.tensor,
        "pipeline_parallel": degrees.pipeline,
        "virtual_pipeline": degrees.virtual,
        "sequence_parallel": degrees.sequence,
        "context_parallel": degrees.context,
        "expert_parallel": degrees.expert,
        "expert_tensor_parallel": "auto" if degrees.expert_tensor is None else degrees.expert_tensor,
        "tensor_sequence_parallel": "auto" if degrees.tensor_sequence is None else degrees.tensor_sequence,
        "zero_stage": degrees.zero_stage,
        "activation_checkpointing": degrees.checkpointing,
        "offload": degrees.offload,
    }


def _cluster(machines: Machines) -> dict[str, Any]:
    per_node = min(machines.count, machines.per_node)
    if machines.count % per_node:
        raise Unmapped("the GPUs do not fill whole nodes")
    cluster: dict[str, Any] = {
        "scheduler": "slurm",
        "nodes": machines.count // per_node,
        "gpus_per_node": per_node,
        "gpu": machines.gpu,
    }
    if machines.network is not None:
        cluster["network"] = machines.network
    if machines.inter_node_bandwidth is not None:
        cluster["inter_node_bandwidth"] = machines.inter_node_bandwidth
    if machines.cpus_per_gpu is not None:
        cluster["cpus_per_gpu"] = machines.cpus_per_gpu
    return cluster
