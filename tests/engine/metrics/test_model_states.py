import warnings
from typing import Any

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.deepspeed_engine import prepare_deepspeed
from scaletrain_cli.engine.metrics.memory_measurement import ModelStateBytes, watching_model_states
from tests.engine.optim.small_engine import Scale
from tests.engine.ranks import on_ranks

RANKS = 2
# Odd sizes, so that every partition is padded.
SIZE, LAYERS = 29, 3
MATRICES, BIASES = LAYERS * SIZE * SIZE, LAYERS * SIZE
CASES = [("fp32", "fp32", stage) for stage in range(4)]
CASES += [("bf16", grads, stage) for grads in ("fp32", "bf16") for stage in (1, 2, 3)]


def train_two_steps(precision: str, grad_dtype: str, stage: int) -> ModelStateBytes:
    import deepspeed

    scales = [Scale()] if stage == 0 else []  # whose states have no dimensions
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)), *scales)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # DeepSpeed cannot clip a parameter without dimensions
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": grad_dtype}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    batch = torch.ones(1, SIZE, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    for _ in range(2):
        with watching_model_states(engine) as watched:
            for _ in range(2):
                engine.backward(engine(batch).sum())
                engine.step()
    engine.destroy()
    return watched.bytes


def train_all() -> list[ModelStateBytes]:
    warnings.simplefilter("ignore")
    prepare_deepspeed(torch.device("cpu"))
    return [train_two_steps(*case) for case in CASES]


@pytest.fixture(scope="module")
def counted() -> list[list[ModelStateBytes]]:
    """Return the counted bytes by rank and case; all cases run in the same processes."""
    return on_ranks(RANKS, train_all)


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


FLAT = padded(MATRICES, 2 * RANKS) + padded(BIASES, 2 * RANKS)  # DeepSpeed aligns each group of parameters
SHARDS = LAYERS * (padded(SIZE * SIZE, RANKS) + padded(SIZE, RANKS)) // RANKS  # and stage 3 each parameter


@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_every_byte_is_accounted_for(index: int, counted: list[list[ModelStateBytes]]) -> None:
    precision, grad_dtype, stage = CASES[index]
    ranks = [of_rank[index] for of_rank in counted]
    weight, gradient = (4 if dtype == "fp32" else 2 for dtype in (precision, grad_dtype))
    whole, part = MATRICES + BIASES + (stage == 0), {0: 0, 1: FLAT // RANKS, 2: FLAT // RANKS, 3: SHARDS}[stage]
    states = 8 * whole if stage == 0 else 12 * part
    parameters = {0: whole, 1: FLAT, 2: FLAT, 3: SHARDS}[stage] * weight
    assert {(held.parameters, held.optimizer_states, held.host) for held in ranks} == {(parameters, states, 0)}
    gradients = [held.gradients for held in ranks]
    if stage == 2 and weight == gradient:
        # Views of whole gradients: of every parameter that the rank's partition touches.
        assert all(part * gradient < held <= (part + SIZE * SIZE + SIZE) * gradient for held in gradients)
        return
    accumulated = FLAT if stage == 1 and weight != gradient else {0: whole, 1: whole, 2: part, 3: part}[stage]
    assert set(gradients) == {accumulated * gradient}
