"""Norms of each layer at some steps: gradient, weights, update, activations, and the share of units that are dead.

Each rank sums over the parts of parameters that it saves in a checkpoint, of which every element has one owner in any
layout; one all-reduce on the host adds the sums, at these steps only. The gradient is the one that the optimizer gets:
averaged over replicas and micro-batches, unscaled; clipping by norm is undone, that by value comes after.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scaletrain_cli.engine.checkpoint.flat_shards import ShardedState
from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.metrics.step_measures import fetched_later
from scaletrain_cli.engine.model.base import CausalLM, TrainedModel
from scaletrain_cli.engine.model.materialization import matrices_of
from scaletrain_cli.engine.model.rope import on_device
from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import RunSpec

FIRST_STEP = 10  # of an attempt; the first steps compile, allocate and fill caches
LARGEST_SHARE = 0.001  # of the time of training
_LEAST_STEPS, _MOST_STEPS = 100, 1000  # between two measurements, where ``telemetry.layers_every`` is auto
_MOST_COPIED = 2**24  # weights that a rank keeps until they are updated: 64 MiB
_DEAD = 1e-3  # a unit whose largest activation is below this, times the root mean square of all units
_FEWEST_ROWS = 1024  # tokens, or places in images, before a unit that was never active counts as dead
_STEPS_TIMED = 20

# Sums over the elements of a layer.
_COLUMNS = (
    *("gradient", "weight", "copied", "change"),  # squares; of the weights that were copied, and of their change
    *("activation", "activations"),  # squares and number
    *("dead", "units"),
)
logger = logging.getLogger(__name__)
_AT = {name: number for number, name in enumerate(_COLUMNS)}


class LayerSums:
    """The sums of one step on one rank, [rows, columns] on each device that has some of it."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._by_device: dict[torch.device, Tensor] = {}

    def add(self, column: str, layers: Tensor, values: Tensor) -> None:
        """Add values [n] to their layers [n], on the same device."""
        self.on(values.device)[:, _AT[column]].index_add_(0, layers, values.double())

    def on(self, device: torch.device) -> Tensor:
        """Return the sums on a device."""
        if device not in self._by_device:
            self._by_device[device] = torch.zeros(self._rows, len(_COLUMNS), dtype=torch.float64, device=device)
        return self._by_device[device]

    def fetch(self) -> Callable[[], list[float]]:
        """Return a function that waits for the sums, and returns those of all devices, row by row."""
        waits = [fetched_later(sums.flatten()) for sums in self._by_device.values()]
        return lambda: [sum(values) for values in zip(*(wait() for wait in waits), strict=True)]


def columns_of(sums: Sequence[float], gradient_factor: float) -> dict[str, float]:
    """Return the columns of a layer from its sums; without those that were not measured.

    ``gradient_factor``: by which clipping has made the gradient too small.
    """
    columns, of = dict[str, float](), dict(zip(_COLUMNS, sums, strict=True))
    if of["weight"] > 0 or of["gradient"] > 0:
        columns["weight_norm"] = math.sqrt(of["weight"])
        columns["gradient_norm"] = gradient_factor * math.sqrt(of["gradient"])
    if of["copied"] > 0:
        columns["update_ratio"] = math.sqrt(of["change"] / of["copied"])
    if of["activations"] > 0:
        columns["activation_rms"] = math.sqrt(of["activation"] / of["activations"])
    if of["units"] > 0:
        columns["dead_share"] = of["dead"] / of["units"]
    return {name: value for name, value in columns.items() if math.isfinite(value)}


@dataclass
class _Units:
    """Activations of the units of a block in a step: largest of each [units], and their sum of squares."""

    largest: Tensor
    square: Tensor
    rows: int


@dataclass
class _ShardParts:
    """The parts of a flat shard that this rank counts: their places, and layers [parts] on its device."""

    places: list[tuple[int, int]]  # (first element, length)
    layers: Tensor
    stride: int  # of the elements that are copied

    def views(self, values: Tensor) -> list[Tensor]:
        """Return the parts of a tensor that is flat, or flattened."""
        flat = values.detach().reshape(-1)
        return [flat.narrow(0, *place) for place in self.places]


