"""Configure and start DeepSpeed, and work around its defects."""

import functools
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import cpp_extension

from scaletrain_cli.engine.parallel.mesh import Mesh, group_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.log_setup import take_over_library_logger
from scaletrain_cli.plan import zero_buffers
from scaletrain_cli.plan.adapters import trains_in_fp32
from scaletrain_cli.plan.memory.buffers import NVME_OPTIMIZER_BUFFERS, PERSISTENT_ELEMENTS
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import zero_shards
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import locked, make_folder
from scaletrain_cli.spec import RunSpec

# Native operators of DeepSpeed. A build that was killed must not block later builds.

_BUILD_SECONDS = 3600.0  # of all operations; a stopped build is not waited for


def load_async_io() -> None:
    """Build or load the operator that NVMe offload needs; the build takes minutes. Raises UsageError if it fails."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise UsageError(Reason("engine.async-io-unavailable"))
    load_operator(builder)


def load_operator(builder: Any) -> None:
    """Build a DeepSpeed operator (its ``OpBuilder``), or load an existing build; DeepSpeed then finds it loaded."""
    with exclusive_build(extensions_folder()):
        builder.load()


def extensions_folder() -> Path:
    """Return the folder below which torch builds: $TORCH_EXTENSIONS_DIR, or a folder in the user's cache."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


@contextmanager
def exclusive_build(folder: Path) -> Generator[None]:
    """A context in which no other process builds in this folder; removes locks of builds that have died."""
    make_folder(folder)
    with locked(folder / ".scaletrain-builds", wait_seconds=_BUILD_SECONDS):
        for lock in folder.rglob("lock"):
            if not _is_open(lock):
                lock.unlink(missing_ok=True)
        yield


def _is_open(path: Path) -> bool:
    """Return True if a visible process on this node has the file open, as a running build has."""
    lock = path.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            file = descriptor.stat()
        except OSError:  # ended, or not permitted
            continue
        if (file.st_dev, file.st_ino) == (lock.st_dev, lock.st_ino):
            return True
    return False


