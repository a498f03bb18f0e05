"""Seconds of offloading to host memory and NVMe: of activations per block, and of the optimizer per step."""

from dataclasses import replace

from scaletrain_cli.plan.catalogue.hardware import Accelerator, rank_cores, stated_rate
from scaletrain_cli.plan.memory.engine_memory import kept_activation_bytes
from scaletrain_cli.plan.memory.states import MOMENT_BYTES, MasterWeights, gradient_bytes, master_bytes, weight_bytes
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec

# Share of the host link's bandwidth that copies from pinned memory reach (PCIe 4.0 x16: 25 of 31.5 GB/s).
_LINK_SHARE = 0.8
# Bytes per updated parameter that an optimizer on the CPU reads and writes: 28 for Adam (16 read, 12 written), and 20
# around it: clipping 8, norm and check for overflow 4, cast to 16 bits and copy to pinned memory 8 (DeepSpeed,
# stage3.py step, unscale_and_clip_grads, _reassign_or_swap_out_partitioned_parameters).
_UPDATE_BYTES = 48
# Bytes/s of one thread, and of one process with many threads. A thread: 2.4 GB/s for 7B on 8 A800 and 3 GB/s for BERT
# on 8 A100, where launchers set one thread per rank. A process: 40 GB/s (DeepSpeed, pull request 735: 11.6B parameters
# in 8.2 s) and 27 GB/s (18B on one A100).
THREAD_BANDWIDTH = 2.5e9
_PROCESS_BANDWIDTH = 35e9
# Share of the peak of the host's memory that the ranks of a node reach together: 0.8 of streams (McCalpin, STREAM, on
# servers of two sockets), and of these 48 of 68 bytes, as a cached store reads its line before it writes it (20 bytes;
# DeepSpeed, csrc/includes/simd.h has no streaming stores).
_HOST_SHARE = 0.8 * 48 / 68
# Bytes/s of a data-center NVMe drive on PCIe 4.0 x4, which reads 6 to 7 GB/s and writes about 4 (data sheets); all
# ranks of a node share it.
_NVME_BANDWIDTH = 5e9


def activation_offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator) -> float:
    """Return the seconds to copy the activations of an average block and one micro-batch between device and host.

    The forward pass copies each saved tensor to the host, and the backward pass copies it back. Both copies are on the
    stream that computes (``torch.autograd.graph.save_on_cpu``), so neither overlaps compute. 0 without offload.
    """
    if not spec.layout.activation_offload or device.is_cpu:
        return 0.0
    kept = kept_activation_bytes(spec, replace(layout, pipeline_parallel=1, pipeline_split=()), device, 0)
    return kept / spec.transformer.num_hidden_layers / (device.host_bandwidth * _LINK_SHARE)


def offload_seconds(spec: RunSpec, layout: Layout, device: Accelerator, updated: int, held: int) -> float:
    """Return the seconds per step of an offloaded optimizer that updates ``updated`` of ``held`` parameters of a rank.

    Each micro-batch copies its gradients to the host and those that are there to the device, where they are added; the
    last one also copies them in fp32 (stage3.py partition_grads). The CPU updates, and copies weights back. Offloaded
    weights are fetched once for each forward and each backward pass (ZeRO-Infinity, arXiv:2104.07857); half of that is
    assumed to overlap compute. With NVMe all of this passes through the node's drives too.
    """
    link, m = device.host_bandwidth * _LINK_SHARE, layout.gradient_accumulation_steps
    training = spec.training
    gradients = updated * (gradient_bytes(training.precision, training.grad_dtype) * 2 * m + 4)
    seconds = gradients / link + host_update_seconds(spec, device, updated)
    every = held * weight_bytes(training.precision)
    fetched = 2 * m * every if layout.offload == "optimizer+params" else 0
    seconds += 0.5 * fetched / link
    if spec.layout.offload_device == "nvme":
        drive = stated_rate(spec.cluster.nvme_bandwidth, _NVME_BANDWIDTH) / spec.cluster.gpus_per_node
        master = master_bytes(training.precision, layout.zero_stage, MasterWeights.OF_EACH_PARTITION)
        states = updated * (MOMENT_BYTES + master)
        seconds += (2 * states + fetched) / drive  # states are read and written; no overlap with the drives
    return seconds


def host_update_seconds(spec: RunSpec, device: Accelerator, updated: int) -> float:
    """Return the seconds in which the CPU updates ``updated`` parameters of a rank and copies their weights back.

    A step that the loss scaler skips takes none of them (stage3.py ``step`` returns after the check for overflow).
    """
    copied = updated * weight_bytes(spec.training.precision) / (device.host_bandwidth * _LINK_SHARE)
    given = spec.env.get("OMP_NUM_THREADS", "")  # else the node agent sets it to the cores of a rank
    threads = max(1, int(given)) if given.isdecimal() else rank_cores(spec)
    # A rank with the cores of several GPUs also has their share of the memory, as far as no other rank has it.
    shares = max(1.0, min(rank_cores(spec) / device.host_cores, device.host_gpus / spec.cluster.gpus_per_node))
    memory_rate = shares * device.host_memory_bandwidth * _HOST_SHARE
    return copied + updated * _UPDATE_BYTES / min(threads * THREAD_BANDWIDTH, _PROCESS_BANDWIDTH, memory_rate)