class LayerProbe:
    """Measures one step on one rank: hooks of modules and of the optimizer, which are removed at its end."""

    def __init__(self, names: Mapping[str, int], composed: Composed, states: ShardedState, *, compiled: bool) -> None:
        """``names``: the rows of the layers of the run. ``compiled``: hooks inside of blocks would not be called."""
        self.seconds = 0.0  # of the host
        self._failed = False
        self.sums = LayerSums(len(names) + 1)
        self._names, self._engine = names, composed.engine
        self._units: dict[str, _Units] = {}
        self._copies: list[tuple[_ShardParts, Tensor, list[Tensor]]] = []
        self._hooks: list[RemovableHandle] = []
        with self._measuring():
            self._layers = layers_of_model(composed.model)
            numel = sum(placed.slice.numel for shard in states.shards for placed in shard.owned)
            stride = -(-numel // _MOST_COPIED) | 1  # odd, so that all columns of a matrix are among the elements copied
            parts = {}
            for shard, weight in zip(states.shards, master_weights(self._engine), strict=True):
                rows = [self._names[self._layers.of_matrix[placed.slice.name]] for placed in shard.owned]
                places = [(placed.offset, placed.slice.numel) for placed in shard.owned]
                if places:
                    parts[id(weight)] = _ShardParts(places, on_device(rows, weight.device), stride)
            self._parts = parts
            for name, module, place in self._layers.activations:
                self._hooks.append(_hook(module, place, self._observing(name)))
            for name, block in self._layers.blocks.items():
                units, place = units_of_block(block)
                if units is not None and (units is block or not compiled):
                    axis = 1 if units is block or isinstance(units, nn.Conv2d) else -1
                    self._hooks.append(_hook(units, place, self._observing_units(name, axis)))
            optimizer = composed.optimizer
            before = optimizer.register_step_pre_hook(self._before_update)
            hooks: Any = optimizer._optimizer_step_pre_hooks  # an ordered dictionary
            hooks.move_to_end(before.id, last=False)  # before gradients are clamped
            self._hooks += [before, optimizer.register_step_post_hook(self._after_update)]

    @torch.no_grad()
    def close(self, norm: Tensor | float, device: torch.device) -> Callable[[], list[float]]:
        """Remove the hooks; return a function that waits for the sums of this rank, and returns them row by row.

        The last row, on ``device``, has the norm of the whole gradient and 1. After an error of a hook all are NaN, so
        that every rank knows that this one has none.
        """
        for hook in self._hooks:
            hook.remove()
        fetch: Callable[[], list[float]] = partial(list, [math.nan] * (len(self._names) + 1) * len(_COLUMNS))
        if self._failed:
            return fetch
        with self._measuring():
            for name, units in self._units.items():
                if units.rows < _FEWEST_ROWS:
                    continue
                count = units.largest.numel()
                rms = (units.square / (units.rows * count)).sqrt()
                row = _row(self._names[name], rms.device)
                self.sums.add("dead", row, (units.largest < _DEAD * rms).sum().view(1))
                self.sums.add("units", row, torch.full((1,), float(count), device=rms.device))
            last = self.sums.on(device)[-1]
            last[0], last[1] = float(norm), 1.0
            fetch = self.sums.fetch()
        return fetch

    @torch.no_grad()
    def _before_update(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        if self._failed:
            return
        with self._measuring():
            for weight in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                parts = self._parts.get(id(weight))
                if parts is None or weight.grad is None:
                    continue
                layers = parts.layers.to(weight.device)
                views = parts.views(weight)
                self.sums.add("gradient", layers, _squares(parts.views(weight.grad)))
                self.sums.add("weight", layers, _squares(views))
                self._copies.append((parts, weight, [view[:: parts.stride].clone() for view in views]))

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        with self._measuring():
            for parts, weight, copies in self._copies:
                layers = parts.layers.to(weight.device)
                self.sums.add("copied", layers, _squares(copies))
                torch._foreach_sub_(copies, [view[:: parts.stride] for view in parts.views(weight)])
                self.sums.add("change", layers, _squares(copies))
            self._copies.clear()

    def _observing(self, name: str) -> Callable[[Tensor], None]:
        row: Tensor | None = None

        def observe(values: Tensor) -> None:
            nonlocal row
            if row is None:
                row = _row(self._names[name], values.device)
            square = torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
            self.sums.add("activation", row, square.view(1))
            self.sums.on(values.device)[self._names[name], _AT["activations"]] += values.numel()

        return self._timed(observe)

    def _observing_units(self, name: str, axis: int) -> Callable[[Tensor], None]:
        def observe(values: Tensor) -> None:
            others = [dim for dim in range(values.dim()) if dim != axis % values.dim()]
            largest = torch.linalg.vector_norm(values, math.inf, dim=others)  # without a copy in another order
            square = torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
            rows = values.numel() // values.shape[axis]
            if (before := self._units.get(name)) is not None:
                largest = torch.maximum(before.largest, largest)
                square = before.square + square
            self._units[name] = _Units(largest, square, rows + (before.rows if before is not None else 0))

        return self._timed(observe)

    def _timed(self, observe: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def timed(values: Tensor) -> None:
            if not self._failed:
                with self._measuring(), torch.no_grad():
                    observe(values.detach())

        return timed

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """Count the seconds of a hook. An error, such as of a GPU without memory left, ends this measurement only."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failed = True
            self._copies.clear()
            logger.warning("the layers are not measured: %s: %s", type(error).__name__, error)
        self.seconds += time.perf_counter() - began


def _row(number: int, device: torch.device) -> Tensor:
    """Return the number of a row, [1], on a device; unlike ``torch.tensor`` it does not wait for it."""
    return torch.full((1,), number, dtype=torch.int64, device=device)


def _hook(module: nn.Module, place: str, observe: Callable[[Tensor], None]) -> RemovableHandle:
    """Observe the first input of a module in its forward passes, or its output."""

    def first_input(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            observe(inputs[0])

    def output(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            observe(outputs)

    return module.register_forward_pre_hook(first_input) if place == "input" else module.register_forward_hook(output)


def _squares(tensors: list[Tensor]) -> Tensor:
    """Return the squared norms of tensors, [n] in double precision."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double().square()


@dataclass(frozen=True)
class MeasuredLayers:
    """The columns of the layers of a run in optimizer step ``step``, the same on every rank."""

    step: int
    columns: dict[str, dict[str, float]]


class LayerMeasures:
    """Chooses the steps that are measured, the same on every rank, and adds the sums of all ranks.

    ``telemetry.layers_every: auto``: step 10 of the attempt, and then at an interval of 100 to 1000 steps that follows
    from what a measurement takes: at most 0.1 % of the time, or 1000 steps.
    """

    def __init__(self, context: RankContext, composed: Composed, mesh: Mesh, first_step: int) -> None:
        """``first_step``: the first one that this attempt trains."""
        self._composed, self._mesh, self._consensus = composed, mesh, context.consensus
        self._device, self._compiled, spec = context.device, context.layout.compile, context.spec
        self._lag = 2 if self._device.type == "cuda" else 0  # in steps: by then the device is past the measured one
        self._every = spec.telemetry.layers_every
        self._due = first_step + FIRST_STEP - 1
        self.interval = _LEAST_STEPS  # of ``auto``, after the latest measurement
        self.names = layers_of_run(spec, composed.model, mesh.pipeline.size)
        self._rows = {name: number for number, name in enumerate(self.names)}
        self._probe: LayerProbe | None = None
        self._pending: _Pending | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=_STEPS_TIMED)

    def begin(self, step: int) -> None:
        """Begin step ``step`` (1-based), and measure it if it is due."""
        if self._pending is not None and self._pending.step >= step:  # the run was rolled back
            self._pending = None
        if self._pending is None and self._is_due(step):
            states = ShardedState(self._composed.engine, self._composed.model, self._mesh)
            self._probe = LayerProbe(self._rows, self._composed, states, compiled=self._compiled)

    def end(self, step: int, norm: Tensor | float, largest_norm: float) -> None:
        """End the step. ``norm``: of the whole gradient; ``largest_norm``: that it was clipped to, 0 for none."""
        if self._probe is not None:
            fetch = self._probe.close(norm, self._device)
            self._pending, self._probe = _Pending(step, fetch, largest_norm, self._probe.seconds), None

    def step_took(self, step: int, seconds: float) -> None:
        """Record how long a step took on this rank."""
        self._times.append((step, seconds))

    def finished(self, step: int) -> MeasuredLayers | None:
        """Return a measurement that is complete after step ``step``, once. Collective where there is one."""
        if self._pending is None or step < self._pending.step + self._lag:
            return None
        measured, self._pending = self._pending, None
        cost, usual = self._cost(measured)
        sums = self._consensus.total([*measured.fetch(), cost, usual])
        width = len(_COLUMNS)
        (norm, ranks, *_), (cost, usual) = sums[-2 - width : -2], sums[-2:]
        if math.isnan(ranks):  # a rank could not measure its layers: none does from now on
            self._every = 0
        share = cost / max(usual, 1e-9)  # of a step; the same on all ranks, as it is of all of them
        self.interval = min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(share / LARGEST_SHARE)))
        self._due = measured.step + self.interval
        factor = 1.0
        if measured.largest_norm > 0 and math.isfinite(norm):
            factor = max(1.0, (norm / ranks + 1e-6) / measured.largest_norm)  # as DeepSpeed and torch clip
        groups = self._mesh.groups.size  # of local SGD, whose sums are of as many models: a mean of their squares
        columns = {
            name: columns_of([total / groups for total in sums[number * width : (number + 1) * width]], factor)
            for number, name in enumerate(self.names)
        }
        return MeasuredLayers(measured.step, {name: values for name, values in columns.items() if values})

    def _is_due(self, step: int) -> bool:
        if self._every == "auto":
            return step >= self._due
        return self._every > 0 and step % self._every == 0

    def _cost(self, measured: "_Pending") -> tuple[float, float]:
        """Return the seconds that the measurement took on this rank, and those of a step without one.

        On a GPU the host only enqueues it: there what the step took more than the others counts, if it is known.
        """
        others = [seconds for step, seconds in self._times if step != measured.step]
        usual = sum(others) / len(others) if others else 0.0
        cost = measured.host_seconds
        if self._device.type == "cuda" and others:
            cost = max([cost, *(seconds - usual for step, seconds in self._times if step == measured.step)])
        return cost, usual


