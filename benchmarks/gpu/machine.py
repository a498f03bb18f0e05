"""The machine, its software, and the ceilings of this run: a large bf16 matrix product, and a copy on the device."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import TYPE_CHECKING

from engine_loops.gpu_table import gpu_of_this_machine

from gpu.piece import Piece, Result, Setting
from scaletrain_cli import __version__

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "triton", "deepspeed", "liger-kernel", "torchao", "bitsandbytes", "numpy", "pydantic")
_REPETITIONS = 30


def measure(setting: Setting) -> Result:
    """Return names and versions, and both ceilings. The fact ``ceiling`` is in FLOP/s."""
    import torch

    device = torch.device("cpu" if setting.gpu is None else "cuda")
    size = 512 if setting.gpu is None else 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    ceiling = 2 * size**3 / _seconds(lambda: left @ right, device)
    source = torch.empty((1 << 24) if setting.gpu is None else (1 << 31), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * len(source) / _seconds(lambda: target.copy_(source), device)
    versions = [f"{name} {found}" for name in _PACKAGES if (found := _version(name)) is not None]
    lines = [
        ["device", device_name(setting.gpu)],
        ["driver, CUDA of torch", f"{_driver()}, {torch.version.cuda or 'none'}"],
        ["software", ", ".join([f"scaletrain {__version__}", f"Python {platform.python_version()}", *versions])],
        [f"bf16 product of two matrices of {size} × {size}", f"{ceiling / 1e12:,.1f} TFLOP/s"],
        ["copy on the device, read and written", f"{copied / 1e9:,.0f} GB/s"],
    ]
    return Result(lines, {"ceiling": ceiling})


def found_gpu() -> str | None:
    """Return the catalogue's name of this machine's GPU, None without one. Raises UsageError for an unknown one.

    In a process of its own, so that the caller holds no memory of the GPU.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(gpu_of_this_machine).result()


def device_name(gpu: str | None) -> str:
    """Return the product's name of the GPU with its memory, or of the CPU."""
    import torch

    if gpu is None:
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB ({gpu})"


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, as the mean of several after one that warms up."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(_REPETITIONS):
        work()
    _wait(device)
    return (time.perf_counter() - began) / _REPETITIONS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.splitlines()[0].strip()


PIECE = Piece(
    name="machine",
    title="Machine",
    text="The product of matrices is the ceiling beside which model FLOPs utilization (MFU) is given below.",
    columns=("what", "found"),
    rows={"machine": measure},
    tiny={"machine": measure},
    seconds=60,
    row_seconds=60,
)
