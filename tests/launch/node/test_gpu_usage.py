"""GPU columns of the telemetry, with a fake of the module pynvml, because there is no GPU here.

Not shown: that a driver reports these figures as NVIDIA documents them, and what the calls cost on a GPU.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from scaletrain_cli.launch.node import gpu_usage
from scaletrain_cli.launch.node.gpu_usage import GpuSampler, times_to_sample
from scaletrain_cli.own_processes import python_command
from tests.launch.node.test_gpu_health import FAKE, fake_nvml

NVML = fake_nvml()


class Machine:
    """GPUs whose figures change between samples, and a clock that is set by hand."""

    def __init__(self, patch: pytest.MonkeyPatch, *gpus: dict[str, Any], count: int = 8, **environment: str) -> None:
        self.patch, self.gpus, self.now = patch, list(gpus), 0.0
        self.set()
        self.sampler = GpuSampler(NVML, environment, count, clock=lambda: self.now)

    def set(self, index: int = 0, **figures: Any) -> None:
        self.gpus[index] = self.gpus[index] | figures
        self.patch.setenv("FAKE_NVML", json.dumps({"gpus": self.gpus}))

    def sample(self, seconds: float = 1.0) -> dict[int, dict[str, float]]:
        # The fake's handles are copies of the figures, those of the real module name a device.
        for gpu in self.sampler._gpus:
            gpu._device = NVML.nvmlDeviceGetHandleByIndex(gpu.index) if not self.gpus[gpu.index].get("lost") else {}
        found = self.sampler.sample()
        self.now += seconds
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *gpus, **options: Machine(monkeypatch, *gpus, **options)


def test_values_have_si_units_and_counters_become_rates(machine: Any) -> None:
    gpus = machine({"ecc": 2, "replays": 7})
    first = gpus.sample()[0]
    assert first == {
        "utilization": 0.97,
        "sm_clock_hertz": 1755e6,
        "sm_clock_max_hertz": 1980e6,
        "power_watts": 690.5,
        "power_limit_watts": 700.0,
        "temperature_celsius": 61.0,
        "memory_used_bytes": float(4 << 20),
        "throttled_by_power": 0.0,
        "throttled_by_heat": 0.0,
        "throttled_by_hardware": 0.0,
        "uncorrected_errors": 2.0,
        "pcie_replays": 7.0,
    }
    gpus.now = 10.0
    gpus.set(fields={"138": 1024 + 500, "139": 2048 + 500, "197": 10000 + 4000, "198": 20000 + 6000})
    second = gpus.sample()[0]
    assert second["nvlink_bytes_per_second"] == pytest.approx(1000 * 1024 / 10)
    assert second["pcie_bytes_per_second"] == pytest.approx(1000.0)
    assert gpus.sample()[0]["nvlink_bytes_per_second"] == second["nvlink_bytes_per_second"]
    gpus.now = 20.0
    gpus.set(fields={"138": 0, "139": 0, "197": 0, "198": 0})  # the driver was loaded anew
    assert "nvlink_bytes_per_second" not in gpus.sample()[0]


def test_throttling_is_a_share_of_time_where_the_driver_counts_it(machine: Any) -> None:
    gpus = machine({})
    gpus.sample()
    gpus.set(violations={"0": 250_000_000, "1": 9_000_000_000})
    found = gpus.sample()[0]
    assert (found["throttled_by_power"], found["throttled_by_heat"]) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0x1, (0, 0, 0)), (0x4, (1, 0, 0)), (0x20, (0, 1, 0)), (0x48, (0, 1, 0)), (0x8, (0, 0, 1)), (0x88, (0, 0, 1))],
)
def test_without_counted_time_the_reasons_count(machine: Any, bits: int, expected: tuple[int, ...]) -> None:
    found = machine({"violations": None, "reasons": bits}).sample()[0]
    assert tuple(found[f"throttled_by_{cause}"] for cause in ("power", "heat", "hardware")) == expected


def test_what_a_gpu_does_not_report_is_absent_later_too(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("busy", "clock", "milliwatts", "total", "ecc", "replays", "violations", "fields", "pcie_kilobytes", "mig")
    gpus = machine(dict.fromkeys(names) | {"reasons": None})
    first = gpus.sample()[0]
    assert first == {"temperature_celsius": 61.0, "power_limit_watts": 700.0, "sm_clock_max_hertz": 1980e6}
    asked = []
    monkeypatch.setattr(NVML, "_figure", lambda device, name: asked.append(name) or 1)
    gpus.sample()
    assert asked == ["celsius"]


def test_pcie_without_counters_is_measured_by_the_driver(machine: Any) -> None:
    found = machine({"fields": {"138": 5, "139": 5}}).sample()[0]
    assert found["pcie_bytes_per_second"] == 5_000_000.0


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 8, [0, 1, 3]),  # 2 is divided by MIG
        (None, 2, [0, 1]),
        ("3,1", 8, [1, 3]),
        ("3,1", 1, [3]),
        ("GPU-3aaaa,0", 1, [3]),
        ("2", 8, []),
        ("", 8, []),
    ],
)
def test_only_gpus_of_ranks_are_measured(machine: Any, visible: str | None, count: int, expected: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = machine({}, {}, {"mig": 1}, {}, count=count, **environment)
    assert sorted(gpus.sample()) == expected


def test_a_lost_gpu_has_no_row_and_the_others_have_theirs(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = machine({"lost": True}, {})
    assert list(gpus.sample()) == [1]
    for name in vars(NVML):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(NVML, name, lost)
    assert gpus.sampler.sample() == {1: {}}


def lost(*_: Any, **options: Any) -> None:
    raise NVML.NVMLError(NVML.NVML_ERROR_GPU_IS_LOST)


def test_samples_are_taken_once_per_interval_and_none_is_made_up_for() -> None:
    now, taken = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    for _, cost in zip(times_to_sample(1.0, lambda: now[0], sleep), (0.25, 0.5, 2.5, 0.25, 0.0), strict=False):
        taken.append(now[0])
        now[0] += cost
    assert taken == [0.0, 1.0, 2.0, 4.5, 5.5]


def test_the_process_samples_at_the_interval_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setattr(gpu_usage, "GpuSampler", lambda *_: None)
    monkeypatch.setattr(gpu_usage, "die_with_parent", lambda *_: True)
    monkeypatch.setattr(gpu_usage, "times_to_sample", lambda interval: asked.append(interval) or ())
    monkeypatch.setattr(sys, "argv", ["gpu_usage", "--parent-pid=1", "--count=1", "--interval=0.5"])
    gpu_usage.main()
    assert asked == [0.5]


@pytest.mark.process
def test_the_process_prints_lines_until_nobody_reads() -> None:
    search = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "FAKE_NVML": json.dumps({"gpus": [{}, {}]})}
    words = ("--parent-pid", str(os.getpid()), "--count", "1", "--interval", "0.01")
    command = python_command("scaletrain_cli.launch.node.gpu_usage", *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert process.wait() == 0
    assert [list(line["gpus"]) for line in lines] == [["0"]] * 3
    assert lines[0]["gpus"]["0"]["temperature_celsius"] == 61.0
