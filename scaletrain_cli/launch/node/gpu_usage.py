"""The use of a node's GPUs over time, as NVIDIA's driver reports it: the GPU columns of the telemetry.

A process of its own reads the driver, ``python -m scaletrain_cli.launch.node.gpu_usage``, and prints one JSON line per
interval: a call into a driver that hangs never returns. Meanings of the values:
docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html. A value that a GPU does not report is absent. Processes
of a GPU are not listed: that call takes a lock of the driver for milliseconds, and delays kernel launches.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from scaletrain_cli.launch.node.gpu_health import visible_place
from scaletrain_cli.launch.node.processes import die_with_parent

T = TypeVar("T")
# Values that change rarely, counters, and the PCIe throughput, for which some drivers wait 20 ms.
SLOW_SECONDS = 10.0
_ALL_LINKS = 0xFFFFFFFF  # scope of a field: the sum over all NVLinks
_MHZ, _MILLI, _KIB = 1e6, 1e-3, 1024
# Bits of nvmlClocksEventReasons; the slowdown by hardware is also set when heat causes it.
_POWER_CAP, _HW_SLOWDOWN, _SW_HEAT, _HW_HEAT, _POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


class GpuSampler:
    """Reads the use of the first ``count`` GPUs that a process with ``environment`` may use, in its order.

    ``nvml`` is the module pynvml. GPUs that are divided by MIG are left out: the driver does not report their use.
    Raises NVMLError where the driver cannot be used.
    """

    def __init__(
        self, nvml: Any, environment: Mapping[str, str], count: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._clock = nvml, clock
        nvml.nvmlInit()
        by_place = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            if (device := self._read(nvml.nvmlDeviceGetHandleByIndex, index)) is not None:
                uuid = str(self._read(nvml.nvmlDeviceGetUUID, device) or "")
                by_place[visible_place(index, uuid, environment)] = _Gpu(nvml, index, device)
        self._gpus = [gpu for place, gpu in by_place.items() if place in range(count) and not gpu.is_divided()]
        self._slow_read = -SLOW_SECONDS

    def _read(self, call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def sample(self) -> dict[int, dict[str, float]]:
        """Return the values of each GPU since the last call, by index; empty for a GPU that is lost."""
        now = self._clock()
        if now - self._slow_read >= SLOW_SECONDS:
            self._slow_read = now
            for gpu in self._gpus:
                gpu.read_slow_values(now)
        return {gpu.index: gpu.values(now) for gpu in self._gpus}


class _Gpu:
    """One GPU: its rarely read values, and the counters at the last reading."""

    def __init__(self, nvml: Any, index: int, device: Any) -> None:
        self.index = index
        self._nvml, self._device = nvml, device
        self._slow: dict[str, float] = {}
        self._counters: dict[str, tuple[float, float]] = {}  # time and value
        self._unsupported: set[Any] = set()

    def is_divided(self) -> bool:
        """Return whether the GPU is divided into instances (MIG)."""
        mode = self._read("nvmlDeviceGetMigMode")
        return mode is not None and mode[0] == self._nvml.NVML_DEVICE_MIG_ENABLE

    def values(self, now: float) -> dict[str, float]:
        """Return all values; those that are read rarely are the last ones read."""
        nvml = self._nvml
        memory = self._read("nvmlDeviceGetMemoryInfo", version=nvml.nvmlMemory_v2)
        memory = memory or self._read("nvmlDeviceGetMemoryInfo")
        used = self._read("nvmlDeviceGetUtilizationRates")
        readings = {
            "utilization": None if used is None else used.gpu / 100,
            "sm_clock_hertz": _times(self._read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), _MHZ),
            "power_watts": _times(self._read("nvmlDeviceGetPowerUsage"), _MILLI),
            "temperature_celsius": _times(self._read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), 1),
            "memory_used_bytes": None if memory is None else float(memory.used),
            **self._throttling(now),
        }
        present = {name: float(value) for name, value in readings.items() if value is not None}
        return present | self._slow if present else {}

    def _throttling(self, now: float) -> dict[str, float | None]:
        """Return the shares of time for which clocks were held down, where known; else whether they are now."""
        nvml = self._nvml
        by_power = self._violation("power", nvml.NVML_PERF_POLICY_POWER, now)
        by_heat = self._violation("heat", nvml.NVML_PERF_POLICY_THERMAL, now)
        by_hardware = None
        bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            by_power = float(bool(bits & _POWER_CAP)) if by_power is None else by_power
            by_heat = float(bool(bits & (_SW_HEAT | _HW_HEAT))) if by_heat is None else by_heat
            by_hardware = float(bool(bits & (_HW_SLOWDOWN | _POWER_BRAKE)) and not bits & _HW_HEAT)
        return {"throttled_by_power": by_power, "throttled_by_heat": by_heat, "throttled_by_hardware": by_hardware}

    def _violation(self, name: str, policy: int, now: float) -> float | None:
        """Return the share of time since the last call for which a policy held the clocks down; None if unknown."""
        status = self._read("nvmlDeviceGetViolationStatus", policy)
        share = None if status is None else self._rate(name, float(status.violationTime) / 1e9, now)
        return None if share is None else min(1.0, share)

    def read_slow_values(self, now: float) -> None:
        """Read limits, error counters, and the bytes that went over PCIe and NVLink."""
        nvml = self._nvml
        errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        nvlink = self._fields(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        readings = {
            "sm_clock_max_hertz": _times(self._read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM), _MHZ),
            "power_limit_watts": _times(self._read("nvmlDeviceGetEnforcedPowerLimit"), _MILLI),
            "uncorrected_errors": self._read("nvmlDeviceGetTotalEccErrors", *errors),
            "pcie_replays": self._read("nvmlDeviceGetPcieReplayCounter"),
            "nvlink_bytes_per_second": None if nvlink is None else self._rate("nvlink", nvlink * _KIB, now),
            "pcie_bytes_per_second": self._pcie(now),
        }
        self._slow = {name: float(value) for name, value in readings.items() if value is not None}

    def _pcie(self, now: float) -> float | None:
        nvml = self._nvml
        counted = self._fields(nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
        if counted is not None:
            return self._rate("pcie", counted, now)
        kinds = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        measured = [self._read("nvmlDeviceGetPcieThroughput", kind) for kind in kinds]  # kB/s, over 20 ms
        return None if None in measured else 1000.0 * sum(measured)

    def _fields(self, *numbers: int) -> float | None:
        """Return the sum of fields with counters, both directions of all links; None if one is not supported."""
        answer = self._read("nvmlDeviceGetFieldValues", [(number, _ALL_LINKS) for number in numbers])
        if answer is None or any(value.nvmlReturn != self._nvml.NVML_SUCCESS for value in answer):
            return None
        return float(sum(value.value.ullVal for value in answer))

    def _rate(self, name: str, value: float, now: float) -> float | None:
        """Return the increase per second since the last call; None at the first one, and after a counter was reset."""
        before, self._counters[name] = self._counters.get(name), (now, value)
        if before is None or now <= before[0] or value < before[1]:
            return None
        return (value - before[1]) / (now - before[0])

    def _read(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Return the value; None if the GPU or this version of the driver does not report it."""
        key = (name, repr(arguments), *options)
        if key in self._unsupported:
            return None
        try:
            return getattr(self._nvml, name)(self._device, *arguments, **options)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(key)  # not asked for again
            return None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def times_to_sample(
    interval: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Yield without end, now and once per ``interval``; at once after a sample that took longer."""
    due = clock()
    while True:
        yield
        due = max(due + interval, clock())
        sleep(max(0.0, due - clock()))


def main() -> None:
    """Print the use of the GPUs once per interval, until the agent ends or closes the pipe."""
    parser = argparse.ArgumentParser(prog="gpu_usage")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--interval", type=float, required=True)
    options = parser.parse_args()
    if not die_with_parent(options.parent_pid, signal.SIGKILL):
        return
    import pynvml

    try:
        sampler = GpuSampler(pynvml, os.environ, options.count)
    except pynvml.NVMLError as error:
        print(f"GPUs are not measured: {error}", file=sys.stderr)
        return
    for _ in times_to_sample(options.interval):
        line = json.dumps({"time": time.time(), "gpus": sampler.sample()})
        try:
            print(line, flush=True)
        except OSError:  # the agent has ended
            os._exit(0)


if __name__ == "__main__":
    main()
