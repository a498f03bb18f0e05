"""Megatron-LM: fused kernels, tensor and pipeline parallelism, the distributed optimizer (ZeRO-1)."""

from dataclasses import replace

from scaletrain_cli.plan.axes import AXES, Capabilities
from scaletrain_cli.plan.catalogue.hardware import HOPPER, Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.profile import FUSED_SCORES, MIB, FrameworkProfile, MemoryProfile

# Fused SwiGLU. vocab_parallel_cross_entropy exponentiates the fp32 copy of the logits in place. The matrix product adds
# weight gradients to the fp32 buffer itself (gradient accumulation fusion). FusedAdam works in place.
_MEMORY = MemoryProfile(
    gated_mlp=3,
    keeps_projected=True,
    repeats_keys=False,
    gathered=2,
    logits=6,
    gathered_blocks=2,
    workspace=64 * MIB,
    hopper_workspace=28 * MIB,
    fragmentation=0.08,
    keeps_stage_output=False,
)
# Fused softmax, bias-GeLU, bias-dropout-add and norms; weight gradients accumulate in the matrix product.
_PROFILE = FrameworkProfile(
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
    zero_host=5e-3,
)
# Megatron-LM and NeMo on Hopper and later, with Transformer Engine, as in NVIDIA's recipes (Megatron-Bridge,
# src/megatron/bridge/recipes). Tensor-parallel collectives are divided and overlap the matrix products
# (tp_comm_overlap); gradients and weights overlap both passes (overlap_grad_reduce, overlap_param_gather); attention is
# cuDNN's. Its modules need more host time than those of 2021: 3.7 to 4.5 ms per block, 8 to 9 ms with experts
# (iteration times of Megatron-LM's functional tests on H100).
_TRANSFORMER_ENGINE = replace(
    _PROFILE,
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


class Megatron(Framework):
    """Megatron-LM, for comparison; profiles of its plain modules and of Transformer Engine."""

    name = "megatron"
    # No out-of-memory errors are published: 5 % margin for NCCL and fragmentation; the spread is that of the errors
    # against Megatron-LM's tests.
    usable_memory = 0.95
    estimate_spread = 0.08
    memory_profile = _MEMORY
    profile = _PROFILE
    selective_mode = "attention core"  # arXiv:2205.05198, section 5
    # The distributed optimizer is ZeRO-1. There is no Ulysses axis: Megatron's "sequence parallel" shards norms over
    # the tensor ranks, and its all-to-all variant of attention is a kind of context parallelism (cp_comm_type).
    capabilities = Capabilities(frozenset(AXES) - {"sequence_parallel"}, (0, 1), ("none", "optimizer"))

    def profile_on(self, device: Accelerator) -> FrameworkProfile:
        return _TRANSFORMER_ENGINE if device.cuda_capability >= HOPPER else _PROFILE
