"""What it costs in time to keep optimizer states and weights in host memory. Knows no schedule."""

from __future__ import annotations

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.states import gradient_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

# Share of the host link that pinned copies reach (PCIe 4.0 x16: 25 of 31.5 GB/s).
_LINK_SHARE = 0.8
# DeepSpeed's CPU Adam reads and writes 28 bytes per parameter; one socket moves about 150 GB/s, shared by 4 ranks.
_UPDATE_BYTES = 28
_HOST_MEMORY_BANDWIDTH = 37e9


def offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator, updated: int) -> float:
    """Gradients down, the update on the CPU, weights up, for ``updated`` parameters of this rank.

    Weights that live on the host too are fetched once for each forward and each backward pass (ZeRO-Infinity,
    arXiv:2104.07857); half of that is taken to hide behind compute.
    """
    link = device.host_bandwidth * _LINK_SHARE
    weights = updated * weight_bytes(spec.training.precision)
    gradients = updated * gradient_bytes(spec.training.precision, spec.training.grad_dtype)
    seconds = (weights + gradients) / link + updated * _UPDATE_BYTES / _HOST_MEMORY_BANDWIDTH
    if layout.offload == "optimizer+params":
        seconds += 0.5 * 2 * layout.gradient_accumulation_steps * weights / link
    return seconds
