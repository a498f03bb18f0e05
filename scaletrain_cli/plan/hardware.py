"""The accelerator catalogue: what a device can hold, compute and move. Knows nothing of models or layouts.

Rates are dense and per device, bandwidths per direction; memory is what the driver leaves to a process. The data sheet
that each row comes from stands beside it in hardware.json. Shares of the peak: matrix products of A100 and H100 are
fitted to published training throughput (LLM Foundry and torchtitan, see the planner's tests), attention is what
FlashAttention-2 reports (arXiv:2307.08691, section 4); for the other devices both are estimates.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.spec import ClusterSpec

# Below these the rate is a slip of the pen, and dividing by it overflows.
_SLOWEST = 1.0
# For a device that the user describes: shares of the peak as of those that were measured, a little lower.
_UNMEASURED_FRACTION = 0.6
_UNMEASURED_ATTENTION = 0.4


@dataclass(frozen=True)
class Accelerator:
    """One device. ``flops`` maps a precision to its dense peak; a precision that is missing is not supported."""

    name: str
    memory_bytes: int
    flops: dict[str, float]
    memory_bandwidth: float
    intra_node_bandwidth: float
    achievable_fraction: float  # of the peak, in matrix products of a training step
    attention_fraction: float  # of the peak, in the fused attention kernel, counting what it computes
    source: str
    is_cpu: bool = False

    def fuses_attention(self, precision: str, head_dim: int, grouped: bool) -> bool:
        """Whether scaled-dot-product attention has a kernel that keeps no matrix of scores.

        On CUDA, FlashAttention takes 16-bit types and heads up to 256; the memory-efficient kernel takes fp32 too, but
        no grouped queries (torch, ``scaled_dot_product_attention``: "only for Flash_attention and math kernel").
        """
        if self.is_cpu:
            return True
        flash = precision in self.flops and precision not in ("fp32", "tf32") and head_dim <= 256
        return flash or not grouped

    def peak_flops(self, precision: str) -> float:
        """Dense peak at a precision; where the device lacks it, the peak of the fp32 units that emulate it."""
        return self.flops.get(precision, self.flops["fp32"])


def accelerator_names() -> list[str]:
    """Names that ``cluster.gpu`` may take."""
    return list(_catalogue())


def find_accelerator(cluster: ClusterSpec) -> Accelerator:
    """The device that the cluster section names or describes. Raises UsageError with the nearest known name."""
    wanted = cluster.gpu
    if isinstance(wanted, str):
        row = _catalogue().get(wanted)
        if row is None:
            raise _unknown(wanted)
        found = _from_row(wanted, row)
    else:
        flops = {"fp32": max(wanted.fp32_flops, _SLOWEST), "tf32": max(wanted.fp32_flops, _SLOWEST)}
        if wanted.bf16_flops is not None:
            flops["bf16"] = max(wanted.bf16_flops, _SLOWEST)
        found = Accelerator(
            name=wanted.name,
            memory_bytes=wanted.memory,
            flops=flops,
            memory_bandwidth=max(wanted.memory_bandwidth, _SLOWEST),
            intra_node_bandwidth=max(wanted.intra_node_bandwidth, _SLOWEST),
            achievable_fraction=_UNMEASURED_FRACTION,
            attention_fraction=_UNMEASURED_ATTENTION,
            source="the run spec",
        )
    if cluster.intra_node_bandwidth == "auto":
        return found
    return replace(found, intra_node_bandwidth=max(cluster.intra_node_bandwidth, _SLOWEST))


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    text = files("scaletrain_cli.plan").joinpath("hardware.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["gpus"])


def _from_row(name: str, row: dict[str, Any]) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=row["memory_bytes"],
        flops={key.removesuffix("_flops"): float(value) for key, value in row.items() if key.endswith("_flops")},
        memory_bandwidth=row["memory_bandwidth"],
        intra_node_bandwidth=row["intra_node_bandwidth"],
        achievable_fraction=row["achievable_fraction"],
        attention_fraction=row["attention_fraction"],
        source=row["source"],
        is_cpu=name == "cpu",
    )


def _unknown(name: str) -> UsageError:
    known = accelerator_names()
    near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.3)
    shown = name.encode("unicode_escape").decode("ascii")[:80]
    hint = (f"Did you mean {near[0]}? " if near else "") + f"Known: {', '.join(known)}; or give a table."
    problem = Problem("run spec", "cluster.gpu", "is not in the hardware catalogue.", shown, hint)
    return UsageError(f"unknown accelerator {shown}", (problem,))
