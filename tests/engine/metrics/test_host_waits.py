from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.metrics.noise_scale import NoiseScale
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from tests.engine.ranks import on_ranks

ACCUMULATION = 2
EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=16")
MEASURED = ("training.gradient_clipping=1.0", "training.gradient_clipping_by=adaptive")
CASES: list[tuple[str, int, tuple[str, ...]]] = [("fp32", stage, ()) for stage in range(4)]
CASES += [("bf16", stage, ()) for stage in (1, 2, 3)]
CASES += [("fp32", stage, (*EXPERTS, *MEASURED)) for stage in (0, 1)]
CASES += [("bf16", stage, (*EXPERTS, *MEASURED)) for stage in (1, 3)]
CASES += [
    ("bf16", 2, ("training.gradient_clipping=1.0", "model.scale_embedding=true", "training.cross_entropy=chunked")),
    ("bf16", 1, ("training.gradient_clipping=1.0", "layout.activation_checkpointing=full")),
]
SPEC = """
schema: scaletrain/v1
name: waits
model: {family: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32,
        vocab_size: 64, seq_len: 8}
data: {source: python-stdlib, tokenizer: {vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 1, steps: 3}
cluster: {gpu: cpu, gpus_per_node: 1}
"""


class Waits(TorchDispatchMode):
    """Records on a CPU which code would wait for a GPU: it copies a tensor, or reads a value or a shape from one.

    A copy in host memory, and what is computed of it alone, is read without waiting. A tensor that is made of numbers
    counts too, because their copy to a GPU waits. torch's optimizers read values on a CPU, and not on a GPU.
    """

    _TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host: list[Tensor] = []  # kept, so that no other tensor gets the address of one
        self._addresses: set[int] = set()
        self._active = False

    def __enter__(self) -> Waits:
        self._active = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        in_host_memory = bool(tensors) and all(map(self.is_in_host_memory, tensors))
        indexes = func is torch.ops.aten.index.Tensor
        masks = indexes and any(index is not None and index.dtype == torch.bool for index in args[1])
        reads = not indexes and bool(self._TAGS & set(func.tags)) and not in_host_memory
        made = func is torch.ops.aten.lift_fresh.default
        if made or masks or reads:
            self.note(str(func))
        found = func(*args, **(kwargs or {}))
        if in_host_memory and isinstance(found, Tensor):
            self.add_to_host_memory(found)
        return found

    def note(self, what: str = "") -> None:
        if not self._active:
            return
        frames = [frame for frame in traceback.extract_stack() if "_python_dispatch" not in frame.filename]
        callers = [frame for frame in frames if "/torch/" not in frame.filename and __file__ != frame.filename]
        if not any("/torch/optim/" in frame.filename for frame in frames):
            self.found.append(f"{callers[-1].filename}:{callers[-1].lineno} {what}")

    def is_in_host_memory(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._addresses

    def add_to_host_memory(self, tensor: Tensor) -> None:
        self._host.append(tensor)
        self._addresses.add(tensor.untyped_storage()._cdata)


class Copies(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.tolist, Tensor.numpy, Tensor.cpu) or self._waits.is_in_host_memory(args[0]):
            return func(*args, **(kwargs or {}))
        self._waits.note()
        found = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            found = found.clone()
            self._waits.add_to_host_memory(found)
        return found


class Stream:
    """A stream or event of a GPU, whose work never ends before the host waits for it."""

    def __init__(self, waits: Waits) -> None:
        self.synchronize = waits.note

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Stream) -> float:
        return 0.0

    def record_event(self, *_: Stream) -> Stream:
        return self

    wait_stream = wait_event = record = wait = record_event


def act_as_a_gpu(waits: Waits) -> None:
    """Let DeepSpeed take this process's CPU for a device that works behind the host, until the process ends."""
    from deepspeed.accelerator import get_accelerator

    device: Any = get_accelerator()
    device.resolves_data_dependency = device.is_synchronized_device = lambda: False
    device.handles_memory_backpressure = lambda: False
    device.synchronize = lambda *_: waits.note()
    device.current_stream = device.default_stream = lambda *_: Stream(waits)
    type(device).Stream = type(device).Event = property(lambda _: lambda *_, **__: Stream(waits))
    device.stream = lambda _: contextlib.nullcontext()
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def waits_of_steps() -> list[list[str]]:
    return [waits_of_a_step(*case) for case in CASES]


def waits_of_a_step(precision: str, stage: int, others: tuple[str, ...]) -> list[str]:
    overrides = [f"training.precision={precision}", f"layout.zero_stage={stage}", *others]
    spec = parse_spec(SPEC, file="waits.yaml", base_dir=Path(), overrides=overrides)
    layout, device, waits = make_plan(spec).layout, torch.device("cpu"), Waits()
    act_as_a_gpu(waits)
    with Copies(waits):
        composed = compose(spec, layout, Mesh(), device)
        # with each source's loss and the noise scale
        drive = build_stepper(composed, Mesh(), device, spec.training, sources=("code", "text"))
        drive.noise_scale, drive.measures_noise = NoiseScale.of(layout, composed.objective, device), True
        tokens, place = torch.arange(8).view(1, 8), torch.zeros(1, dtype=torch.int64)
        batch = MicroBatch(tokens, tokens, torch.arange(8), place, torch.tensor(8.0), sources=place)
        for _ in range(3 if stage == 3 else 1):  # stage 3 learns the order of its parameters in the first ones
            drive.train([batch] * ACCUMULATION)
        with waits:
            drive.train([batch] * ACCUMULATION)
    return waits.found


@pytest.fixture(scope="module")
def waits() -> list[list[str]]:
    found: list[list[str]] = on_ranks(1, waits_of_steps)[0]
    return found


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[" ".join((precision, f"ZeRO-{stage}", *rest)) for precision, stage, rest in CASES]
)
def test_the_host_waits_only_for_the_check_of_the_gradient(index: int, waits: list[list[str]]) -> None:
    """Beside what DeepSpeed's overlapped reductions and gathers wait for, so that they hold only so much memory."""
    precision, stage, _ = CASES[index]
    of_overlap = [place for place in waits[index] if "/deepspeed/runtime/zero/" in place]
    (place,) = (place for place in waits[index] if place not in of_overlap)
    assert ("engine/step.py" if stage == 0 else "engine/deepspeed_engine.py") in place
    if stage == 0 or (stage, precision) == (1, "bf16"):  # BF16_Optimizer reduces after the last micro-batch
        assert not of_overlap
    else:
        assert len(set(of_overlap)) <= 4, of_overlap
