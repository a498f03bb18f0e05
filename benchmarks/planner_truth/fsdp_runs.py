"""Rows of train_runs.csv from torchtitan (FSDP2), torchtune and InternEvo."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner_truth.architectures import known_model
from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case
from planner_truth.table import whole

_TITAN_GPUS = {"H100 (96GB HBM2e, 500W)": "h100-sxm-96gb", "H200": "h200-sxm-141gb", "H100": "h100-sxm-80gb"}
_INTERN_GPUS = {"A100": "a100-sxm-80gb", "A800": "a800-sxm-80gb"}
_TUNE_GPUS = {"4090": "rtx-4090-24gb", "A6000": "a6000-48gb", "A100": "a100-sxm-80gb"}


def build_titan(row: Mapping[str, str]) -> Case:
    """Return a run of torchtitan: Llama 3, fully sharded, fp32 master weights, gradients reduced in fp32 (its
    defaults).

    ``mbs`` is torchtitan's local batch size. A pipeline divides it into micro-batches of one sequence
    (pipeline_parallel_microbatch_size is 1 by default).
    """
    gpu = _TITAN_GPUS.get(row["gpu"])
    if gpu is None:
        raise Unmapped(f"no catalogue name for {row['gpu'][:30]}")
    if re.search("mxfp8|nvfp4", row["precision"]):
        raise Unmapped(f"precision {row['precision']}")
    if "rowwise" in row["precision"] or row["notes"].startswith("async TP"):
        raise Unmapped("float8 scaled by rows, or asynchronous tensor parallelism")
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    return build_case(
        "fsdp",
        known_model(row),
        Degrees(
            data=whole(row, "dp"),
            tensor=tensor,
            pipeline=pipeline,
            tensor_sequence=tensor > 1,
            zero_stage=3,
            checkpointing=next((k for k in ("full", "selective") if row["act_recompute"].startswith(k)), "none"),
        ),
        Machines(gpu, whole(row, "n_gpus"), 8, network="roce-400g"),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=1 if pipeline > 1 else whole(row, "mbs"),
        training={
            "precision": "fp8" if "float8" in row["precision"] else "bf16",
            "grad_dtype": "fp32",
            "compile": row["compile"] == "1",
        },
        planner={"attention": "flash"},
    )


def build_intern(row: Mapping[str, str]) -> Case:
    """Return a run of InternEvo: flash attention, ZeRO-1 over all ranks or groups, bf16 gradients; FSDP rows fully
    sharded.
    """
    gpu = _INTERN_GPUS.get(row["gpu"])
    if gpu is None:
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    if "within groups" in row["dp_sharding"]:
        raise Unmapped("ZeRO within groups of ranks")
    sharded = row["dp_sharding"].startswith("FSDP")
    gpus, tensor, pipeline = whole(row, "n_gpus"), whole(row, "tp", 1), whole(row, "pp", 1)
    data, micro = whole(row, "dp", gpus // (tensor * pipeline)), whole(row, "mbs")
    return build_case(
        "fsdp" if sharded else "deepspeed",
        known_model(row, tensor),
        Degrees(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            tensor_sequence=False,
            zero_stage=3 if sharded else 1,
            checkpointing="full" if row["act_recompute"] == "full" else "none",
        ),
        Machines(gpu, gpus, 8, network="roce-100g", inter_node_bandwidth=6.25e9),  # 4 x 100 Gbit/s per node
        global_batch=whole(row, "gbs_samples", data * micro * whole(row, "grad_accum", 1)),
        micro_batch=micro,
        training={"precision": "bf16", "grad_dtype": "bf16"},
        planner={"attention": "flash"},
    )


def build_tune(row: Mapping[str, str]) -> Case:
    """Return a run of full fine-tuning with torchtune, if the row has enough settings."""
    if row["gpu"] not in _TUNE_GPUS or not row["seq_len"]:
        raise Unmapped("torchtune's tables leave out batch, sequence length or optimizer")
    gpus = whole(row, "n_gpus")
    return build_case(
        "fsdp",
        known_model(row),
        Degrees(data=gpus, zero_stage=3 if gpus > 1 else 0, checkpointing="full"),
        Machines(_TUNE_GPUS[row["gpu"]], gpus, 8),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
        training={"precision": "bf16", "grad_dtype": "bf16"},
    )
