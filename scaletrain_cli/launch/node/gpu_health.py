"""What the driver says of a node's GPUs: memory that is broken or taken, clocks that are held down, GPUs that are gone.

Reads ``nvidia-smi -q -x``, whose elements have kept their names over many drivers where the columns of its tables have
not. A node without nvidia-smi has nothing to say. Knows no run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

_SECONDS = 60.0  # eight GPUs without persistence mode take ten
_MEBIBYTE = 2**20
_NUMBER = re.compile(r"\d+")
# Under either name that drivers have had for it; "Active" where it holds.
_HELD_DOWN = ("hw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True)
class GpuHealth:
    """One GPU as the driver sees it; bytes, and None for what it does not say."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    uncorrected_errors: int = 0  # since the driver was loaded
    waits_for_reset: bool = False  # rows or pages that only a reset takes out of use
    beyond_repair: bool = False
    held_down_by: tuple[str, ...] = ()
    processes: int = 0


@dataclass(frozen=True)
class NodeHealth:
    """A node's GPUs, and its driver; ``trouble`` is what nvidia-smi said instead."""

    driver: str = ""
    gpus: tuple[GpuHealth, ...] = ()
    trouble: str = ""


def ask_driver() -> NodeHealth | None:
    """None where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    process = subprocess.Popen([program, "-q", "-x"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait for it: what hangs in the driver does not die
        return NodeHealth(trouble=f"nvidia-smi did not answer within {_SECONDS:.0f} s: a GPU or its driver hangs")
    found = read_health(said)
    if process.returncode and not found.gpus:
        return NodeHealth(trouble=f"nvidia-smi ended with {process.returncode}: {' '.join(said.split())[:300]}")
    return found  # also with another code than 0, by which it warns


def read_health(text: str) -> NodeHealth:
    """From the XML of nvidia-smi."""
    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return NodeHealth(trouble=f"nvidia-smi printed something else than XML: {error}")
    gpus = tuple(_gpu(index, gpu) for index, gpu in enumerate(tree.findall("gpu")))
    return NodeHealth(driver=tree.findtext("driver_version", ""), gpus=gpus)


def visible_gpus(health: NodeHealth, environment: Mapping[str, str]) -> tuple[GpuHealth, ...]:
    """Those that a process with this environment may use: CUDA_VISIBLE_DEVICES has indices or UUIDs."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return health.gpus
    chosen = [word.strip() for word in visible.split(",")]
    return tuple(
        gpu
        for gpu in health.gpus
        if any(word == str(gpu.index) or (word and gpu.uuid.startswith(word)) for word in chosen)
    )


def gpu_problems(health: NodeHealth, gpus: Sequence[GpuHealth], needed_bytes: int) -> Iterator[str]:
    """What no rank should be started on. ``needed_bytes``: the planned peak of a rank."""
    if health.trouble:
        yield health.trouble
    for gpu in gpus:
        if gpu.beyond_repair:
            yield f"GPU {gpu.index} has broken memory that its spare rows cannot replace (remapped_row_failure)"
        elif gpu.waits_for_reset:
            yield f"GPU {gpu.index} has broken memory and waits for a reset to take it out of use"
        if gpu.memory_bytes is not None and gpu.used_bytes is not None:
            free = gpu.memory_bytes - gpu.used_bytes
            if gpu.memory_bytes >= needed_bytes > free:
                others = f" by {gpu.processes} processes" if gpu.processes else ""
                yield (
                    f"GPU {gpu.index} has {free / 1e9:.1f} GB free of {gpu.memory_bytes / 1e9:.1f} GB, the rest is in "
                    f"use{others}; the plan needs {needed_bytes / 1e9:.1f} GB"
                )
            elif gpu.memory_bytes < needed_bytes:
                yield (
                    f"GPU {gpu.index} is a {gpu.name} with {gpu.memory_bytes / 1e9:.1f} GB; the plan needs "
                    f"{needed_bytes / 1e9:.1f} GB"
                )


def gpu_notes(gpus: Sequence[GpuHealth]) -> Iterator[str]:
    """What costs speed, or may come again."""
    for gpu in gpus:
        if gpu.uncorrected_errors:
            yield f"GPU {gpu.index} has had {gpu.uncorrected_errors} uncorrected ECC errors since its driver was loaded"
        for reason in gpu.held_down_by:
            yield f"GPU {gpu.index} is held down by {reason.replace('_', ' ')}"


def _gpu(index: int, gpu: ElementTree.Element) -> GpuHealth:
    volatile = gpu.find("ecc_errors/volatile")
    counts = [] if volatile is None else [e for e in volatile.iter() if "uncorrect" in e.tag or "double_bit" in e.tag]
    reasons = [e for tag in ("clocks_event_reasons", "clocks_throttle_reasons") for e in gpu.findall(f"{tag}/*")]
    return GpuHealth(
        index=index,
        uuid=gpu.findtext("uuid", ""),
        name=gpu.findtext("product_name", ""),
        memory_bytes=_bytes(gpu.findtext("fb_memory_usage/total")),
        used_bytes=_bytes(gpu.findtext("fb_memory_usage/used")),
        uncorrected_errors=sum(int(text) for e in counts if (text := (e.text or "").strip()).isdigit()),
        waits_for_reset=any(
            gpu.findtext(path, "").strip() == "Yes"
            for path in (
                "remapped_rows/remapped_row_pending",
                "retired_pages/pending_retirement",
                "retired_pages/pending_blacklist",
            )
        ),
        beyond_repair=gpu.findtext("remapped_rows/remapped_row_failure", "").strip() == "Yes",
        held_down_by=tuple(
            name for name in _HELD_DOWN if any(e.tag.endswith(name) and (e.text or "") == "Active" for e in reasons)
        ),
        processes=len(gpu.findall("processes/process_info")),
    )


def _bytes(text: str | None) -> int | None:
    """``81559 MiB``."""
    found = _NUMBER.match(text or "")
    return int(found[0]) * _MEBIBYTE if found else None
