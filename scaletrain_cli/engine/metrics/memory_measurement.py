"""Count the bytes of weights, gradients, optimizer states and activations from the tensors of a rank.

Reads the internals of DeepSpeed 0.19's optimizers (``zero/stage_1_and_2.py``, ``zero/stage3.py``,
``bf16_optimizer.py``). Each storage counts whole and once, because that is what memory holds.

Also the highest use of a GPU, in the attempt and in each second, or what is resident on a CPU.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scaletrain_cli.engine.model.base import TrainedModel
from scaletrain_cli.engine.optim.deepspeed_optimizer import counter_names
from scaletrain_cli.worker.telemetry import resident_bytes


class SavedActivations:
    """Bytes that one forward pass saves, of a transformer that through the blocks; None before the first pass.

    Each storage counts once, without weights. A recomputed block passes its inputs to autograd before it hides the rest
    from these hooks (torch.utils.checkpoint, ``_NoopSaveInputs``), so only its inputs count. Offloaded tensors do not
    count on a GPU; on a CPU they are seen by the offloading hooks only.
    """

    def __init__(self, model: TrainedModel) -> None:
        self.bytes: int | None = None
        self._parameters = list(model.parameters())
        self._storages: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context around the forward pass."""
        with saved_tensors_hooks(self._note, lambda kept: kept):
            yield
        self.bytes = sum(self._storages.values())

    def _note(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        # ZeRO-3 gathers each weight for its own operations only, so its address is looked up each time.
        if address not in self._storages and all(
            parameter.untyped_storage().data_ptr() != address for parameter in self._parameters
        ):
            self._storages[address] = tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def watching_activations(model: TrainedModel) -> Iterator[SavedActivations]:
    """A context in which the first call of the method ``model.measured`` is counted."""
    saved, method = SavedActivations(model), getattr(model, model.measured)

    def watched(*arguments: Any, **named: Any) -> Any:
        delattr(model, model.measured)  # restores the method of the class
        with saved.counting():
            return method(*arguments, **named)

    setattr(model, model.measured, watched)
    try:
        yield saved
    finally:
        model.__dict__.pop(model.measured, None)


# Buffers of BatchNorm, which count as weights.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Lists or dictionaries of tensors on DeepSpeed's optimizers.
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat", "grad_partitions_flat_buffer")
_OFFLOADED_GRADIENTS = ("accumulated_grads_in_cpu",)
_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
_OFFLOADED_COPIES = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes on one rank. ``host``: offloaded parts of all three."""

    parameters: int
    gradients: int
    optimizer_states: int
    host: int

    @property
    def on_device(self) -> int:
        return self.parameters + self.gradients + self.optimizer_states


def model_state_bytes(engine: Any) -> ModelStateBytes:
    """Return what the rank of this DeepSpeed engine holds now; Adam's hooks exist after the first step."""
    counted = _Counter(engine.device.type == "cpu")
    wrapper, parameters = engine.optimizer, list(engine.module.parameters())
    states_away, weights_away = _offloads(engine.zero_offload_optimizer()), _offloads(engine.zero_offload_param())
    inner = getattr(wrapper, "optimizer", wrapper)
    masters = [*_held(wrapper, _MASTERS), *(p for group in inner.param_groups for p in group["params"])]
    held = counted.add((p.data for p in parameters), away=False)
    held += counted.add((b for name, b in engine.module.named_buffers() if name.endswith(_STATISTICS)), away=False)
    held += counted.add(_shards(parameters), away=weights_away)
    counted.add(_held(wrapper, _OFFLOADED_COPIES), away=True)
    gradients = counted.add((p.grad for p in parameters if p.grad is not None), away=False)
    gradients += counted.add(_tensors([getattr(p, "grad_accum", None) for p in parameters]), away=False)
    gradients += counted.add(_held(wrapper, _OFFLOADED_GRADIENTS), away=True)
    gradients += counted.add((m.grad for m in masters if m.grad is not None), away=states_away)
    # Stage 3 offloads gradients with the optimizer; stages 1 and 2 only those that they have copied to the host.
    gradients += counted.add(_held(wrapper, _GRADIENTS), away=states_away and engine.zero_optimization_stage() == 3)
    states = counted.add(masters, away=states_away)
    counters = counter_names(inner)
    elementwise = [[part for name, part in state.items() if name not in counters] for state in inner.state.values()]
    states += counted.add(_tensors(elementwise), away=states_away)
    return ModelStateBytes(held, gradients, states, counted.host)


class WatchedStates:
    """The bytes counted; None before the first update."""

    def __init__(self) -> None:
        self.bytes: ModelStateBytes | None = None


@contextmanager
def watching_model_states(engine: Any) -> Iterator[WatchedStates]:
    """A context in which the states are counted at each update.

    The gradients of stages 0 and 1 are counted when they are complete, before they are reduced, because a rank of stage
    1 then drops those that it does not own.
    """
    watched = WatchedStates()
    complete: list[int] = []

    def before_reduction() -> None:
        if engine.zero_optimization_stage() <= 1 and engine.is_gradient_accumulation_boundary():
            complete[:] = [model_state_bytes(engine).gradients]

    def before_update() -> None:
        held = model_state_bytes(engine)
        watched.bytes = replace(held, gradients=complete[0]) if complete else held

    hooks = {
        "allreduce_gradients": before_reduction,
        "_bf16_reduce_grads": before_reduction,  # of a pipeline
        "_take_model_step": before_update,
    }
    for name, count in hooks.items():
        if hasattr(engine, name):
            setattr(engine, name, _counting_before(count, getattr(engine, name)))
    try:
        yield watched
    finally:
        for name in hooks:
            engine.__dict__.pop(name, None)


def _counting_before(count: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        count()
        return method(*arguments, **named)

    return wrapped


class _Counter:
    """Counts each storage once, on the device or on the host."""

    def __init__(self, device_is_cpu: bool) -> None:
        self.host = 0
        self._device_is_cpu = device_is_cpu
        self._seen: set[tuple[torch.device, int]] = set()

    def add(self, tensors: Iterable[Tensor], *, away: bool) -> int:
        """Return the bytes on the device that were not counted before.

        ``away``: the tensors are offloaded, which cannot be read from a CPU tensor.
        """
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if tensor.device.type == "meta" or not storage.nbytes() or key in self._seen:
                continue
            self._seen.add(key)
            if away if self._device_is_cpu else tensor.device.type == "cpu":
                self.host += storage.nbytes()
            else:
                total += storage.nbytes()
        return total


def _offloads(config: Any) -> bool:
    return config is not None and str(config.device) not in ("none", "OffloadDeviceEnum.none")


def _shards(parameters: list[torch.nn.Parameter]) -> Iterator[Tensor]:
    """Yield the shards that ZeRO-3 keeps of parameters that are not gathered, and those of a second copy (hpZ)."""
    for name in ("ds_tensor", "ds_secondary_tensor"):
        yield from _tensors([getattr(parameter, name, None) for parameter in parameters])


def _held(owner: Any, names: tuple[str, ...]) -> Iterator[Tensor]:
    for name in names:
        yield from _tensors(getattr(owner, name, None))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


logger = logging.getLogger(__name__)

# The highest use before torch's own peak was last reset, in bytes by device; torch has one peak for all who read it.
_earlier_peaks: dict[torch.device, int] = {}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes allocated on the GPU since the first update, or resident on a CPU."""
    if device.type == "cuda":
        return max(_earlier_peaks.get(device, 0), torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(device: torch.device) -> None:
    """Measure the peak from now on, such as from the first update."""
    _earlier_peaks.pop(device, None)
    torch.cuda.reset_peak_memory_stats(device)


class MemorySampler:
    """Reads the memory of this rank, at most once per ``interval_seconds``."""

    def __init__(
        self, device: torch.device, interval_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._interval_seconds, self._clock = device, interval_seconds, clock
        self._read = -interval_seconds

    def due(self) -> dict[str, float]:
        """Return the columns of memory in bytes, or nothing if they were read less than an interval ago.

        ``memory_bytes``: on a GPU the most that was allocated since the last reading, on a CPU what is resident now.
        ``memory_reserved_bytes``: what the caching allocator of a GPU holds. ``allocation_retries``: how often it had
        to return memory to the device and try again, since the start of the process.
        """
        now = self._clock()
        if now - self._read < self._interval_seconds:
            return {}
        self._read = now
        try:
            return self._columns()
        except (OSError, RuntimeError) as error:  # of an allocator without statistics
            logger.warning("the memory of this rank is not measured: %s", error)
            self._interval_seconds = math.inf
            return {}

    def _columns(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {"memory_bytes": float(resident_bytes())}
        stats = torch.cuda.memory_stats(self._device)
        peak = stats["allocated_bytes.all.peak"]
        _earlier_peaks[self._device] = max(_earlier_peaks.get(self._device, 0), peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "memory_bytes": float(peak),
            "memory_reserved_bytes": float(stats["reserved_bytes.all.current"]),
            "allocation_retries": float(stats["num_alloc_retries"]),
        }
