"""What it costs in time to keep optimizer states and weights in host memory. Knows no schedule."""

from __future__ import annotations

from dataclasses import replace

from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.memory.engine_memory import kept_activation_bytes
from scaletrain_cli.plan.memory.states import gradient_bytes, optimizer_state_bytes_per_parameter, weight_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

# Share of the host link that pinned copies reach (PCIe 4.0 x16: 25 of 31.5 GB/s).
_LINK_SHARE = 0.8
# DeepSpeed's CPU Adam reads and writes 28 bytes per parameter; one socket moves about 150 GB/s, shared by 4 ranks.
_UPDATE_BYTES = 28
_HOST_MEMORY_BANDWIDTH = 37e9
# One data-centre drive on PCIe 4.0 x4 reads 6 to 7 GB/s and writes about 4 (data sheets); all ranks of a node share it.
_NVME_BANDWIDTH = 5e9


def activation_offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator) -> float:
    """Return the seconds of one copy between device and host of what an average block keeps of one micro-batch.

    The forward pass copies each saved tensor to the host and the backward pass copies it back, both on the stream that
    computes (``torch.autograd.graph.save_on_cpu``), so nothing hides either copy.
    """
    if not spec.layout.activation_offload or device.is_cpu:
        return 0.0
    kept = kept_activation_bytes(spec, replace(layout, pipeline_parallel=1), device, 0)
    return kept / spec.transformer.num_hidden_layers / (device.host_bandwidth * _LINK_SHARE)


def offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator, updated: int) -> float:
    """Gradients down, the update on the CPU, weights up, for ``updated`` parameters of this rank.

    Weights that live on the host too are fetched once for each forward and each backward pass (ZeRO-Infinity,
    arXiv:2104.07857); half of that is taken to hide behind compute. On NVMe all of it passes the node's drives.
    """
    link = device.host_bandwidth * _LINK_SHARE
    training = spec.training
    weights = updated * weight_bytes(training.precision)
    gradients = updated * gradient_bytes(training.precision, training.grad_dtype)
    seconds = (weights + gradients) / link + updated * _UPDATE_BYTES / _HOST_MEMORY_BANDWIDTH
    fetched = 2 * layout.gradient_accumulation_steps * weights if layout.offload == "optimizer+params" else 0
    seconds += 0.5 * fetched / link
    if spec.layout.offload_device == "nvme":
        given = spec.cluster.nvme_bandwidth
        drive = (_NVME_BANDWIDTH if given == "auto" else max(given, 1.0)) / spec.cluster.gpus_per_node
        states = updated * optimizer_state_bytes_per_parameter(training.precision, layout.zero_stage)
        seconds += (2 * states + fetched) / drive  # the states in and out again, and nothing hides behind a drive
    return seconds
