"""What the engine of this version can run. The planner sizes more than that; what stands here may be submitted."""

from __future__ import annotations

from scaletrain_cli.plan.result import Layout, RunPlan
from scaletrain_cli.spec import RunSpec

_PRECISIONS = ("fp32", "tf32", "bf16")
_SCHEDULES = ("cosine", "linear", "constant")
_SCHEDULERS = ("local", "slurm")
_AXES_OF_ONE = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
)


def unsupported(spec: RunSpec, layout: Layout) -> list[str]:
    """One line per thing that this engine cannot run, with what to do; empty when it can run the layout."""
    training, on_cpu = spec.training, spec.cluster.gpu == "cpu"
    found = [
        f"layout.{axis} = {getattr(layout, axis)}: this engine runs data parallelism with ZeRO only. Use 1 or auto."
        for axis in _AXES_OF_ONE
        if getattr(layout, axis) != 1
    ]
    if spec.model.num_experts:
        found.append(f"model.num_experts = {spec.model.num_experts}: this engine trains dense models only. Use 0.")
    if training.precision not in _PRECISIONS:
        found.append(f"training.precision = {training.precision}: not in this engine. Use {_one_of(_PRECISIONS)}.")
    if training.precision == "tf32" and on_cpu:
        found.append("training.precision = tf32: needs an NVIDIA GPU. Use fp32 or bf16 with cluster.gpu: cpu.")
    if training.precision == "bf16" and training.grad_dtype == "fp16":
        found.append("training.grad_dtype = fp16: bf16 gradients accumulate in fp32 or bf16. Use fp32.")
    if training.schedule.name not in _SCHEDULES:
        found.append(
            f"training.schedule.name = {training.schedule.name}: not in this engine. Use {_one_of(_SCHEDULES)}."
        )
    if layout.offload != "none":
        found.append(f"layout.offload = {layout.offload}: not in this engine. Use none.")
    if spec.guard.spike.action != "warn":
        found.append(f"guard.spike.action = {spec.guard.spike.action}: not in this engine. Use warn.")
    if spec.checkpoint.dir != "auto":
        found.append("checkpoint.dir: this engine keeps checkpoints in the run directory. Use auto.")
    if spec.planner.framework != "deepspeed":
        found.append(f"planner.framework = {spec.planner.framework}: for comparison only. Use deepspeed to submit.")
    if spec.cluster.scheduler not in _SCHEDULERS:
        found.append(f"cluster.scheduler = {spec.cluster.scheduler}: not in this version. Use {_one_of(_SCHEDULERS)}.")
    return found


def submittable(spec: RunSpec, plan: RunPlan) -> list[str]:
    """Why the planned run may not be submitted, one line each; empty when it may."""
    found = unsupported(spec, plan.layout)
    if not plan.memory.fits:
        gigabytes = f"{plan.memory.peak / 1e9:,.1f} GB of {plan.memory.capacity / 1e9:,.1f} GB"
        found.insert(0, f"the layout does not fit: one rank needs {gigabytes}. See `scaletrain plan`.")
    return found


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
