"""Give a model on the meta device its weights, module by module, from a weight source.

With ZeRO-3 each module is sharded as soon as it is materialized, so that no rank ever holds the whole model.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from scaletrain_cli.engine.parallel.mesh import ShardSpec, shard_spec_of

# Small enough for one CUDA launch whose threads do not loop: the order of a loop, and so the values, would depend on
# the size of the GPU. Small enough for a CPU's cache, too.
_CHUNK_NUMEL = 2**18


class Initial(NamedTuple):
    """The first values of a tensor: ``constant``, or drawn from Normal(0, ``std``) or Uniform(-``bound``, ``bound``).

    At most one of ``std`` and ``bound`` is above 0; the constant then has no effect.
    """

    constant: float = 0.0
    std: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class DrawnWeights:
    """A weight source: each tensor is a function of seed, name and whole shape; ``initial`` has its distribution.

    ``device`` draws the values; a CPU and a GPU draw different ones.
    """

    seed: int
    device: torch.device
    initial: Callable[[str, tuple[int, ...]], Initial]

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return this rank's shard of a parameter or a stored buffer, fp32. It is drawn in chunks of whole rows."""
        constant, std, bound = self.initial(name, whole_shape)
        if not std and not bound:
            return torch.full(_local(whole_shape, spec), constant, device=self.device)
        *leading, columns = whole_shape
        rows, kept_columns = torch.arange(torch.Size(leading).numel()), None
        whole_rows = len(rows)
        if spec is not None and spec.dim == len(leading):
            kept_columns = ShardSpec(0, spec.ranks, spec.rank, spec.parts).take(torch.arange(columns)).to(self.device)
        elif spec is not None:
            rows = spec.take(rows.view(leading)).flatten()  # ascending, as all shards of a row-major order are
        kept = torch.empty(_local(whole_shape, spec), device=self.device)
        flat, generator = kept.view(len(rows), -1), torch.Generator(self.device)
        height = max(1, _CHUNK_NUMEL // columns)
        scratch, start = torch.empty(min(height, whole_rows), columns, device=self.device), 0
        while start < len(rows):
            chunk = int(rows[start]) // height
            first, last = chunk * height, min((chunk + 1) * height, whole_rows)
            end = start + int(torch.searchsorted(rows[start : start + height], last))
            generator.manual_seed(_chunk_seed(self.seed, name, chunk))
            drawn = scratch[: last - first]
            if std:
                drawn.normal_(0.0, std, generator=generator)
            else:
                drawn.uniform_(-bound, bound, generator=generator)
            wanted = rows[start:end] - first
            drawn = drawn if end - start == last - first else drawn[wanted.to(self.device)]
            flat[start:end] = drawn if kept_columns is None else drawn[:, kept_columns]
            start = end
        return kept


def _chunk_seed(seed: int, name: str, chunk: int) -> int:
    """Return 63 bits that are independent of those of other chunks."""
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _local(whole_shape: tuple[int, ...], spec: ShardSpec | None) -> tuple[int, ...]:
    return tuple(spec.held(n) if spec and dim == spec.dim else n for dim, n in enumerate(whole_shape))


class WeightSource(Protocol):
    """A source of every parameter, by Hugging Face name."""

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return this rank's shard; ``spec`` is None if every rank has the whole."""


@dataclass(frozen=True)
class BaseWeights:
    """The parameters called ``names`` from one source, and all others from another one."""

    names: frozenset[str]
    base: WeightSource
    others: WeightSource

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        return (self.base if name in self.names else self.others).read(name, whole_shape, spec)


@dataclass(frozen=True)
class WeightsOfParts:
    """The parameters below some modules of a model from sources of their own, and all others from another one.

    ``parts``: by the name of the module, which the names in its source do not have.
    """

    parts: Mapping[str, WeightSource]
    others: WeightSource

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        module, _, rest = name.partition(".")
        if module in self.parts:
            return self.parts[module].read(rest, whole_shape, spec)
        return self.others.read(name, whole_shape, spec)


class WeightsOfModel:
    """The weights of a model that was sharded in the same way; each is freed once it has been read.

    Under ZeRO-3 it gathers them one by one, so that all ranks must read the same names in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            matrix.name: (parameter, matrix)
            for parameter, matrices in matrices_of(model).items()
            for matrix in matrices
        }
        self._unread = {parameter: len(matrices) for parameter, matrices in matrices_of(model).items()}
        self._buffers = {matrix.name: buffer for buffer, matrix in stored_buffers(model)}

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return a copy of this rank's shard of a parameter."""
        if name in self._buffers:
            return self._buffers[name].clone()
        parameter: Any
        parameter, matrix = self._places[name]
        partitioned = hasattr(parameter, "ds_tensor")
        if partitioned:
            parameter.all_gather()
        values: Tensor = parameter.data.view(-1)[matrix.start : matrix.stop].view(matrix.shape).clone()
        if partitioned:
            parameter.partition()
        self._unread[parameter] -= 1
        if self._unread[parameter] == 0:
            (parameter.ds_tensor if partitioned else parameter).data = values.new_empty(0)
        return values


Partition = Callable[[nn.Module], None]


@torch.no_grad()
def materialize(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    partition: Partition | None = None,
) -> None:
    """Replace each parameter on the meta device by one with values from ``source``.

    ``dtype`` is that of the forward pass, except of parameters with an ``own_dtype``: DeepSpeed would cast to it, but
    hold both for a while, and does not cast sharded parameters. Attributes and ties are kept. Buffers that belong to
    the weights are read in their own dtype; others have values already, and are moved. ``partition`` is called with
    each module whose own parameters were replaced. Collective if ``partition`` is: every rank of its group visits the
    same modules.
    """
    real: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, outline in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not outline.is_meta:
                continue
            if outline not in real:
                values = torch.empty(outline.shape, device=device, dtype=getattr(outline, "own_dtype", dtype))
                for matrix in matrices_in(module, prefix, name, outline):
                    shard = source.read(matrix.name, matrix.whole_shape, matrix.shard_spec)
                    if shard.shape != matrix.shape:
                        raise ValueError(f"{matrix.name}: {tuple(shard.shape)} values for {matrix.shape}")
                    values.view(-1)[matrix.start : matrix.stop].copy_(shard.reshape(-1))
                real[outline] = nn.Parameter(values, requires_grad=outline.requires_grad)
                real[outline].__dict__.update(outline.__dict__)  # the shard spec, and DeepSpeed's marks
            setattr(module, name, real[outline])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and name not in module._non_persistent_buffers_set:
                values = source.read(f"{prefix}.{name}" if prefix else name, tuple(buffer.shape), None)
                setattr(module, name, values.to(device=device, dtype=buffer.dtype, copy=True))
            else:
                setattr(module, name, buffer.to(device))
        if partition is not None:
            partition(module)


def stored_buffers(model: nn.Module) -> "Iterator[tuple[Tensor, Matrix]]":
    """Yield the buffers that belong to the weights, which every rank has whole and no gradient trains."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                shape = tuple(buffer.shape)
                yield buffer, Matrix(f"{prefix}.{name}" if prefix else name, shape, None, shape, 0)


class ExactBuffers(nn.Module):
    """A module whose buffers keep their dtype when a model is cast; they are moved only."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.device != buffer.device and buffer.is_meta:  # which has no values
                buffer = torch.empty_like(buffer, device=moved.device)
            self._buffers[name] = buffer.to(moved.device)
        return self


def named_weights(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the names and whole shapes of all that a file of weights has: parameters, then buffers."""
    buffers = {matrix.name: matrix.whole_shape for _, matrix in stored_buffers(model)}
    return {**dict(named_matrices(model)), **buffers}


def named_matrices(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the names and whole shapes of the parameters that ``materialize`` reads."""
    for matrices in matrices_of(model).values():
        yield from ((matrix.name, matrix.whole_shape) for matrix in matrices)


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the Hugging Face names of the matrices in each parameter, in order; of a tied head those of the table."""
    return {parameter: [matrix.name for matrix in matrices] for parameter, matrices in matrices_of(model).items()}


def matrices_of(model: nn.Module) -> "dict[nn.Parameter, list[Matrix]]":
    """Return the matrices in each parameter of a model, in the order of the model."""
    matrices: dict[nn.Parameter, list[Matrix]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in matrices:
                matrices[parameter] = list(matrices_in(module, prefix, name, parameter))
    return matrices


class Matrix(NamedTuple):
    """A named matrix, and the elements of a rank's flattened parameter that hold it."""

    name: str
    whole_shape: tuple[int, ...]
    shard_spec: ShardSpec | None
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def matrices_in(module: nn.Module, prefix: str, name: str, parameter: nn.Parameter) -> Iterator[Matrix]:
    """Yield the matrices of a parameter: one, or several if it is a stack of them (see ``moe.Experts.matrices``)."""
    path, spec = f"{prefix}." if prefix else "", shard_spec_of(parameter)
    local: torch.Size = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties parameters that are not in use
    shape = tuple(local) if spec is None else spec.whole_shape(local)
    matrices: Callable[[str], list[list[str]]] | None = getattr(module, "matrices", None)
    if matrices is None:
        yield Matrix(path + name, shape, spec, tuple(local), 0)
        return
    start = 0
    for joined in matrices(name):
        part = None if spec is None else ShardSpec(spec.dim - 1, spec.ranks, spec.rank)
        for matrix in joined:
            whole_shape = (shape[1] // len(joined), *shape[2:])
            member = Matrix(path + matrix, whole_shape, part, (local[1] // len(joined), *local[2:]), start)
            yield member
            start = member.stop


def zero3_partition(config: dict[str, Any], mpu: Any) -> Partition:
    """Return a function that shards a module's parameters over the data-parallel ranks, as DeepSpeed does.

    ``config`` and ``mpu`` are those that ``deepspeed.initialize`` gets later.
    """
    from deepspeed import zero
    from deepspeed.utils import groups

    group = mpu.get_data_parallel_group() if mpu is not None else None
    # with a second copy of the weights: of an earlier stage of the run, as DeepSpeed creates it only once
    neighbors = groups._get_zero_param_intra_parallel_group()
    first: list[nn.Parameter] = []

    def partition(module: nn.Module) -> None:
        whole = [p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")]
        if whole and not first:
            # a list of its own, because Init would descend into children that are still on the meta device
            zero.Init(
                nn.ParameterList(whole), group, config_dict_or_path=config, mpu=mpu, zero_param_parallel_group=neighbors
            )
            first.append(whole[0])
        elif whole:  # in the same context, because another Init would allocate its own swap buffers
            first[0].convert_to_zero_parameters(param_list=whole)  # type: ignore[attr-defined]

    return partition
