"""This project's engine: eager PyTorch modules under DeepSpeed 0.19 with ZeRO."""

from collections.abc import Callable, Iterator
from typing import ClassVar

from scaletrain_cli.plan.axes import AXES, Axes, Capabilities, Rule, offload_stage
from scaletrain_cli.plan.catalogue.hardware import Accelerator
from scaletrain_cli.plan.frameworks.base import Framework
from scaletrain_cli.plan.frameworks.profile import EAGER_SCORES, FrameworkProfile, Selective
from scaletrain_cli.plan.memory.activations import HEAD_MULTIPLE, chosen_cross_entropy
from scaletrain_cli.plan.memory.engine_memory import ENGINE_PROGRAM, Program, engine_stage_memory
from scaletrain_cli.plan.memory.states import MasterWeights, weight_bytes
from scaletrain_cli.plan.result import Layout, StageMemory
from scaletrain_cli.plan.stages import Stage, blocks_per_stage
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec

# What this version of the engine can run. The search proposes only such layouts, and only these may be submitted.
ENGINE = Capabilities(
    axes=frozenset(
        {"tensor_parallel", "pipeline_parallel", "sequence_parallel", "context_parallel", "expert_parallel"}
    ),
    offload=("none", "optimizer", "optimizer+params"),
)

# ZeRO-3 over nodes takes the time of 16 to 18 GB/s per node, whatever the number of GPUs: 175B and 530B on 384 to 2,240
# A100 with 200 GB/s per node (arXiv:2104.04473, table 2; recalled, not read again). Runs of xtuner on 2 to 32 nodes
# with 50 GB/s agree.
_ZERO_3_MOST = 17e9
# RMSNorm and rotary embedding compute in fp32, one kernel per operation; ZeRO reduces gradients in Python hooks.
_PROFILE = FrameworkProfile(
    forward_host=0.75e-3,
    backward_host=1.1e-3,
    tensor_host=0.4e-3,
    experts_host=5.0e-3,
    micro_batch_host=1.5e-3,
    end_host=1.5e-3,
    step_host=25e-3,
    norm_forward=84.0,
    norm_backward=110.0,
    gated=(10.0, 18.0),
    plain=(4.0, 6.0),
    rotary=(29.0, 29.0),
    loss=(18.0, 20.0),
    head_multiple=HEAD_MULTIPLE,
    scores=EAGER_SCORES,
    accumulate=12.0,
    optimizer=50.0,
    tensor_collectives=(4, 4),
    gradient_reduced=2,
    reduce_overlap=0.7,
    zero_3_most=_ZERO_3_MOST,
    pipeline_host=15e-3,
    # A forward pass with its hooks takes four times the host time of one without (stage 3 and stage 0 of a block with
    # nine modules with weights, on a CPU).
    gather_host=4e-3,
    zero_host=5e-3,
    skips_windows=False,  # with a mask; without one see RankWork.by_document
)


class DeepSpeed(Framework):
    """This project's engine, the only framework whose plans can be submitted."""

    name = "deepspeed"
    is_engine = True
    # engine_memory.py counts NCCL and fragmentation, so no further margin is needed.
    usable_memory = 1.0
    # There are no published runs of this engine; the value is that of Megatron-LM and torchtitan.
    estimate_spread = 0.08
    fragmentation = 0.05
    logit_bytes = 12
    master_weights = MasterWeights.OF_EACH_PARTITION
    stores_master_weights_alone = True
    # The engine draws the same dropout masks in every layout, which no fused kernel supports.
    keeps_dropped_scores = True
    profile = _PROFILE
    # What else than this project's engine differs in is for published runs (benchmarks/planner_truth).
    program: ClassVar[Program] = ENGINE_PROGRAM
    # stage_1_and_2.py use_multi_rank_bucket_allreduce; engine.py allreduce_gradients.
    reduces_whole_gradients = True
    reduces_after_backward = True
    shards_norms_by_default = False
    compiles_blocks = True
    # For ``planner.search: everything``: what DeepSpeed could run.
    capabilities: ClassVar[Capabilities] = Capabilities(frozenset(AXES), (0, 1, 2, 3), ENGINE.offload)

    def reduce_overlap(self, layout: Layout, profile: FrameworkProfile) -> float:
        """Return the profile's share where the engine sets ``overlap_comm`` (memory/buffers.py), else 0."""
        if layout.zero_stage == 3:
            return profile.zero_3_overlap
        overlaps = layout.zero_stage == 2 or (layout.zero_stage == 1 and layout.pipeline_parallel == 1)
        return profile.reduce_overlap if overlaps else 0.0

    def stage_memory(self, spec: RunSpec, layout: Layout, device: Accelerator) -> Callable[[Stage], StageMemory]:
        return engine_stage_memory(spec, layout, device, self.program)

    def memory_assumptions(self) -> Iterator[Reason]:
        yield Reason("plan.assumes-deepspeed-states")
        yield Reason("plan.assumes-reduced-type")
        yield Reason("plan.assumes-fragmentation", {"share": self.fragmentation})

    def selective(self, spec: RunSpec) -> Selective:
        """Return what ``layout.selective_scope`` sets: the attention module, or every n-th block."""
        return "attention module" if spec.layout.selective_scope == "attention" else "blocks"

    def selective_every(self, spec: RunSpec) -> int:
        return spec.layout.selective_every

    def cross_entropy(self, spec: RunSpec, micro_batch_tokens: int, tensor_parallel: int, device_bytes: int) -> str:
        return chosen_cross_entropy(spec, micro_batch_tokens, tensor_parallel, device_bytes)

    def blocks_by_stage(self, model: ModelSpec, stages: int) -> tuple[int, ...]:
        return blocks_per_stage(model, stages)

    def rules(self, spec: RunSpec, axes: Axes) -> Iterator[Rule]:
        """Yield the rule of DeepSpeed's PipelineModule: no ZeRO stage above 1."""
        stage = spec.layout.zero_stage
        if axes.pipeline > 1 and (stage in (2, 3) or offload_stage(spec, spec.layout.offload) == 3):
            yield Rule("layout.zero_stage", stage, "zero-refused-with-pipeline")

    def lowest_zero_stage(self, spec: RunSpec, pipelined: bool) -> int:
        """Return 1 for 16-bit weights and with a pipeline, for which DeepSpeed has no usable stage 0; otherwise 0."""
        return 1 if pipelined or weight_bytes(spec.training.precision) == 2 else 0

    def highest_zero_stage(self, spec: RunSpec, pipelined: bool) -> int:
        """Return 1 with a pipeline; 2 for fp8 (its products keep the weights that stage 3 gathers) and for quantized
        weights, which stage 3 cannot shard; otherwise 3.
        """
        quantized = getattr(spec.model, "quantization", "none") != "none"
        return 1 if pipelined else 2 if spec.training.precision == "fp8" or quantized else 3
