"""nanotron: eager blocks with Triton norms, ZeRO-1, and pipeline stages balanced by cost."""

from collections.abc import Iterator
from functools import lru_cache

from scaletrain_cli.plan.axes import AXES, Axes, Capabilities, Rule
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.profile import FUSED_SCORES, MIB, FrameworkProfile, MemoryProfile
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import MOST_BLOCKS
from scaletrain_cli.spec import ModelSpec, RunSpec

# Eager SwiGLU (models/llama.py GLUActivation). 16-bit logits, their fp32 copy, and that copy after subtracting the
# maximum (parallel/tensor_parallel/functional.py sharded_cross_entropy). DistributedDataParallel's buckets beside the
# fp32 gradients, and the 16-bit gradients of a full backward pass before they are added
# (optim/gradient_accumulator.py). Two gather buffers (MemoryBuffer), and the gradient of one. Fused AdamW.
# Tensor-parallel collectives overlap the matrix products; with a full launch queue about 45 tensors wait for them,
# calibrated on the Ultra-Scale sweep.
_MEMORY = MemoryProfile(
    gated_mlp=4,
    keeps_projected=False,
    repeats_keys=False,
    gathered=3,
    logits=10,
    bucket=2,
    fresh_gradient=2,
    gathered_blocks=0,
    workspace=8 * MIB,
    hopper_workspace=24 * MIB,
    fragmentation=0.06,
    keeps_stage_output=True,
    deferred=45,
)
# Triton RMSNorm, flash-attention with its rotary embedding, eager SwiGLU and loss. A hook adds gradients in fp32; they
# are reduced with the last micro-batch (optim/gradient_accumulator.py). Sends and receives between stages block, after
# two messages of metadata (pipeline_parallel/p2p.py).
_PROFILE = FrameworkProfile(
    forward_host=1.2e-3,
    backward_host=2.0e-3,
    tensor_host=1.1e-3,
    experts_host=5.0e-3,
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
    zero_host=27e-3,
    stage_stall=2.0e-3,
)


class Nanotron(Framework):
    """nanotron, for comparison."""

    name = "nanotron"
    # Both from the out-of-memory errors of the Ultra-Scale sweep.
    usable_memory = 0.91
    estimate_spread = 0.12
    memory_profile = _MEMORY
    profile = _PROFILE
    sends_whole_boundary = True
    selective_mode = "blocks"  # every second one
    # Its ZeRO is stage 1; it has neither Ulysses nor an interleaved pipeline (pipeline_parallel/engine.py).
    capabilities = Capabilities(frozenset(AXES) - {"sequence_parallel", "virtual_pipeline"}, (0, 1))

    def written_alone_bytes(self, layout: Layout, checkpoint_bytes: int, weight_bytes: int) -> int:
        """Return all bytes in stage 0, the weights in stages 1 and 2, none in stage 3; divided by tensor x pipeline."""
        alone = {0: checkpoint_bytes, 3: 0}.get(layout.zero_stage, weight_bytes)
        return alone // (layout.tensor_parallel * layout.pipeline_parallel)

    def blocks_by_stage(self, model: ModelSpec, stages: int) -> tuple[int, ...]:
        """Return the number of blocks on each stage, balanced by cost."""
        return _blocks_by_weight(model, stages) if stages > 1 else (model.num_hidden_layers,)

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield what its 1F1B pipeline asserts (pipeline_parallel/engine.py), and degrees that leave stages empty."""
        stages = axes.pipeline
        if stages == 1:
            return
        model = spec.transformer
        if stages <= model.num_hidden_layers and loss_stage(model, stages) < stages - 1:
            yield Rule("layout.pipeline_parallel", stages, "leaves-stages-empty")
        micro_batch = spec.training.micro_batch_size
        least = 1 if micro_batch == "auto" else micro_batch
        if spec.training.global_batch_size // (axes.data * least) < stages - 1:
            yield Rule("layout.pipeline_parallel", stages, "too-few-micro-batches", {"needed": stages - 1})

    def fewest_micro_batches(self, pipeline_parallel: int) -> int:
        """Return one less than the stages (pipeline_parallel/engine.py asserts it)."""
        return pipeline_parallel - 1


@lru_cache(maxsize=4096)
def _blocks_by_weight(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Return the blocks on each stage (models/base.py build_model): a stage ends when the cost so far reaches its
    share.

    The cost of the head is its number of parameters. Published step times of 1B to 8B models on 2 to 32 stages agree
    with this rule, and not with three variants: a strict comparison, the last block on the next stage, a head without
    cost.
    """
    layers = model.num_hidden_layers
    block = model.hidden_size * (
        4 * model.num_attention_heads * model.head_dim + (3 if model.has_gated_mlp else 2) * model.intermediate_size
    )
    total = layers * block + model.vocab_size * model.hidden_size
    starts = [0]
    for stage in range(1, stages):  # counted by stage: a spec may have a billion blocks
        starts.append(min(layers, max(starts[-1] + 1, -(-total * stage // (block * stages)))))
    return tuple(end - start for start, end in zip(starts, [*starts[1:], layers], strict=True))


@lru_cache(maxsize=1024)
def loss_stage(model: ModelSpec, stages: int) -> int:
    """Return the index of the stage that computes the loss (models/base.py build_model); it must be the last stage.

    The head follows the last block and fills its stage. The cast of the logits and the loss have no cost; each goes to
    the next stage that is not full. With many stages, those after the loss stay empty.
    """
    layers, hidden = model.num_hidden_layers, model.hidden_size
    if layers > MOST_BLOCKS:
        return stages - 1
    block = hidden * (4 * model.num_attention_heads * model.head_dim + 3 * model.intermediate_size)
    head = model.vocab_size * hidden
    total, cost, stage, placed = layers * block + head, 0, 0, 0
    for weight in (*[block] * layers, 0, head, 0, 0):  # blocks, final norm, head, cast, loss
        placed, cost = stage, cost + weight
        if stage < stages - 1 and cost * stages >= total * (stage + 1):
            stage += 1
    return placed
