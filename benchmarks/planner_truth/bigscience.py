"""Rows of train_runs.csv from BigScience's chronicles: GPT models with Megatron-DeepSpeed on V100 and A100.

The tables of the chronicles lack settings that the text around them has (bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles-prequel.md, experiments/gpt2.md, train/tr3-*, tr8-*); these settings are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case, padded_vocab, transformer
from planner_truth.table import whole

# Sections with fixed dimensions: (layers, hidden, heads). Sizes of experiments/gpt2.md: MSIZE and NHEADS of its scripts
# (experiments/gpt2-meg, gpt2-meg-ds-zero, gpt2-hf-ds), which do not have the 22B, 24B, 50B and 78B of the tables.
_V100_MODELS = {
    "1.3B": (24, 2048, 16),
    "7.5B": (36, 4096, 32),
    "18B": (40, 6144, 32),
    "25B": (40, 7168, 32),
    "30B": (48, 7168, 32),
    "39B": (48, 8192, 32),
    "52B": (64, 8192, 32),
    "65B": (64, 9216, 32),
    "97B": (64, 11264, 32),
    "116B": (64, 12288, 32),
    "206B": (64, 16384, 32),
}
_BATCH_OF_1B3 = 512
# "NHIDDEN=14336 / NLAYERS=6 / GBS=512" heads the table; 2048 is the setting of the sections around it.
_BATCH_OF_SIX_LAYERS = 512


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row: full recomputation, and attention with its matrix of scores (2021 and 2022)."""
    if row["gpu"] == "A100":
        return _a100(row)
    if row["gpu"] == "V100":
        return _v100(row)
    raise Unmapped(f"no catalogue name for {row['gpu']}")


def _a100(row: Mapping[str, str]) -> Case:
    """Return the run on A100, with the vocabulary of 250k, ALiBi and embedding norm of the final model."""
    gpus, tensor, pipeline = whole(row, "n_gpus"), whole(row, "tp"), whole(row, "pp", 1)
    hidden = whole(row, "hidden", 14400 if "fastest 3D Topology" in row["notes"] else None)
    return build_case(
        "megatron",
        transformer(
            "gpt",
            layers=whole(row, "layers", 0) or _layers(row["model"], hidden, pipeline),
            hidden=hidden,
            # "all NHEADS=64 (above too)", but for the first runs, with hidden = 14400
            heads=whole(row, "heads", 96 if hidden == 14400 else 64),
            vocab=padded_vocab(250_000, tensor),
            seq_len=whole(row, "seq_len"),
            tied=True,
            position_embedding="alibi",
            embedding_norm=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        Degrees(
            data=whole(row, "dp", gpus // (tensor * pipeline)),
            tensor=tensor,
            pipeline=pipeline,
            tensor_sequence=False,
            zero_stage=1,
            checkpointing="full",
        ),
        Machines("a100-sxm-80gb", gpus, 8, network="omni-path-jean-zay-a100"),
        global_batch=_BATCH_OF_SIX_LAYERS if row["layers"] == "6" else whole(row, "gbs_samples", 2048),
        micro_batch=whole(row, "mbs"),
        training={"precision": "bf16", "grad_dtype": "bf16"},
        planner={"attention": "materialised"},
    )


def _layers(size: str, hidden: int, pipeline: int) -> int:
    """Return the multiple of the stages nearest to the printed size: the layers were "tweaked to fit PP"."""
    billions = re.match(r"([\d.]+)B", size)
    if billions is None:
        raise Unmapped("no layers")
    per_stage = float(billions[1]) * 1e9 / (12 * hidden**2) / pipeline
    return max(1, round(per_stage)) * pipeline


def is_zero_3(notes: str) -> bool:
    """Return whether the section of a row of the chronicles is about ZeRO-3."""
    return re.search("ZeRO|Zero 3", notes) is not None


def _v100(row: Mapping[str, str]) -> Case:
    """Return the run on V100: fp16, and tensor parallelism over the node's four GPUs unless the table has a degree."""
    if "BNB" in row["notes"]:
        raise Unmapped("BigScience, 8-bit optimizer: no global batch in the table")
    known = _V100_MODELS.get(row["model"])
    if not row["layers"] and known is None:
        raise Unmapped(f"no dimensions of the {row['model']} model")
    layers, hidden, heads = known or (0, 0, 0)
    gpus, pipeline = whole(row, "n_gpus"), whole(row, "pp", 1)
    from_transformers, zero_3 = "HF + " in row["notes"], is_zero_3(row["notes"])
    data = whole(row, "dp", gpus if from_transformers else 1)
    tensor = whole(row, "tp", max(1, gpus // (pipeline * data)))
    return build_case(
        "deepspeed" if zero_3 else "megatron",
        transformer(
            "gpt",
            layers=whole(row, "layers", layers),
            hidden=whole(row, "hidden", hidden),
            heads=whole(row, "heads", heads),
            vocab=padded_vocab(50257, tensor),
            seq_len=whole(row, "seq_len"),
            tied=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        Degrees(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            tensor_sequence=False,
            zero_stage=3 if zero_3 else 1 if "Deepspeed" in row["notes"] else 0,
            checkpointing="full",
            offload=_offload(row, from_transformers) if zero_3 else "none",
        ),
        # Omni-Path 4 x 100 Gbit/s per node of four GPUs
        # A launcher of torch sets OMP_NUM_THREADS to 1 (experiments/gpt2-hf, LAUNCHER).
        Machines("v100-sxm2-32gb", gpus, 4, network="omni-path-100g", inter_node_bandwidth=12.5e9, cpus_per_gpu=1),
        global_batch=whole(row, "gbs_samples", _BATCH_OF_1B3 if row["model"] == "1.3B" else None),
        micro_batch=whole(row, "mbs"),
        training={"precision": "fp16", "grad_dtype": "fp16"},
        planner={"attention": "materialised"},
    )


def _offload(row: Mapping[str, str], from_transformers: bool) -> str:
    """Return what a run with ZeRO-3 offloads, which experiments/gpt2.md says in its headings, text and columns.

    The scripts of the section on Transformers: hf_ds_gpt2_base_n4 offloads the optimizer, base_n8 and n16 also weights;
    its second table has 52B on 64 GPUs.
    """
    if not from_transformers:
        return "optimizer+params" if row["mbs"] == "64" else "none"  # "With full cpu offload"
    if row["model"] != "52B" or row["n_gpus"] != "64":
        return "optimizer" if row["n_gpus"] == "16" else "optimizer+params"
    if whole(row, "mbs") >= _OFFLOADED_SAMPLES:
        raise Unmapped("BigScience, ZeRO-3: what is offloaded is only in columns that are not here")
    return "none"


_OFFLOADED_SAMPLES = 12