def offload_config(spec: RunSpec, layout: Layout, swap_folder: Path) -> dict[str, Any]:
    """Return the offload keys of ``zero_optimization``. ``swap_folder``: on a local disk of the node."""
    if layout.offload == "none":
        return {}
    nvme = spec.layout.offload_device == "nvme"
    # Pinned memory lets a GPU copy while it computes; a CPU rank does not copy.
    place: dict[str, Any] = {"device": spec.layout.offload_device, "pin_memory": spec.cluster.gpu != "cpu"}
    if not nvme:
        # torch's fused optimizers are as fast on the host as DeepSpeed's own, which is its default.
        config = {"offload_optimizer": place}
        return config | ({"offload_param": place} if layout.offload == "optimizer+params" else {})
    place["nvme_path"] = str(swap_folder)
    config = {"offload_optimizer": {**place, "buffer_count": NVME_OPTIMIZER_BUFFERS}}
    if layout.offload == "optimizer+params":
        # The elements of the largest ZeRO-3 shard of a parameter, which each of five buffers must hold.
        model = spec.transformer
        heads = model.num_attention_heads * model.head_dim
        experts = 2 * model.num_experts * model.expert_size if model.num_experts else 0  # one parameter each
        widest = max(model.vocab_size, model.max_position_embeddings, model.intermediate_size, 3 * heads, experts)
        config["offload_param"] = {**place, "buffer_size": -(-model.hidden_size * widest // zero_shards(layout))}
    return config


def precision_config(spec: RunSpec) -> dict[str, Any]:
    """Return the sections ``bf16`` or ``fp16`` and ``data_types``; empty for fp32 and tf32. fp8 has bf16 weights.

    Empty also for fp32 adapters: what trains has 32 bits then, whatever the frozen weights have.

    16 bits need ZeRO-1 at least, which the planner ensures: without ZeRO, DeepSpeed accumulates and clips in 16 bits
    (fp16/unfused_optimizer.py) or raises an error.
    """
    training = spec.training
    if training.precision in ("fp32", "tf32") or trains_in_fp32(spec):
        return {}
    config: dict[str, Any] = {"data_types": {"grad_accum_dtype": training.grad_dtype}}
    if training.precision == "fp16":
        scale = training.loss_scale
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": scale.initial.bit_length() - 1,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
        }
    else:
        # Without check_grad_overflow a NaN gradient would reach the weights; without immediate_grad_update stage 1
        # keeps bf16 gradients beside the fp32 ones.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
    return config


def forward_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights and activations in the forward pass."""
    return {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed, let it log to this process's log, and let it use the process group.

    Without the patch, `init_distributed` compiles a shared-memory operator on CPU that only inference uses (up to two
    minutes, needs g++, leaves files in /dev/shm). `import deepspeed.comm.torch` would name the real torch, hence
    sys.modules.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    with _without_mlflow():
        import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    take_over_library_logger("DeepSpeed")
    _load_muon_uncompiled()
    _broadcast_scalars()
    _check_gradient_once()
    deepspeed.init_distributed(dist_init_required=False)


@contextmanager
def _without_mlflow() -> Generator[None]:
    """A context in which MLflow cannot be imported, unless it is loaded already.

    DeepSpeed's autotuner, which its engine imports and this one never uses, loads MLflow wherever that is installed:
    more than a second of CPU time at the start of every rank.
    """
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def _load_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without compiling it.

    ZeRO imports Muon with every optimizer, and its module compiles it at import: that loads all of inductor, more than
    a second of CPU time at the start of every rank.
    """
    from deepspeed.runtime import compiler

    compile_now, compiler.compile = compiler.compile, lambda: lambda function: function
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    compiler.compile = compile_now


def _broadcast_scalars() -> None:
    """Let DeepSpeed broadcast parameters without dimensions at its start, as CLIP's logit scale.

    It views each parameter as bytes, which torch refuses for a tensor without dimensions: its engine in every stage,
    and ZeRO-3 after it has recorded the shape of the parameter.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import Init

    broadcast, convert = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param
    if broadcast.__module__ == __name__:
        return

    def broadcast_model(engine: Any) -> None:
        scalars = [parameter for parameter in engine.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        broadcast(engine)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def convert_to_deepspeed_param(init: Any, parameter: nn.Parameter) -> None:
        convert(init, parameter)
        if parameter.dim() == 0:
            parameter.data = parameter.data.view(1)  # until ZeRO-3 gathers it in its shape

    DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param = broadcast_model, convert_to_deepspeed_param


def _check_gradient_once() -> None:
    """Let the host wait for the gradient once per step, where DeepSpeed waits up to six times.

    ZeRO gets the norm in host memory, which it reads up to four times. Its check of single norms makes a number on the
    host and copies it to the device, which waits, too; here the device masks it. And the norm is not finite where an
    element is not, so that no other pass over the gradient is needed, except where the norms of experts are averaged
    or where gradients are on the host.
    """
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    if utils.mask_nan_or_inf_with_val_inplace is _mask_not_finite:
        return
    for module in (utils, stage3, stage_1_and_2):
        module.mask_nan_or_inf_with_val_inplace = _mask_not_finite
    for optimizer in (stage3.DeepSpeedZeroOptimizer_Stage3, stage_1_and_2.DeepSpeedZeroOptimizer):
        optimizer.has_overflow = _unless_norm_shows_it(optimizer.has_overflow)
    for module in (stage3, stage_1_and_2):
        module.combine_grad_norm_groups = _in_host_memory(module.combine_grad_norm_groups)
    of_tensors, step = bf16_optimizer.get_global_norm_of_tensors, bf16_optimizer.BF16_Optimizer.step
    bf16_optimizer.get_norm_with_moe_layers = _in_host_memory(bf16_optimizer.get_norm_with_moe_layers)

    @functools.wraps(step)
    def step_with_norm(optimizer: Any, closure: Any = None) -> Any:
        # of a model with experts this is only a part of the norm
        norm_function = of_tensors if optimizer.has_moe_layers else _in_host_memory(of_tensors)
        bf16_optimizer.get_global_norm_of_tensors = norm_function
        return step(optimizer, closure)

    bf16_optimizer.BF16_Optimizer.step = step_with_norm


def _mask_not_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~torch.isfinite(norm), val)


def _unless_norm_shows_it(has_overflow: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(has_overflow)
    def shown(optimizer: Any, *arguments: Any, **named: Any) -> bool:
        needed = ("cpu_offload", "offload_optimizer", "has_moe_layers")
        if any(getattr(optimizer, name, False) for name in needed) or not getattr(optimizer, "compute_grad_norm", True):
            return has_overflow(optimizer, *arguments, **named)
        return False

    return shown


def _in_host_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its result, a tensor or number, in host memory."""

    @functools.wraps(function)
    def fetched(*arguments: Any, **named: Any) -> Any:
        norm = function(*arguments, **named)
        return norm.cpu() if isinstance(norm, Tensor) else norm

    return fetched


def deepspeed_config(spec: RunSpec, layout: Layout, module: nn.Module, swap_folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a rank's part of a model, whose frozen parameters are marked.

    The engine sets learning rates and saves checkpoints itself. ``swap_folder``: on a local disk of the node, for NVMe
    offload.
    """
    # the sizes that the plan counts
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    buffers = zero_buffers(
        sum(size for size, _ in sizes),
        layout.zero_stage,
        pipeline=layout.pipeline_parallel > 1,
        trained=sum(size for size, trains in sizes if trains),
    )
    config: dict[str, Any] = {
        # of the ranks over which ZeRO shards, which are all that it knows; sequence and context ranks count too
        "train_batch_size": layout.micro_batch_size * layout.gradient_accumulation_steps * zero_shards(layout),
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": 0.0,  # set before each step where DeepSpeed clips
        "zero_optimization": {
            "stage": layout.zero_stage,
            "reduce_bucket_size": buffers.reduce_bucket_size,
            "allgather_bucket_size": buffers.reduce_bucket_size,
            "stage3_prefetch_bucket_size": buffers.prefetch_bucket_size,
            "stage3_max_live_parameters": buffers.max_live_parameters,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "overlap_comm": buffers.overlap_comm,
            "zero_hpz_partition_size": layout.zero_secondary_shard_size,
        },
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per micro-batch
    }
    config.update(precision_config(spec))
    config["zero_optimization"].update(offload_config(spec, layout, swap_folder))
    # ZeRO hands optimizers flat parts of matrices; ours update each element by itself.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


class ModelParallelUnit:
    """Tensor parallelism in the form that DeepSpeed requires (its ``mpu``); sequence and context ranks are replicas.

    Of these it knows only the ones over which ZeRO shards.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._tensor, self._replicas = mesh.tensor, mesh.shards
        # DeepSpeed needs a group even for one rank.
        self._groups = {axis: axis.group or group_of([dist.get_rank()]) for axis in (mesh.tensor, mesh.shards)}

    @classmethod
    def of(cls, mesh: Mesh) -> "ModelParallelUnit | None":
        """Return None if every rank is a replica, or if a pipeline has DeepSpeed's own grid. Collective."""
        alone = mesh.tensor.size == mesh.groups.size == mesh.copies.size == 1
        return None if alone or mesh.pipeline.size > 1 else cls(mesh)

    def get_model_parallel_group(self) -> Any:
        return self._groups[self._tensor]

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._groups[self._replicas]

    def get_data_parallel_rank(self) -> int:
        return self._replicas.rank

    def get_data_parallel_world_size(self) -> int:
        return self._replicas.size


def start_deepspeed(config: dict[str, Any], module: nn.Module, optimizer: Any, unit: ModelParallelUnit | None) -> Any:
    """Return DeepSpeed's engine around the module and optimizer; a PipelineEngine for a pipeline module."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=unit)
    return engine
