"""The health of a node's GPUs as NVIDIA's driver reports it: broken or used memory, clocks held down, lost GPUs.

Read with NVML (the package nvidia-ml-py, module ``pynvml``) by a process of its own, ``python -m
scaletrain_cli.launch.node.gpu_health``: a call into a driver that hangs never returns. A value that the driver or the
GPU does not report is None, never zero.
"""

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.own_processes import python_command
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import typed

_KILL_SECONDS = 1.0
_DRIVER_SECONDS = 60.0  # without persistence mode eight GPUs take 10 s
_NOT_INSTALLED = "GPU health is not known: nvidia-ml-py is not installed on this node (it comes with scaletrain[train])"


@dataclass(frozen=True)
class GpuHealth:
    """One GPU as the driver reports it. Sizes are in bytes; None: not reported."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    uncorrected_errors: int | None = None  # ECC, since the driver was loaded
    waits_for_reset: bool | None = None  # a reset is pending to remap rows or retire pages
    beyond_repair: bool | None = None  # row remapping failed: no spare rows are left
    held_down_by: tuple[str, ...] = ()
    processes: int | None = None


@dataclass(frozen=True)
class NodeHealth:
    """A node's GPUs and driver version. ``trouble``: the driver's error; ``note``: why nothing could be read."""

    driver: str = ""
    gpus: tuple[GpuHealth, ...] = ()
    trouble: str = ""
    note: str = ""


def query_driver() -> NodeHealth | None:
    """Return what the driver reports; None on a node without NVIDIA's driver library."""
    if importlib.util.find_spec("pynvml") is None:
        return NodeHealth(note=_NOT_INSTALLED)
    command = python_command("scaletrain_cli.launch.node.gpu_health")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=_DRIVER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver does not end
            process.communicate(timeout=_KILL_SECONDS)
        return NodeHealth(trouble=f"the driver did not respond within {_DRIVER_SECONDS:.0f} s: a GPU or it hangs")
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return NodeHealth(trouble=f"reading the driver failed: {last[0]}")
    health: NodeHealth | None = typed(NodeHealth | None, json.loads(output))
    return health


def read_driver(nvml: Any) -> NodeHealth | None:
    """Return what ``nvml`` (the module pynvml) reports; None where the driver library is not installed."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return None if missing else NodeHealth(trouble=f"the driver cannot be used: {error}")
    gpus, troubles = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, index))
        except nvml.NVMLError as error:
            troubles.append(f"GPU {index} cannot be read: {error}")
    return NodeHealth(str(nvml.nvmlSystemGetDriverVersion()), tuple(gpus), "; ".join(troubles))


def gpus_of_ranks(health: NodeHealth, environment: Mapping[str, str], count: int) -> tuple[GpuHealth, ...]:
    """Return the GPUs that ranks with this environment will use: the first ``count`` visible ones, in their order."""
    places = {visible_place(gpu.index, gpu.uuid, environment): gpu for gpu in health.gpus}
    return tuple(places[place] for place in range(count) if place in places)


def visible_place(index: int, uuid: str, environment: Mapping[str, str]) -> int | None:
    """Return the place of a GPU among those that a process with this environment may use; None if it may not.

    CUDA_VISIBLE_DEVICES has indices or UUIDs.
    """
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return index
    words = [word.strip() for word in visible.split(",")]
    places = (at for at, word in enumerate(words) if word == str(index) or (word and uuid.startswith(word)))
    return next(places, None)


def gpu_problems(health: NodeHealth, gpus: Sequence[GpuHealth], needed_bytes: int) -> Iterator[Reason]:
    """Yield the problems that make these GPUs unfit for ranks. ``needed_bytes``: a rank's planned peak memory."""
    if health.trouble:
        yield Reason("node.driver-failed", {"error": health.trouble})
    for gpu in gpus:
        if gpu.beyond_repair:
            yield Reason("node.gpu-memory-broken", {"gpu": gpu.index})
        elif gpu.waits_for_reset:
            yield Reason("node.gpu-needs-reset", {"gpu": gpu.index})
        if gpu.memory_bytes is not None and gpu.used_bytes is not None:
            sizes = {"gpu": gpu.index, "memory_bytes": gpu.memory_bytes, "needed_bytes": needed_bytes}
            free = gpu.memory_bytes - gpu.used_bytes
            if gpu.memory_bytes >= needed_bytes > free:
                used = {"free_bytes": free, "processes": gpu.processes or 0}
                yield Reason("node.gpu-in-use", sizes | used)
            elif gpu.memory_bytes < needed_bytes:
                yield Reason("node.gpu-too-small", {**sizes, "name": gpu.name})


def gpu_notes(gpus: Sequence[GpuHealth]) -> Iterator[Reason]:
    """Yield warnings: conditions that slow these GPUs down or may become a problem."""
    for gpu in gpus:
        if gpu.uncorrected_errors:
            yield Reason("node.gpu-ecc-errors", {"gpu": gpu.index, "errors": gpu.uncorrected_errors})
        for cause in gpu.held_down_by:
            yield Reason("node.gpu-clocks-limited", {"gpu": gpu.index, "cause": cause})


def _read_gpu(nvml: Any, index: int) -> GpuHealth:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def read(call: str, *arguments: Any, **options: Any) -> Any:
        """Return the value, None if this GPU does not support it. Raises NVMLError for a lost GPU."""
        try:
            return getattr(nvml, call)(device, *arguments, **options)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    # Version 2 reports memory reserved by the driver separately from used memory.
    memory = read("nvmlDeviceGetMemoryInfo", version=nvml.nvmlMemory_v2) or read("nvmlDeviceGetMemoryInfo")
    rows = read("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failure
    pages = read("nvmlDeviceGetRetiredPagesPendingStatus")  # GPUs before Ampere
    pending = [bool(value) for value in (rows and rows[2], pages) if value is not None]
    counted = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    causes = {
        "overheating": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "the power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    processes = read("nvmlDeviceGetComputeRunningProcesses")
    return GpuHealth(
        index=index,
        uuid=str(read("nvmlDeviceGetUUID") or ""),
        name=str(read("nvmlDeviceGetName") or ""),
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        uncorrected_errors=read("nvmlDeviceGetTotalEccErrors", *counted),
        waits_for_reset=any(pending) if pending else None,
        beyond_repair=None if rows is None else bool(rows[3]),
        held_down_by=tuple(name for name, bit in causes.items() if reasons & bit),
        processes=None if processes is None else len(processes),
    )


def main() -> None:
    """Print what the driver reports as JSON; ``null`` without a driver library."""
    import pynvml

    health = read_driver(pynvml)
    print(json.dumps(None if health is None else dataclasses.asdict(health)))


if __name__ == "__main__":
    main()
