"""Peaks of memory on a GPU: one in each interval, and one in the attempt, from the one that torch has."""

import pytest
import torch

from scaletrain_cli.engine.metrics import device_memory
from scaletrain_cli.engine.metrics.device_memory import MemorySampler, forget_peak_memory, peak_memory_bytes

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
    monkeypatch.setattr(device_memory, "_earlier_peaks", {})
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
