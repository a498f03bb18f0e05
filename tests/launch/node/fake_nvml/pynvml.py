"""A FAKE of the module pynvml, for machines without a GPU: it reports the values of FAKE_NVML in the environment.

FAKE_NVML is a JSON object: ``init_error`` (an error number), ``hang`` (seconds that nvmlInit takes), and ``gpus``, a
list of objects with the figures that differ from a healthy H100. A figure that is null is not supported by that GPU.
The figures are made up; names, arguments and units are those of nvidia-ml-py 13.
"""

import json
import os
import time
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS, NVML_ERROR_FUNCTION_NOT_FOUND = 0, 13
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 3, 9, 12
NVML_ERROR_GPU_IS_LOST, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 15, 18
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
nvmlMemory_v2 = 2
nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE = 1, 0, 1
NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
_WORDS = {3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost", 18: "Driver/library version mismatch"}
_HEALTHY = {"total": 85520809984, "used": 4 << 20, "ecc": 0, "rows": [3, 0, 0, 0], "pages": None, "reasons": 1}
_HEALTHY |= {"busy": 97, "clock": 1755, "max_clock": 1980, "milliwatts": 690500, "limit": 700000, "celsius": 61}
_HEALTHY |= {"mig": 0, "replays": 0, "pcie_kilobytes": [2000, 3000], "violations": {"0": 0, "1": 0}}
_HEALTHY |= {"fields": {"138": 1024, "139": 2048, "197": 10000, "198": 20000}}
_HEALTHY |= {"processes": 0, "name": "NVIDIA H100 80GB HBM3", "lost": False}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_WORDS.get(value, "Library Not Found"))
        self.value = value


def _state() -> dict[str, Any]:
    return json.loads(os.environ["FAKE_NVML"])


def nvmlInit() -> None:
    time.sleep(_state().get("hang", 0))
    if "init_error" in _state():
        raise NVMLError(_state()["init_error"])


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlSystemGetDriverVersion() -> str:
    return "550.127.05"


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    gpu = _HEALTHY | _state()["gpus"][index] | {"index": index}
    if gpu["lost"]:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return gpu


def _figure(device: dict[str, Any], name: str) -> Any:
    if device[name] is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return device[name]


def nvmlDeviceGetMemoryInfo(device: dict[str, Any], version: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(total=_figure(device, "total"), used=_figure(device, "used"))


def nvmlDeviceGetRemappedRows(device: dict[str, Any]) -> tuple[int, ...]:
    return tuple(_figure(device, "rows"))


def nvmlDeviceGetRetiredPagesPendingStatus(device: dict[str, Any]) -> int:
    return int(_figure(device, "pages"))


def nvmlDeviceGetTotalEccErrors(device: dict[str, Any], kind: int, counter: int) -> int:
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return int(_figure(device, "ecc"))


def nvmlDeviceGetCurrentClocksThrottleReasons(device: dict[str, Any]) -> int:
    return int(_figure(device, "reasons"))


def nvmlDeviceGetComputeRunningProcesses(device: dict[str, Any]) -> list[int]:
    return list(range(_figure(device, "processes")))


def nvmlDeviceGetUUID(device: dict[str, Any]) -> str:
    return f"GPU-{device['index']}aaaa-bbbb"


def nvmlDeviceGetName(device: dict[str, Any]) -> str:
    return str(_figure(device, "name"))


def nvmlDeviceGetUtilizationRates(device: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(gpu=_figure(device, "busy"), memory=0)


def nvmlDeviceGetClockInfo(device: dict[str, Any], kind: int) -> int:
    assert kind == NVML_CLOCK_SM
    return int(_figure(device, "clock"))


def nvmlDeviceGetMaxClockInfo(device: dict[str, Any], kind: int) -> int:
    assert kind == NVML_CLOCK_SM
    return int(_figure(device, "max_clock"))


def nvmlDeviceGetPowerUsage(device: dict[str, Any]) -> int:
    return int(_figure(device, "milliwatts"))


def nvmlDeviceGetEnforcedPowerLimit(device: dict[str, Any]) -> int:
    return int(_figure(device, "limit"))


def nvmlDeviceGetTemperature(device: dict[str, Any], sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return int(_figure(device, "celsius"))


def nvmlDeviceGetMigMode(device: dict[str, Any]) -> list[int]:
    return [int(_figure(device, "mig")), 0]


def nvmlDeviceGetPcieReplayCounter(device: dict[str, Any]) -> int:
    return int(_figure(device, "replays"))


def nvmlDeviceGetPcieThroughput(device: dict[str, Any], counter: int) -> int:
    return int(_figure(device, "pcie_kilobytes")[counter])


def nvmlDeviceGetViolationStatus(device: dict[str, Any], policy: int) -> SimpleNamespace:
    return SimpleNamespace(referenceTime=0, violationTime=_figure(device, "violations")[str(policy)])


def nvmlDeviceGetFieldValues(device: dict[str, Any], fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
    assert all(scope == 0xFFFFFFFF for _, scope in fields)
    found = [(device["fields"] or {}).get(str(number)) for number, _ in fields]
    return [
        SimpleNamespace(
            nvmlReturn=NVML_SUCCESS if value is not None else NVML_ERROR_NOT_SUPPORTED,
            value=SimpleNamespace(ullVal=value or 0),
        )
        for value in found
    ]
