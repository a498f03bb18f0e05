"""Rows of train_runs.csv from MosaicML's LLM Foundry: MPT models under FSDP, on A100 and H100."""

from __future__ import annotations

from collections.abc import Mapping

from planner_truth.mapping import GBIT, Case, Degrees, Machines, Unmapped, build_case, transformer
from planner_truth.table import whole

_GPUS = {("H100", 80): "h100-sxm-80gb", ("A100", 80): "a100-sxm-80gb", ("A100", 40): "a100-sxm-40gb"}
# The README's section titles: 1600 Gbit/s of RoCE per node of A100; for H100 it says nothing; 8 x 400 is usual.
# SHARD_GRAD_OP keeps weights gathered from the forward to the backward pass.
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
_NODE_GBIT = {"A100": 1600, "H100": 3200}


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row: fully sharded or SHARD_GRAD_OP, and MPT's architecture.

    MPT has LayerNorm without bias, no biases, ALiBi, GELU, tied embeddings and flash attention.
    """
    gpu = _GPUS.get((row["gpu"], whole(row, "gpu_mem_gb", 0)))
    if gpu is None:
        raise Unmapped(f"no catalogue name for {row['gpu']} with {row['gpu_mem_gb']} GB")
    stage = _STAGES.get(row["dp_sharding"])
    if stage is None:
        raise Unmapped(f"sharding {row['dp_sharding'] or 'not given'}")
    pure = "mode PURE" in row["notes"]
    return build_case(
        "fsdp",
        transformer(
            "gpt",
            layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            heads=whole(row, "heads"),
            ffn=whole(row, "ffn", 0) or None,
            vocab=whole(row, "vocab"),
            seq_len=whole(row, "seq_len"),
            tied=True,
            bias=False,
            norm_bias=False,
            position_embedding="alibi",
        ),
        Degrees(
            data=whole(row, "dp"),
            zero_stage=stage,
            checkpointing="full" if row["act_recompute"] == "full" else "none",
        ),
        Machines(
            gpu,
            whole(row, "n_gpus"),
            whole(row, "gpus_per_node", 8),
            network="roce-400g",
            inter_node_bandwidth=_NODE_GBIT[row["gpu"]] * GBIT / whole(row, "gpus_per_node", 8),
        ),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
        training={"precision": "bf16", "grad_dtype": "bf16" if pure else "fp32"},
        planner={"attention": "flash"},  # attn_impl: triton or flash in the benchmark's YAML files
    )
