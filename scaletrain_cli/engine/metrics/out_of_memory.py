"""Report on a rank that runs out of memory: planned and measured bytes, and the allocations by line of code.

Writes attempts/NNNN/memory/: one ``rank-NNNNN.json`` per rank, and one ``snapshot.pickle`` of the first GPU that fails,
for https://pytorch.org/memory_viz.
"""

import contextlib
import pickle
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.metrics.memory_measurement import model_state_bytes, peak_memory_bytes
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, open_new

SCHEMA = "scaletrain.out-of-memory/v1"


@contextlib.contextmanager
def reporting_out_of_memory(
    run: RunDir, plan: RunPlan, attempt: int, rank: int, composed: Composed | None = None
) -> Iterator[None]:
    """A context that adds a report to an out-of-memory error, and a note to the error, and raises it again.

    Contexts may be nested; the innermost with DeepSpeed's engine reports most, and only one report is written.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        if not getattr(error, "__notes__", []):
            with contextlib.suppress(Exception):  # there is no memory; the error itself matters more
                # as add_note() does from Python 3.11 on
                engine = None if composed is None else composed.engine
                error.__notes__ = [_report(run, plan, attempt, rank, engine, error)]  # type: ignore[union-attr]
        raise


def remember_allocations(device: torch.device) -> None:
    """Record the line of Python code of each new GPU allocation (about 2 us each). The device must be current."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")


def forget_allocations(device: torch.device) -> None:
    """Stop recording new allocations, to keep the hot path fast; recorded ones stay."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(None)


def _report(run: RunDir, plan: RunPlan, attempt: int, rank: int, engine: Any, error: Exception) -> str:
    folder = run.attempt(attempt) / "memory"
    make_folder(folder)
    stage = rank * plan.layout.pipeline_parallel // plan.layout.world_size
    planned = plan.memory.by_stage[stage]
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    held = _gpu_bytes() if on_gpu else _host_bytes()
    states = None if engine is None else model_state_bytes(engine)
    path = folder / f"rank-{rank:05d}.json"
    write_document(
        path,
        {
            "schema": SCHEMA,
            "rank": rank,
            "stage": stage,
            "error": str(error),
            "planned": {**asdict(planned), "capacity": plan.memory.capacity},
            "held": held,
            "model_states": None if states is None else asdict(states),
            "snapshot": "snapshot.pickle" if on_gpu and _first_snapshot(folder) else None,
        },
    )
    names = ("peak_allocated", "allocated") if on_gpu else ("peak_resident", "node_available")
    measured = ", ".join(f"{name.replace('_', ' ')} {held[name] / 1e9:.2f} GB" for name in names)
    in_states = "" if states is None else f", {states.on_device / 1e9:.2f} GB of it model states"
    model_states = planned.parameters + planned.gradients + planned.optimizer_states
    return (
        f"Rank {rank} was planned to need {planned.peak / 1e9:.2f} GB, {model_states / 1e9:.2f} GB of it model states, "
        f"of {plan.memory.capacity / 1e9:.2f} GB: {measured}{in_states}. See {path.relative_to(run.path)}."
    )


def _gpu_bytes() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": peak_memory_bytes(torch.device("cuda", torch.cuda.current_device())),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "device_free": free,
        "device_total": total,
    }


def _host_bytes() -> dict[str, int]:
    """Return peak bytes of this process, and bytes of the node."""
    node = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    kib = {name: int(text.split()[0]) for name, text in node.items()}
    return {
        "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "node_available": kib["MemAvailable"] * 1024,
        "node_total": kib["MemTotal"] * 1024,
    }


def _first_snapshot(folder: Path) -> bool:
    """Write the allocator's state unless another rank has: the snapshots are similar, and large."""
    with contextlib.suppress(FileExistsError):
        write_memory_snapshot(folder / "snapshot.pickle")
        return True
    return False


def write_memory_snapshot(path: Path) -> None:
    """Write the GPU's allocations for https://pytorch.org/memory_viz. Raises FileExistsError and OSError."""
    with open_new(path, replace=False) as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
