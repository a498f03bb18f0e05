"""PyTorch FSDP with torchtitan's models: eager modules; weights and states sharded by FSDP unit."""

from scaletrain_cli.plan.axes import AXES, Capabilities
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.profile import EAGER_SCORES, MIB, FrameworkProfile, MemoryProfile
from scaletrain_cli.plan.memory.states import MasterWeights
from scaletrain_cli.spec import RunSpec

# torchtitan: eager SwiGLU, repeat_kv, selective checkpointing as in distributed/activation_checkpoint.py, prefetch of
# the next block's weights. The loss has 16-bit logits and, in fp32, the log-probabilities and two gradients of full
# size. torch's foreach AdamW allocates the root of the second moment.
_MEMORY = MemoryProfile(
    gated_mlp=4,
    keeps_projected=False,
    repeats_keys=True,
    gathered=2,
    logits=14,
    step_temporary=4,
    gathered_blocks=2,
    workspace=8 * MIB,
    hopper_workspace=24 * MIB,
    fragmentation=0.04,
    keeps_stage_output=True,
)
# Eager modules, with host time for the hooks of each FSDP unit; the next block's weights are prefetched.
_PROFILE = FrameworkProfile(
    forward_host=0.8e-3,
    backward_host=1.2e-3,
    tensor_host=0.4e-3,
    experts_host=5.0e-3,
    micro_batch_host=1.5e-3,
    end_host=1.5e-3,
    step_host=20e-3,
    norm_forward=24.0,
    norm_backward=40.0,
    gated=(10.0, 18.0),
    plain=(4.0, 6.0),
    rotary=(20.0, 20.0),
    loss=(20.0, 20.0),
    scores=EAGER_SCORES,
    accumulate=8.0,
    optimizer=44.0,
    tensor_collectives=(4, 6),
    tensor_overlap=0.2,
    reduce_overlap=0.9,
    pipeline_overlap=0.3,
    zero_host=5e-3,
    complex_rotary=True,  # torchtitan, models/llama3/model.py apply_rotary_emb
)


class Fsdp(Framework):
    """PyTorch FSDP with torchtitan's models, for comparison."""

    name = "fsdp"
    # No out-of-memory errors are published: 5 % margin for NCCL and fragmentation; the spread is that of the errors
    # against torchtitan's runs.
    usable_memory = 0.95
    estimate_spread = 0.08
    memory_profile = _MEMORY
    # The weights are fp32 themselves, without a master copy (torch, MixedPrecisionPolicy).
    master_weights = MasterWeights.THE_WEIGHTS
    stores_master_weights_alone = True  # the fp32 weights are the only ones (torch/distributed/fsdp, MixedPrecision)
    profile = _PROFILE
    # SHARD_GRAD_OP keeps the weights from the forward to the backward pass.
    gathers_per_micro_batch = True
    # torch's stages set neither resharding nor reduction before the last micro-batch (distributed/pipelining/stage.py).
    keeps_whole_in_pipeline = True
    sends_whole_boundary = True
    # torchtitan's mode saves attention and every second product (activation_checkpoint.py).
    selective_mode = "operations"
    # torch ShardingStrategy: NO_SHARD is ZeRO-0, SHARD_GRAD_OP ZeRO-2, FULL_SHARD ZeRO-3.
    capabilities = Capabilities(frozenset(AXES), (0, 2, 3), ("none", "optimizer+params"))

    def highest_zero_stage(self, spec: RunSpec, pipelined: bool) -> int:
        """Return 3: a pipeline keeps weights and gradients of a step whole, but shards states (memory/)."""
        return 3
