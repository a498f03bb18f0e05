"""The layout sweep of the Ultra-Scale Playbook: nanotron, Llama models of 1, 3 and 8 billion parameters on H100."""

from __future__ import annotations

from collections.abc import Mapping

from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case, transformer
from planner_truth.table import Measured, Table, number, whole


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row: no recomputation, RMSNorm, SwiGLU, tensor with sequence parallelism (REDUCE_SCATTER)."""
    if row["gpu"] != "H100":
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    tensor = whole(row, "tp", 1)
    return build_case(
        "nanotron",
        transformer(
            "llama",
            layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            heads=whole(row, "heads"),
            kv_heads=whole(row, "kv_heads", 0) or None,
            ffn=whole(row, "ffn", 0) or None,
            vocab=whole(row, "vocab"),
            seq_len=whole(row, "seq_len"),
            tied=row["tie_embeddings"] == "1",
        ),
        Degrees(
            data=whole(row, "dp", 1),
            tensor=tensor,
            pipeline=whole(row, "pp", 1),
            tensor_sequence=tensor > 1,
            zero_stage=whole(row, "zero_stage", 0),
        ),
        Machines(
            "h100-sxm-80gb",
            whole(row, "n_gpus"),
            whole(row, "gpus_per_node", 8),
            network="efa-p5",
        ),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
    )


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return step time and memory as rank 0 logs them; rank 0 has the first stage.

    helpers.py logs "Mem Res (GB)", max_memory_reserved() / 1024**3. The rows confirm that it is reserved and not
    allocated memory: sharding the optimizer over more replicas often saves less than the states that it removes, which
    only a cache of freed blocks explains.
    """
    memory, mfu = number(truth, "gpu_memory_gb"), number(truth, "mfu_pct")
    return Measured(
        step_seconds=number(truth, "step_time_s"),
        memory_bytes=None if memory is None else memory * 2**30,
        memory_kind="reserved",
        memory_stage="first",
        ran=truth["status"] == "ok",
        mfu=None if mfu is None else mfu / 100,
    )


TABLE = Table(
    file="nanotron_ultrascale_sweep.csv",
    input_columns=frozenset(
        "model layers hidden heads kv_heads ffn vocab tie_embeddings seq_len gpu gpus_per_node n_nodes n_gpus mbs "
        "gbs_samples dp tp pp zero_stage".split()
    ),
    truth_columns=frozenset("status mfu_pct gpu_memory_gb step_time_s".split()),
    build=build,
    measure=measure,
    panel=lambda row: f"{row['model']} on {row['n_nodes']} nodes",
    source=lambda row: f"nanotron {row['model']} on {row['n_nodes']} nodes",
)