@dataclass(frozen=True)
class _Pending:
    """A step that was measured, whose sums the ranks have not added yet."""

    step: int
    fetch: Callable[[], list[float]]
    largest_norm: float
    host_seconds: float


EMBEDDING, HEAD = "embedding", "head"
# Modules of a block whose inputs are the activations of its MLP's hidden units, by family.
_SECOND_LINEARS = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "output.dense", "pwconv2")
# Modules whose inputs are the last hidden states of a model.
_HEADS = ("lm_head", "classifier")


@dataclass
class ModelLayers:
    """The layers of one rank's part of a model.

    ``of_matrix``: the layer of each matrix, by its name in a checkpoint. ``activations``: layer, module, and whether
    its ``input`` or its ``output`` is observed.
    """

    blocks: dict[str, nn.Module]
    of_matrix: dict[str, str] = field(default_factory=dict)
    activations: list[tuple[str, nn.Module, str]] = field(default_factory=list)


def block_layer(key: str) -> str:
    """Return the name of the layer of a block, given its key in ``TrainedModel.blocks``."""
    return f"block {key}"


def layers_of_model(model: TrainedModel) -> ModelLayers:
    """Return the layers of this rank's part of a model.

    Parameters outside of the blocks belong to ``embedding`` before the first block, to ``head`` after the last one, and
    in between to the next block. Where several parts of a model have blocks, as both towers of CLIP, their embeddings
    and heads are named by the part; a part without blocks is a layer of its own. A tied weight is of the embedding.
    """
    layers = ModelLayers({block_layer(key): block for key, block in model.blocks.items()})
    block_of = {id(weight): name for name, block in layers.blocks.items() for weight in block.parameters()}
    names = [(name, parameter) for name, parameter in model.named_parameters()]
    first_block: dict[str, str] = {}  # of each part of the model that has some, in order
    for name, parameter in names:
        if (layer := block_of.get(id(parameter))) is not None:
            first_block.setdefault(_part(name), layer)
    matrices = {id(parameter): members for parameter, members in matrices_of(model).items()}
    for index, (_, parameter) in enumerate(names):
        if (layer := block_of.get(id(parameter))) is None:
            layer = _outside(index, names, block_of, first_block)
        layers.of_matrix |= dict.fromkeys((matrix.name for matrix in matrices[id(parameter)]), layer)
    if not isinstance(model, CausalLM) or "0" in model.blocks:  # not on later pipeline stages
        for part, first in first_block.items():
            embedding = f"{part} {EMBEDDING}" if len(first_block) > 1 else EMBEDDING
            layers.activations.append((embedding, layers.blocks[first], "input"))
    layers.activations += [(name, block, "output") for name, block in layers.blocks.items()]
    for path in _HEADS:
        if isinstance(head := getattr(model, path, None), nn.Module):
            layers.activations.append((HEAD, head, "input"))
    return layers


