"""DeepSpeed's settings for states and weights that wait outside the device. Pure: a spec in, configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaletrain_cli.plan.memory.zero_buffers import NVME_OPTIMIZER_BUFFERS
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec


def offload_config(spec: RunSpec, layout: Layout, swap_folder: Path) -> dict[str, Any]:
    """What goes into ``zero_optimization``. ``swap_folder``: on a disk of the node itself, for NVMe offload."""
    if layout.offload == "none":
        return {}
    nvme = spec.layout.offload_device == "nvme"
    # Page-locked memory is what lets a GPU copy while it computes; a CPU rank has nothing to copy to.
    place: dict[str, Any] = {"device": spec.layout.offload_device, "pin_memory": spec.cluster.gpu != "cpu"}
    if not nvme:
        # torch's fused optimizers are as fast on the host as DeepSpeed's own, which it would insist on.
        config = {"offload_optimizer": place}
        return config | ({"offload_param": place} if layout.offload == "optimizer+params" else {})
    place["nvme_path"] = str(swap_folder)
    config = {"offload_optimizer": {**place, "buffer_count": NVME_OPTIMIZER_BUFFERS}}
    if layout.offload == "optimizer+params":
        config["offload_param"] = {**place, "buffer_size": _largest_piece(spec, layout)}
    return config


def _largest_piece(spec: RunSpec, layout: Layout) -> int:
    """Elements that hold ZeRO-3's piece of any one parameter: what a buffer must take, and no more of five buffers."""
    model = spec.transformer
    heads = model.num_attention_heads * model.head_dim
    experts = 2 * model.num_experts * model.expert_size if model.num_experts else 0  # they lie in one parameter
    widest = max(model.vocab_size, model.max_position_embeddings, model.intermediate_size, 3 * heads, experts)
    return -(-model.hidden_size * widest // (layout.data_parallel * layout.sequence_parallel))
