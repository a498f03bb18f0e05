"""DeepSpeed's settings for states and weights that wait outside the device. Pure: a spec in, configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

# The optimizer's buffers while a piece is updated: weights, gradient and two moments (zero/offload_config.py).
_BUFFERS = 4


def offload_config(spec: RunSpec, layout: Layout, swap_folder: Path) -> dict[str, Any]:
    """What goes into ``zero_optimization``. ``swap_folder``: on a disk of the node itself, for NVMe offload."""
    if layout.offload == "none":
        return {}
    nvme = spec.layout.offload_device == "nvme"
    # Page-locked memory is what lets a GPU copy while it computes; a CPU rank has nothing to copy to.
    place: dict[str, Any] = {"device": spec.layout.offload_device, "pin_memory": spec.cluster.gpu != "cpu"}
    if nvme:
        place["nvme_path"] = str(swap_folder)
    optimizer = {**place, "buffer_count": _BUFFERS} if nvme else place
    # torch's fused optimizers are as fast on the host as DeepSpeed's own.
    config: dict[str, Any] = {"offload_optimizer": optimizer}
    if layout.offload == "optimizer+params":
        config["offload_param"] = place
    return config
