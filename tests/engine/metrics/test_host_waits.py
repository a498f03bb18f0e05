"""Within a step the host waits for the device only to check the gradient, after all micro-batches are enqueued."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import parse_spec
from tests.engine.ranks import on_ranks

ACCUMULATION = 4
# DeepSpeed looks at its norm as often as this before it clips and applies (runtime/utils.py is_invalid_grad_norm).
MOST_LOOKS = 4
CASES = [("fp32", stage) for stage in range(4)] + [("bf16", stage) for stage in (1, 2, 3)]
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
    """Records which code reads the value of a tensor. torch's optimizers read values on a CPU, and not on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            frames = [frame for frame in traceback.extract_stack() if "_python_dispatch" not in frame.filename]
            callers = [frame for frame in frames[:-1] if "/torch/" not in frame.filename]
            if not any("/torch/optim/" in frame.filename for frame in frames):
                self.found.append(f"{callers[-1].filename}:{callers[-1].lineno}")
        return func(*args, **(kwargs or {}))


def waits_of_steps() -> list[list[str]]:
    return [waits_of_a_step(*case) for case in CASES]


def waits_of_a_step(precision: str, stage: int) -> list[str]:
    overrides = [f"training.precision={precision}", f"layout.zero_stage={stage}"]
    spec = parse_spec(SPEC, file="waits.yaml", base_dir=Path(), overrides=overrides)
    layout, device = make_plan(spec).layout, torch.device("cpu")
    drive = build_stepper(compose(spec, layout, Mesh.alone(), device), Mesh.alone(), device, spec.training)
    tokens = torch.arange(8).view(1, 8)
    batches = [MicroBatch(tokens, tokens, torch.arange(8), torch.zeros(1, dtype=torch.int64), None)] * ACCUMULATION
    for _ in range(3):  # stage 3 learns the order of its parameters in the first ones
        drive.train(batches)
    with Waits() as waits:
        drive.train(batches)
    return waits.found


@pytest.fixture(scope="module")
def waits() -> list[list[str]]:
    found: list[list[str]] = on_ranks(1, waits_of_steps, seconds=180)[0]
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{precision} ZeRO-{stage}" for precision, stage in CASES])
def test_the_host_waits_only_for_the_check_of_the_gradient(index: int, waits: list[list[str]]) -> None:
    found, stage = waits[index], CASES[index][1]
    assert 1 <= len(found) <= MOST_LOOKS, found
    home = "scaletrain_cli/engine/step.py" if stage == 0 else "/deepspeed/runtime/"
    assert all(home in place for place in found)
