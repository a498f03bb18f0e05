"""How each framework spends time around its matrix products: host work, memory traffic, overlap. Knows no device.

Bytes and collectives are counted in the frameworks' sources. Host seconds and overlaps are read off published runs and
calibrated on half of them, nanotron's on the Ultra-Scale Playbook's sweep, Megatron's on vTrain's runs, FSDP's on LLM
Foundry's; benchmarks/planner_accuracy.py prints the errors on the whole of each. Host figures hold for server CPUs of
2020 to 2024, and matter where micro-batches are too small to keep a GPU busy. Those of our own engine are estimates
between the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FrameworkProfile:
    """One framework. Bytes per element are for 16-bit elements and double in fp32."""

    # Host seconds to issue one block's forward and backward, and what tensor parallelism adds to both together.
    forward_host: float
    backward_host: float
    tensor_host: float
    # What routing tokens to experts adds per block, both ways: sorting, permuting, counting.
    experts_host: float
    # What it adds per block where the group reaches over both sockets of a node, so that all wait for the slowest core.
    socket_host: float
    # Host seconds once per micro-batch: schedule; embedding or head and loss; and once per step (clipping, optimizer).
    micro_batch_host: float
    end_host: float
    step_host: float
    # Bytes per token and channel of one block that norms and residual sums move, forward and backward.
    norm_forward: float
    norm_backward: float
    # Bytes per token and inner channel of the activation: gated and plain, forward and backward.
    gated: tuple[float, float]
    plain: tuple[float, float]
    # Bytes per token and query or key channel to rotate them, forward and backward.
    rotary: tuple[float, float]
    # Bytes per token and vocabulary entry of the loss, forward and backward.
    loss: tuple[float, float]
    # Bytes per score of attention that keeps them, forward and backward, its two products' included.
    scores: tuple[float, float]
    # Bytes per parameter and micro-batch to add its gradient to the accumulated one.
    accumulate: float
    # Bytes per parameter that the optimizer updates: states, gradient, clipping, casts.
    optimizer: float
    # Gathers and scatters of one block's tensor parallelism, forward and backward, where norms are cut too.
    tensor_collectives: tuple[int, int]
    # Share of the tensor-parallel traffic that hides behind the products beside it.
    tensor_overlap: float
    # Bytes per parameter of the reduced gradient and of the gathered weight; None: as the spec says.
    gradient_reduced: int | None
    # Share of the data-parallel reduction that may hide behind the backward pass of the last micro-batch.
    reduce_overlap: float
    # Share of the gathered weights (ZeRO-1 and 2) that hides behind the next forward pass.
    gather_overlap: float
    # Share of sends and receives between stages that hides behind compute.
    pipeline_overlap: float
    # Speed of its fused attention, as a multiple of FlashAttention-2's.
    attention_speed: float
    # Host seconds per step that sharding the optimizer adds.
    zero_host: float
    # Whether a token for several experts of one node crosses the network once.
    sends_once_per_node: bool = False
    # Host seconds per block and tensor rank while a pipeline over nodes is full, with sends and receives outstanding.
    stage_stall: float = 0.0
    # Kernels of one block outside products and attention: norms, activation, rotation, residuals; forward and backward.
    small_kernels: tuple[int, int] = (30, 50)
    # Whether it rotates complex numbers, which torch.compile leaves eager (torch/_inductor/lowering.py warns so).
    complex_rotary: bool = False


# Fused: the products write and read the scores, one kernel scales, masks and normalises them (Megatron-LM,
# scaled_upper_triang_masked_softmax). Eager PyTorch under autocast scales, masks, casts to fp32, normalises and casts
# back, each in a kernel of its own.
FUSED_SCORES = (8.0, 14.0)
_EAGER_SCORES = (32.0, 40.0)

# Our engine: eager PyTorch modules under DeepSpeed 0.19. RMSNorm and rotation compute in fp32 step by step; ZeRO's
# reduction runs through Python hooks.
_DEEPSPEED = FrameworkProfile(
    forward_host=0.75e-3,
    backward_host=1.1e-3,
    tensor_host=0.4e-3,
    experts_host=5.0e-3,
    socket_host=0.0,
    micro_batch_host=1.5e-3,
    end_host=1.5e-3,
    step_host=25e-3,
    norm_forward=84.0,
    norm_backward=110.0,
    gated=(10.0, 18.0),
    plain=(4.0, 6.0),
    rotary=(29.0, 29.0),
    loss=(18.0, 20.0),
    scores=_EAGER_SCORES,
    accumulate=12.0,
    optimizer=50.0,
    tensor_collectives=(4, 4),
    tensor_overlap=0.0,
    gradient_reduced=2,
    reduce_overlap=0.7,
    gather_overlap=0.0,
    attention_speed=1.0,
    pipeline_overlap=0.0,
    zero_host=5e-3,
)
# PyTorch FSDP: eager modules, CPU time for the hooks of each unit; prefetches the next block's weights.
_FSDP = FrameworkProfile(
    forward_host=0.8e-3,
    backward_host=1.2e-3,
    tensor_host=0.4e-3,
    experts_host=5.0e-3,
    socket_host=0.0,
    micro_batch_host=1.5e-3,
    end_host=1.5e-3,
    step_host=20e-3,
    norm_forward=24.0,
    norm_backward=40.0,
    gated=(10.0, 18.0),
    plain=(4.0, 6.0),
    rotary=(20.0, 20.0),
    loss=(20.0, 20.0),
    scores=_EAGER_SCORES,
    accumulate=8.0,
    optimizer=44.0,
    tensor_collectives=(4, 6),
    tensor_overlap=0.2,
    gradient_reduced=None,
    reduce_overlap=0.9,
    gather_overlap=0.0,
    attention_speed=1.0,
    pipeline_overlap=0.3,
    zero_host=5e-3,
    complex_rotary=True,  # torchtitan, models/llama3/model.py apply_rotary_emb
)
# Megatron-LM: fused softmax, bias-GeLU, bias-dropout-add and norms; weight gradients accumulate in the product.
_MEGATRON = FrameworkProfile(
    forward_host=0.85e-3,
    backward_host=1.3e-3,
    tensor_host=0.15e-3,
    experts_host=5.0e-3,
    socket_host=0.8e-3,
    micro_batch_host=1.5e-3,
    end_host=2.0e-3,
    step_host=1e-3,
    norm_forward=17.0,
    norm_backward=21.0,
    gated=(6.0, 10.0),
    plain=(4.0, 6.0),
    rotary=(4.0, 4.0),
    loss=(26.0, 14.0),
    scores=FUSED_SCORES,
    accumulate=7.0,
    optimizer=44.0,
    tensor_collectives=(4, 4),
    tensor_overlap=0.0,
    gradient_reduced=None,
    reduce_overlap=0.0,
    gather_overlap=0.0,
    attention_speed=1.0,
    pipeline_overlap=0.0,
    zero_host=5e-3,
)
# Megatron-LM and NeMo on Hopper and later, with Transformer Engine: tensor-parallel traffic is cut up and runs beside
# the products (tp_comm_overlap), gradients and weights beside both passes (overlap_grad_reduce, overlap_param_gather),
# and attention is cuDNN's. Its modules cost the host more than the plain ones of 2021: 3.7 to 4.5 ms per block, 8 to 9
# with experts (iteration times of Megatron-LM's functional tests on H100). NVIDIA's own recipes switch all of that on
# (Megatron-Bridge, src/megatron/bridge/recipes).
_MEGATRON_ENGINE = replace(
    _MEGATRON,
    forward_host=1.4e-3,
    backward_host=2.0e-3,
    tensor_host=0.3e-3,
    socket_host=0.0,
    tensor_overlap=0.7,
    reduce_overlap=0.9,
    gather_overlap=0.9,
    pipeline_overlap=0.5,
    attention_speed=1.5,
    sends_once_per_node=True,  # its flex dispatcher with DeepEP
)
# nanotron: Triton RMSNorm, flash-attention with its rotation, eager SwiGLU and loss; gradients in fp32 are added by a
# hook and reduced with the last micro-batch (optim/gradient_accumulator.py). Stages are balanced by cost
# (models/base.py build_model). Sends and receives block, after two messages of metadata (pipeline_parallel/p2p.py).
_NANOTRON = FrameworkProfile(
    forward_host=1.2e-3,
    backward_host=2.0e-3,
    tensor_host=1.1e-3,
    experts_host=5.0e-3,
    socket_host=0.0,
    micro_batch_host=1.4e-3,
    end_host=0.3e-3,
    step_host=8e-3,
    norm_forward=20.0,
    norm_backward=30.0,
    gated=(10.0, 32.0),
    plain=(4.0, 6.0),
    rotary=(8.0, 8.0),
    loss=(37.0, 12.0),
    scores=FUSED_SCORES,
    accumulate=10.0,
    optimizer=36.0,
    tensor_collectives=(4, 6),
    tensor_overlap=0.11,
    gradient_reduced=4,
    reduce_overlap=0.6,
    gather_overlap=0.0,
    attention_speed=1.0,
    pipeline_overlap=0.0,
    zero_host=27e-3,
    stage_stall=2.0e-3,
)

HABITS = {
    "deepspeed": _DEEPSPEED,
    "fsdp": _FSDP,
    "megatron": _MEGATRON,
    "megatron-te": _MEGATRON_ENGINE,
    "nanotron": _NANOTRON,
}


def habits_of(framework: str, compute_capability: str) -> FrameworkProfile:
    """The habits of ``planner.framework`` on a device; ``compute_capability`` as the catalogue has it."""
    major = compute_capability.partition(".")[0]
    if framework == "megatron" and major.isdigit() and int(major) >= 9:
        return HABITS["megatron-te"]
    return HABITS[framework]