def layers_of_run(spec: RunSpec, model: TrainedModel, pipeline_stages: int) -> list[str]:
    """Return the names of all layers of the run in order, the same on every rank."""
    if pipeline_stages > 1:
        return [EMBEDDING, *[block_layer(str(number)) for number in range(spec.transformer.num_hidden_layers)], HEAD]
    own = layers_of_model(model)
    return list(dict.fromkeys([*own.of_matrix.values(), *(name for name, _, _ in own.activations)]))


def units_of_block(block: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the module whose input or output has the hidden units of a block, [..., units]; None if it has none.

    Of a block of convolutions the units are the channels of its output, [images, channels, height, width].
    """
    modules = dict(block.named_modules())
    for path in _SECOND_LINEARS:
        if path in modules:
            return modules[path], "input"
    convolves = any(isinstance(module, nn.Conv2d) for module in modules.values())
    return (block, "output") if convolves else (None, "")


def _part(name: str) -> str:
    return name.partition(".")[0]


def _outside(
    index: int, names: list[tuple[str, nn.Parameter]], block_of: dict[int, str], with_blocks: Collection[str]
) -> str:
    part = _part(names[index][0])
    several = len(with_blocks) > 1
    if several and part not in with_blocks:
        return part
    of_part = [number for number, (name, _) in enumerate(names) if not several or _part(name) == part]
    in_blocks = [number for number in of_part if id(names[number][1]) in block_of]
    prefix = f"{part} " if several else ""
    if not in_blocks or index > in_blocks[-1]:
        return prefix + HEAD
    if index < in_blocks[0]:
        return prefix + EMBEDDING
    return block_of[id(names[next(number for number in in_blocks if number > index)][1])]
