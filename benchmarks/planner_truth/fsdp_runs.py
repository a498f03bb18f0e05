"""Rows of train_runs.csv from torchtitan (FSDP2), torchtune and InternEvo."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from planner_truth.architectures import known_model, model_of
from planner_truth.deepspeed_programs import InternEvo
from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case
from planner_truth.table import number, whole
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.catalogue.hardware import full_name
from scaletrain_cli.plan.frameworks.fsdp import Fsdp


class CompiledLoss(Fsdp):
    """torchtitan since 2025, whose torch.compile includes the loss.

    Its kernels read 16-bit logits and write their 16-bit gradients (torchtitan/components/loss.py at e7c0cae, which the
    runs of June 2025 used; at 9dec370, of those of December 2024, it is commented out).
    """

    memory_profile = replace(Fsdp.memory_profile, logits=4)


_TITAN_GPUS = {"H100 (96GB HBM2e, 500W)": "h100-sxm-96gb", "H200": "h200-sxm-141gb", "H100": "h100-sxm-80gb"}
_STAGES = {"SHARD_GRAD_OP": 2, "NO_SHARD": 0, "DDP": 0}
# Names that give no form factor: the usual ones of servers.
_SERVERS: dict[tuple[str, float | None], str] = {
    ("A100", 40): "a100-sxm-40gb",
    ("A100", 80): "a100-sxm-80gb",
    ("A100", None): "a100-sxm-80gb",
    ("H100", 80): "h100-sxm-80gb",
    ("H100", None): "h100-sxm-80gb",
    ("H200", 141): "h200-sxm-141gb",
    ("H200", None): "h200-sxm-141gb",
}
_INTERN_GPUS = {"A100": "a100-sxm-80gb", "A800": "a800-sxm-80gb"}
_TUNE_GPUS = {"4090": "rtx-4090-24gb", "A6000": "a6000-48gb", "A100": "a100-sxm-80gb"}


def build_titan(row: Mapping[str, str]) -> Case:
    """Return a run of torchtitan: Llama 3, fully sharded, fp32 master weights, gradients reduced in fp32 (its
    defaults).

    ``mbs`` is torchtitan's local batch size. A pipeline divides it into micro-batches of one sequence
    (pipeline_parallel_microbatch_size is 1 by default), until April 2025 into as many as it has stages (pull request
    1073).
    """
    gpu = _TITAN_GPUS.get(row["gpu"])
    if gpu is None:
        raise Unmapped(f"torchtitan: neither recomputation nor a known GPU in the table ({row['gpu'][:30]})")
    if "nvfp4" in row["precision"]:
        raise Unmapped("4-bit precision")
    if re.search("mxfp8|rowwise", row["precision"]):
        raise Unmapped("torchao's float8 with a scale per row or block, for which the planner has no kernels")
    if row["notes"].startswith("async TP"):
        raise Unmapped("asynchronous tensor parallelism")
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    old = "202412" in row["source"]
    sequences = max(1, whole(row, "mbs") // pipeline) if old or pipeline == 1 else 1
    case = build_case(
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
        micro_batch=sequences,
        training={
            "precision": "fp8" if "float8" in row["precision"] else "bf16",
            "grad_dtype": "fp32",
            "compile": row["compile"] == "1",
        },
        planner={"attention": "flash"},
    )
    return replace(case, program=CompiledLoss()) if row["compile"] == "1" and not old else case


def build_intern(row: Mapping[str, str]) -> Case:
    """Return a run of InternEvo: flash attention, ZeRO-1 over all ranks or groups, bf16 gradients; FSDP rows fully
    sharded.
    """
    gpu = _INTERN_GPUS.get(row["gpu"])
    if gpu is None:
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    group = re.search(r"within groups of (\d+)", row["dp_sharding"])
    sharded = row["dp_sharding"].startswith("FSDP")
    gpus, tensor, pipeline = whole(row, "n_gpus"), whole(row, "tp", 1), whole(row, "pp", 1)
    data, micro = whole(row, "dp", gpus // (tensor * pipeline)), whole(row, "mbs")
    case = build_case(
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
    if group and int(group[1]) < data:
        case = replace(case, layout=replace(case.layout, zero_shard_size=int(group[1])))
    return case if sharded else replace(case, program=InternEvo())


def build_plain(row: Mapping[str, str]) -> Case:
    """Return a fully sharded run of another program on FSDP, if the row has enough settings."""
    gpus, tensor, pipeline = whole(row, "n_gpus"), whole(row, "tp", 1), whole(row, "pp", 1)
    context, precision = whole(row, "cp", 1), row["precision"].lower()
    found = next((kind for kind in ("fp8", "bf16", "fp16") if kind in precision), None)
    if found is None:
        raise Unmapped(f"precision {row['precision'] or 'not given'}")
    return build_case(
        "fsdp",
        model_of(row, tensor),
        Degrees(
            data=whole(row, "dp", max(1, gpus // (tensor * pipeline * context))),
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            tensor_sequence=tensor > 1,
            zero_stage=_STAGES.get(row["dp_sharding"], 3) if gpus > 1 else 0,
            checkpointing=next((k for k in ("full", "selective") if row["act_recompute"].startswith(k)), "none"),
        ),
        Machines(machine(row), gpus, whole(row, "gpus_per_node", min(8, gpus))),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=1 if pipeline > 1 else whole(row, "mbs"),
        training={"precision": found, "grad_dtype": "fp32", "compile": row["compile"] == "1"},
        planner={"attention": "flash"},
    )


def machine(row: Mapping[str, str]) -> str:
    """Return the catalogue's name of a row's accelerator, by name and gigabytes. Raises Unmapped."""
    memory = number(row, "gpu_mem_gb")
    if (row["gpu"], memory) in _SERVERS:
        return _SERVERS[row["gpu"], memory]
    try:
        return full_name(f"{row['gpu']} {int(memory)}gb" if memory else row["gpu"])
    except UsageError:
        raise Unmapped(f"no catalogue name for {row['gpu'][:30]}") from None


def build_tune(row: Mapping[str, str]) -> Case:
    """Return a run of full fine-tuning with torchtune, if the row has enough settings."""
    if row["gpu"] not in _TUNE_GPUS or not row["seq_len"]:
        raise Unmapped("torchtune: optimizers and batches that its table leaves out")
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
