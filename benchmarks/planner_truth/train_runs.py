"""train_runs.csv: runs of many frameworks in one set of columns. Each framework's mapping is in a module of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from planner_truth import bigscience, foundry, fsdp_runs, megatron_runs
from planner_truth.mapping import Case, Unmapped
from planner_truth.table import Measured, Table, number, whole

_BUILDERS: dict[str, Callable[[Mapping[str, str]], Case]] = {
    "llm-foundry": foundry.build,
    "bigscience": bigscience.build,
    "megatron-sc21-table1": megatron_runs.build_paper,
    "korthikanti-table5": megatron_runs.build_paper,
    "mt-nlg-530b": megatron_runs.build_paper,
    "nemo-perf-2407": megatron_runs.build_recipe,
    "megatron-bridge": megatron_runs.build_recipe,
    "torchtitan": fsdp_runs.build_titan,
    "internevo": fsdp_runs.build_intern,
    "torchtune": fsdp_runs.build_tune,
}


# Mappings of sets without one of their own, by words of the framework.
_FRAMEWORKS: tuple[tuple[str, Callable[[Mapping[str, str]], Case]], ...] = (
    ("megatron|nemo", megatron_runs.build_recipe),
    ("fsdp|titan|torchtune|litgpt|composer|accelerate", fsdp_runs.build_plain),
)


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row, by the set that it belongs to, else by its framework."""
    if re.search(r"\bm?t5\b|\bt0", row["model"], re.IGNORECASE):
        raise Unmapped("encoder and decoder (T5)")
    builder = _BUILDERS.get(row["set"])
    if builder is None:
        name = row["framework"].lower()
        builder = next((each for words, each in _FRAMEWORKS if re.search(words, name)), None)
    if builder is None:
        raise Unmapped(f"no mapping for the framework {row['framework'] or 'of the row, which has none'}")
    if megatron_runs.is_adapter(row) and builder is not megatron_runs.build_recipe:
        raise Unmapped("fine-tuning of adapters: the row has no rank, layers or length of sequences")
    return builder(row)


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the step time, as printed or from tokens/s/GPU or FLOP/s, and memory of the kind that the author names."""
    seconds, rate = number(truth, "step_time_s"), number(truth, "tokens_per_s_per_gpu")
    batch, seq_len = number(inputs, "gbs_samples"), number(inputs, "seq_len")
    if seconds is None and rate and batch and seq_len:
        seconds = batch * seq_len / (rate * whole(inputs, "n_gpus"))
    if seconds is None and inputs["set"] == "megatron-sc21-table1":
        seconds = _narayanan_seconds(inputs, number(truth, "tflops_per_gpu_reported"))
    memory, note = number(truth, "peak_mem_gib"), truth["mem_unit_note"]
    unit = 2**30 if "GiB" in note else 1e9
    kind = "reserved" if "reserved" in note else "allocated" if "active" in note else "cached"
    return Measured(
        step_seconds=seconds,
        memory_bytes=None if memory is None else memory * unit,
        memory_kind=kind,
        ran=truth["oom"] != "1",
    )


def _narayanan_seconds(inputs: Mapping[str, str], teraflops: float | None) -> float | None:
    """Return the step time from FLOP/s per GPU as arXiv:2104.04473 counts them (equation 3): with recomputation, 96 B s
    l h^2 (...).
    """
    if not teraflops:
        return None
    layers, hidden, seq_len = whole(inputs, "layers"), whole(inputs, "hidden"), whole(inputs, "seq_len")
    tokens = whole(inputs, "gbs_samples") * seq_len
    share = 1 + seq_len / (6 * hidden) + whole(inputs, "vocab") / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * share / (whole(inputs, "n_gpus") * teraflops * 1e12)


COLUMNS = frozenset(
    "set model params layers hidden heads kv_heads ffn vocab seq_len gpu gpu_mem_gb gpus_per_node n_gpus "
    "interconnect framework precision workload gbs_samples mbs grad_accum dp dp_sharding tp sp pp vp cp ep "
    "act_recompute compile cpu_offload optimizer notes source".split()
)
TRUTH = frozenset("tokens_per_s_per_gpu tflops_per_gpu_reported step_time_s peak_mem_gib mem_unit_note oom".split())
TABLE = Table(
    file="train_runs.csv",
    input_columns=COLUMNS,
    truth_columns=TRUTH,
    build=build,
    measure=measure,
    panel=lambda row: " ".join(row[key] for key in ("set", "model", "gpu", "n_gpus", "seq_len", "gbs_samples")),
    source=lambda row: row["set"],
)
