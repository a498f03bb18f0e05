"""What is scored: which rows make a set, what is compared, what other estimators reach there and what must be reached.

Figures of other estimators were measured on the same files (anchor_baseline_errors.csv beside them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from planner_truth import megatron_ci, nanotron, train_runs, vtrain
from planner_truth.table import Measured, Table, number

Quantity = Literal["memory", "time", "fits", "ranking"]


def _every(inputs: Mapping[str, str], measured: Measured) -> bool:
    return True


@dataclass(frozen=True)
class TruthSet:
    """``keep`` decides with both halves of the row in hand: the prediction is made by then."""

    name: str
    table: Table
    quantity: Quantity
    title: str
    keep: Callable[[Mapping[str, str], Measured], bool] = _every
    peer: str = ""
    target: str = ""


def _mfu_above_a_tenth(inputs: Mapping[str, str], measured: Measured) -> bool:
    return measured.mfu is not None and measured.mfu >= 0.10


def _of(column: str, *values: str) -> Callable[[Mapping[str, str], Measured], bool]:
    return lambda inputs, measured: inputs[column] in values


def _seven_billion_class(inputs: Mapping[str, str], measured: Measured) -> bool:
    return (number(inputs, "arg_hidden_size") or 0) >= 4096


_N, _V, _T, _M = nanotron.TABLE, vtrain.TABLE, train_runs.TABLE, megatron_ci.TABLE

SETS = (
    TruthSet("nanotron-memory", _N, "memory", "nanotron sweep, memory", peer="llm-analysis 41 %", target="≤ 10 %"),
    TruthSet(
        "nanotron-fits", _N, "fits", "nanotron sweep, fits", peer="llm-analysis 83 %", target="≥ 92 %, false ≤ 5 %"
    ),
    TruthSet(
        "nanotron-time",
        _N,
        "time",
        "nanotron sweep, step time, MFU ≥ 10 %",
        _mfu_above_a_tenth,
        "llm-analysis 43 %",
        "≤ 15 %",
    ),
    TruthSet("nanotron-time-all", _N, "time", "nanotron sweep, step time, all", peer="llm-analysis 61 %"),
    TruthSet("nanotron-rank", _N, "ranking", "nanotron sweep, top-1", peer="llm-analysis 59 %", target="≤ 8 %"),
    TruthSet("vtrain-single", _V, "time", "vTrain, one node", _of("split", "single-node"), "Calculon 39 %", "≤ 15 %"),
    TruthSet("vtrain-multi", _V, "time", "vTrain, many nodes", _of("split", "multi-node"), "Calculon 11 %", "≤ 9 %"),
    TruthSet("foundry-time", _T, "time", "LLM Foundry, step time", _of("set", "llm-foundry"), "none known", "≤ 15 %"),
    TruthSet("megatron-memory", _M, "memory", "Megatron tests, peak allocated", peer="Megatron 40 %", target="≤ 15 %"),
    TruthSet(
        "megatron-memory-7b",
        _M,
        "memory",
        "Megatron tests, hidden ≥ 4096",
        _seven_billion_class,
        "Megatron 3-9 %",
        "≤ 5 %",
    ),
    TruthSet("megatron-time", _M, "time", "Megatron tests, iteration time"),
)
