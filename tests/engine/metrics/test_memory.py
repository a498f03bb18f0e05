"""Model states that are measured beside the plan, peaks of a GPU, and what is said when memory runs out."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scaletrain_cli.engine.deepspeed_engine import prepare_deepspeed
from scaletrain_cli.engine.metrics import memory_measurement, out_of_memory
from scaletrain_cli.engine.metrics.memory_measurement import (
    MemorySampler,
    ModelStateBytes,
    forget_peak_memory,
    peak_memory_bytes,
    watching_model_states,
)
from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir
from tests.engine.optim.small_engine import Scale
from tests.engine.ranks import on_ranks
from tests.plan.specs import spec_of

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


GPU = torch.device("cuda", 0)


class Allocator:
    def __init__(self) -> None:
        self.now = self.peak = 0

    def use(self, size: int) -> None:
        self.now, self.peak = size, max(self.peak, size)

    def reset(self, _: torch.device) -> None:
        self.peak = self.now

    def stats(self, _: torch.device) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak, "reserved_bytes.all.current": 100, "num_alloc_retries": 3}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats", allocator.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocator.peak)
    monkeypatch.setattr(memory_measurement, "_earlier_peaks", {})
    return allocator


def test_an_allocator_without_statistics_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: torch.device) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    sampler = MemorySampler(GPU, 0.0)
    assert sampler.due() == sampler.due() == {}
    assert len(caplog.records) == 1


def test_each_reading_has_its_own_peak_and_the_attempt_keeps_the_highest(allocator: Allocator) -> None:
    now = 0.0
    sampler = MemorySampler(GPU, 1.0, clock=lambda: now)
    allocator.use(70)
    allocator.use(20)
    assert sampler.due() == {"memory_bytes": 70.0, "memory_reserved_bytes": 100.0, "allocation_retries": 3.0}
    allocator.use(30)
    now = 0.9
    assert sampler.due() == {}
    now = 1.0
    assert sampler.due()["memory_bytes"] == 30.0
    assert peak_memory_bytes(GPU) == 70
    allocator.use(80)
    assert peak_memory_bytes(GPU) == 80
    allocator.use(10)
    forget_peak_memory(GPU)  # the first update is over
    assert peak_memory_bytes(GPU) == 10


def test_on_a_cpu_memory_that_is_released_is_seen() -> None:
    sampler = MemorySampler(torch.device("cpu"), 0.0)
    before = sampler.due()["memory_bytes"]
    held = torch.ones(1 << 25)  # 128 MiB, of its own mapping
    during = sampler.due()["memory_bytes"]
    del held
    after = sampler.due()["memory_bytes"]
    assert during - before > 120e6
    assert during - after > 120e6


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_plan(spec_of("gpt2", layout__pipeline_parallel=2, layout__tensor_parallel=1))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.new_attempt()
    return found


def report(run: RunDir, rank: int) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((run.attempt(1) / "memory" / f"rank-{rank:05d}.json").read_text())
    return loaded


def test_a_host_out_of_memory_is_reported_with_the_plan_of_its_stage(run: RunDir, plan: RunPlan) -> None:
    outer = reporting_out_of_memory(run, plan, 1, 7)
    with pytest.raises(MemoryError) as caught, outer, reporting_out_of_memory(run, plan, 1, 7):
        raise MemoryError
    found = report(run, 7)
    assert found["stage"] == 1
    assert found["planned"]["peak"] == plan.memory.by_stage[1].peak  # type: ignore[index]
    assert found["held"]["peak_resident"] > 10**7  # type: ignore[index]
    assert found["snapshot"] is None
    (note,) = caught.value.__notes__
    assert "attempts/0001/memory/rank-00007.json" in note
    assert f"{plan.memory.by_stage[1].peak / 1e9:.2f} GB" in note


def test_only_the_first_gpu_writes_a_snapshot(run: RunDir, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    held = dict.fromkeys(("allocated", "reserved", "peak_allocated", "peak_reserved"), 3 * 10**9)
    monkeypatch.setattr(out_of_memory, "_gpu_bytes", lambda: held)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    for rank in (1, 0):
        with pytest.raises(torch.OutOfMemoryError, match="tried"), reporting_out_of_memory(run, plan, 1, rank):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert [report(run, rank)["snapshot"] for rank in (0, 1)] == [None, "snapshot.pickle"]
    assert report(run, 1)["held"] == held
    assert pickle.loads((run.attempt(1) / "memory" / "snapshot.pickle").read_bytes()) == {"segments": []}


def test_other_errors_write_no_memory_report(run: RunDir, plan: RunPlan) -> None:
    with pytest.raises(ValueError, match="something else") as caught, reporting_out_of_memory(run, plan, 1, 0):
        raise ValueError("something else")
    assert not hasattr(caught.value, "__notes__")
    assert not (run.attempt(1) / "memory").exists()


def test_a_report_that_cannot_be_written_hides_no_error(run: RunDir, plan: RunPlan) -> None:
    (run.attempt(1) / "memory").write_text("in the way")
    with pytest.raises(MemoryError) as caught, reporting_out_of_memory(run, plan, 1, 0):
        raise MemoryError
    assert not hasattr(caught.value, "__notes__")
