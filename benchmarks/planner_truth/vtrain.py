"""Step times with which vTrain (MICRO'24) was validated: GPT with Megatron-DeepSpeed on one and eight nodes of A100."""

from __future__ import annotations

from collections.abc import Mapping

from planner_truth.mapping import GBIT, Case, Degrees, Machines, Unmapped, build_case, padded_vocab, transformer
from planner_truth.table import Measured, Table, number, whole


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row: full recomputation, fp16, GPT with biases and learned positions, vTrain's vocabulary."""
    if row["gpu"] != "A100":
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    tensor, gpus, per_node = whole(row, "tp", 1), whole(row, "n_gpus"), whole(row, "gpus_per_node", 8)
    return build_case(
        "megatron",
        transformer(
            "gpt",
            layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            heads=whole(row, "heads"),
            ffn=whole(row, "ffn", 0) or None,
            vocab=padded_vocab(whole(row, "vocab_assumed", 50257), tensor),
            seq_len=whole(row, "seq_len"),
            tied=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        Degrees(
            data=whole(row, "dp", 1),
            tensor=tensor,
            pipeline=whole(row, "pp", 1),
            tensor_sequence=False,
            zero_stage=0,
            checkpointing="full" if row["act_recompute"].startswith("full") else "none",
        ),
        Machines(
            "a100-sxm-80gb",
            gpus,
            per_node,
            # The column has the bandwidth beyond HDR's 200 Gbit/s per GPU; latencies are those of InfiniBand.
            network="infiniband-hdr",
            inter_node_bandwidth=(number(row, "inter_node_gbps") or 800) * GBIT / per_node,
        ),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
        training={"precision": "fp16", "grad_dtype": "fp16"},
        planner={"attention": "materialised"},  # Megatron-DeepSpeed of 2022: fused softmax, no flash attention
    )


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the seconds per optimizer step."""
    return Measured(step_seconds=number(truth, "step_time_s"))


TABLE = Table(
    file="vtrain_measured_step_times.csv",
    input_columns=frozenset(
        "split layers hidden heads ffn vocab_assumed seq_len gpu gpus_per_node n_gpus gbs_samples mbs dp tp pp "
        "act_recompute schedule inter_node_gbps".split()
    ),
    truth_columns=frozenset({"step_time_s"}),
    build=build,
    measure=measure,
    panel=lambda row: " ".join(row[key] for key in ("split", "layers", "hidden", "n_gpus", "gbs_samples")),
    source=lambda row: f"vTrain {row['split']}",
)
