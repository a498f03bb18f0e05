"""The sets that are scored: their rows, the compared value, errors of other estimators, and the targets.

Figures of other estimators come from anchor_baseline_errors.csv: the same sources, but more rows (1746 runs of the
sweep, for example), and for the sweep's regret only runs with an MFU of at least 10 % and tensor parallelism up to 8.
So they show the order of magnitude. "all" of the sweep's step times combines its two parts, weighted by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from planner_truth import (
    bigscience,
    deepspeed_runs,
    megatron_ci,
    megatron_runs,
    mlperf,
    nanotron,
    train_runs,
    vision,
    vtrain,
)
from planner_truth.table import Measured, Table

Quantity = Literal["memory", "time", "fits", "ranking"]


def _every(inputs: Mapping[str, str], measured: Measured) -> bool:
    return True


@dataclass(frozen=True)
class TruthSet:
    """One set; ``keep`` sees inputs and measurements of a row, because the prediction is already made.

    ``by``: a column of the inputs; each of its values also gets a line of its own.
    """

    name: str
    table: Table
    quantity: Quantity
    title: str
    keep: Callable[[Mapping[str, str], Measured], bool] = _every
    peer: str = ""
    target: str = ""
    by: str = ""


def _mfu_above_a_tenth(inputs: Mapping[str, str], measured: Measured) -> bool:
    return measured.mfu is not None and measured.mfu >= 0.10


# Below: offload, pipelines with few micro-batches, tiny models, tensor parallelism over slow networks.
_LOW_MFU = 0.05


def _mfu_above_five_percent(inputs: Mapping[str, str], measured: Measured) -> bool:
    return measured.mfu is not None and measured.mfu >= _LOW_MFU


def _mfu_below_five_percent(inputs: Mapping[str, str], measured: Measured) -> bool:
    return measured.mfu is not None and measured.mfu < _LOW_MFU


def _of(column: str, *values: str) -> Callable[[Mapping[str, str], Measured], bool]:
    return lambda inputs, measured: inputs[column] in values


def _seven_billion_class(inputs: Mapping[str, str], measured: Measured) -> bool:
    hidden = inputs["arg_hidden_size"]
    return hidden.isdigit() and int(hidden) >= 4096


def _adapters(inputs: Mapping[str, str], measured: Measured) -> bool:
    return megatron_runs.is_adapter(inputs)


def _zero_3(inputs: Mapping[str, str], measured: Measured) -> bool:
    return bigscience.is_zero_3(inputs["notes"])


def _except(condition: Callable[[Mapping[str, str], Measured], bool]) -> Callable[[Mapping[str, str], Measured], bool]:
    return lambda inputs, measured: not condition(inputs, measured)


def _both(*conditions: Callable[[Mapping[str, str], Measured], bool]) -> Callable[[Mapping[str, str], Measured], bool]:
    return lambda inputs, measured: all(condition(inputs, measured) for condition in conditions)


_N, _V, _T, _M = nanotron.TABLE, vtrain.TABLE, train_runs.TABLE, megatron_ci.TABLE
_P, _D = mlperf.TABLE, deepspeed_runs.TABLE
_RECIPES = ("nemo-perf-2407", "megatron-bridge")
_NEMO, _BRIDGE = (_both(_of("set", name), _except(_adapters)) for name in _RECIPES)
_RECIPES_LORA = _both(_of("set", *_RECIPES), _adapters)
_BIG_A100 = _both(_of("set", "bigscience"), _of("gpu", "A100"))

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
    TruthSet(
        "bigscience-a100-time",
        _T,
        "time",
        "BigScience, A100, step time",
        _BIG_A100,
        "Calculon 25 %",
        "≤ 15 %",
    ),
    TruthSet(
        "bigscience-v100-time",
        _T,
        "time",
        "BigScience, V100, step time",
        _both(_of("set", "bigscience"), _of("gpu", "V100"), _except(_zero_3)),
    ),
    TruthSet(
        "bigscience-v100-zero-3-time",
        _T,
        "time",
        "BigScience, V100, DeepSpeed ZeRO-3",
        _both(_of("set", "bigscience"), _of("gpu", "V100"), _zero_3),
    ),
    TruthSet("bigscience-memory", _T, "memory", "BigScience, A100, nvidia-smi", _BIG_A100, "Calculon 43 %"),
    TruthSet("bigscience-rank", _T, "ranking", "BigScience, A100, ranking", _BIG_A100, "Calculon tau 0.37"),
    TruthSet("sc21-time", _T, "time", "Narayanan 2021, step time", _of("set", "megatron-sc21-table1")),
    TruthSet(
        "korthikanti-time",
        _T,
        "time",
        "Korthikanti 2022, step time",
        _of("set", "korthikanti-table5"),
        "Calculon 3.7 %",
    ),
    TruthSet("mt-nlg-time", _T, "time", "MT-NLG 530B, step time", _of("set", "mt-nlg-530b")),
    TruthSet("torchtitan-time", _T, "time", "torchtitan, step time", _of("set", "torchtitan")),
    TruthSet("torchtitan-memory", _T, "memory", "torchtitan, reserved", _of("set", "torchtitan")),
    TruthSet("internevo-time", _T, "time", "InternEvo, step time", _of("set", "internevo")),
    TruthSet("internevo-memory", _T, "memory", "InternEvo, memory", _of("set", "internevo")),
    TruthSet("nemo-time", _T, "time", "NeMo 24.07, H100 fp8, step time", _NEMO),
    TruthSet("bridge-time", _T, "time", "Megatron-Bridge, step time", _BRIDGE),
    TruthSet("recipes-lora-time", _T, "time", "NeMo and Megatron-Bridge, LoRA", _RECIPES_LORA),
    TruthSet("torchtune-memory", _T, "memory", "torchtune, memory", _of("set", "torchtune")),
    TruthSet("mlperf-gpt3-time", _P, "time", "MLPerf GPT-3 175B, step time", _of("benchmark", "gpt3"), target="≤ 15 %"),
    TruthSet("mlperf-lora-time", _P, "time", "MLPerf Llama 2 70B LoRA, step time", _of("benchmark", "llama2_70b_lora")),
    TruthSet("deepspeed-time", _D, "time", "DeepSpeed, step time", target="≤ 15 %", by="set"),
    TruthSet(
        "deepspeed-time-5", _D, "time", "DeepSpeed, step time, MFU ≥ 5 %", _mfu_above_five_percent, "", "≤ 15 %", "set"
    ),
    TruthSet("deepspeed-time-low", _D, "time", "DeepSpeed, step time, MFU < 5 %", _mfu_below_five_percent, by="set"),
    TruthSet("deepspeed-fits", _D, "fits", "DeepSpeed, fits"),
    TruthSet("deepspeed-memory", _D, "memory", "DeepSpeed, peak memory", target="≤ 10 %", by="set"),
    TruthSet("timm-time", vision.TIMM, "time", "timm, ResNet, ConvNeXt and ViT, RTX 3090"),
    TruthSet("dle-time", vision.DLE, "time", "NVIDIA examples, ResNet-50, V100 and A100"),
    TruthSet("openclip-time", vision.OPENCLIP, "time", "OpenCLIP, A100, with decoding of images"),
    TruthSet("mlperf-resnet-time", vision.MLPERF, "time", "MLPerf ResNet-50, step time"),
)
