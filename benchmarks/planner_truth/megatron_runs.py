"""Rows of train_runs.csv from papers and performance pages of Megatron-LM, NeMo and Megatron-Bridge."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner_truth.architectures import model_of
from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case, padded_vocab, transformer
from planner_truth.table import whole

_GPUS = {
    "A100": ("a100-sxm-80gb", 8, "infiniband-hdr"),
    "H100": ("h100-sxm-80gb", 8, "infiniband-ndr"),
    "B200": ("b200-sxm-180gb", 8, "infiniband-ndr"),
    "B300": ("b300-sxm-270gb", 8, "infiniband-xdr"),
    # An NVLink domain has 72 GPUs, of which runs use 64. For the planner the domain is the node, not the tray of four.
    "GB200": ("gb200-186gb", 64, "infiniband-ndr"),
    "GB300": ("gb300-279gb", 64, "infiniband-xdr"),
}

# NVIDIA/NeMo, nemo/collections/llm/recipes, finetune_performance_optimizations: peft.target_modules = linear_qkv.
_ADAPTER = {"name": "lora", "rank": 16, "targets": ["q_proj", "k_proj", "v_proj"]}


def build_paper(row: Mapping[str, str]) -> Case:
    """Return a GPT run of 2021 or 2022 on Selene: fp16, biases, dropout, attention with its matrix of scores.

    Narayanan 2021 (arXiv:2104.04473, table 1) has no virtual stages. Korthikanti 2022: arXiv:2205.05198, table 5.
    """
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    bf16 = row["precision"] == "bf16"
    return build_case(
        "megatron",
        transformer(
            "gpt",
            layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            heads=whole(row, "heads"),
            ffn=whole(row, "ffn", 0) or None,
            vocab=padded_vocab(whole(row, "vocab"), tensor),
            seq_len=whole(row, "seq_len"),
            tied=True,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        Degrees(
            data=whole(row, "dp", 1),
            tensor=tensor,
            pipeline=pipeline,
            virtual=whole(row, "vp", 1),
            tensor_sequence=row["sp"] == "1",
            zero_stage=1 if "ZeRO-1" in row["dp_sharding"] else 0,
            checkpointing=_checkpointing(row),
        ),
        _machines(row),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
        training={"precision": "bf16" if bf16 else "fp16", "grad_dtype": "fp32" if bf16 else "fp16"},
        planner={"attention": "materialised"},
    )


def build_recipe(row: Mapping[str, str]) -> Case:
    """Return a run of NVIDIA's recipes: distributed optimizer, tensor with sequence parallelism, no recomputation."""
    if "tokendrop" in row["model"]:
        raise Unmapped("experts that drop tokens")
    if not row["tp"]:
        raise Unmapped("the table has no layout")
    precision = _precision(row["precision"])
    gpus, tensor = whole(row, "n_gpus"), whole(row, "tp", 1)
    pipeline, context = whole(row, "pp", 1), whole(row, "cp", 1)
    model = model_of(row, tensor)
    if is_adapter(row):
        model["adapter"] = _ADAPTER
    if gpus % (tensor * pipeline * context):
        raise Unmapped("the degrees do not multiply to the number of GPUs")
    return build_case(
        "megatron",
        model,
        Degrees(
            data=gpus // (tensor * pipeline * context),
            tensor=tensor,
            pipeline=pipeline,
            virtual=whole(row, "vp", 1) if pipeline > 1 else 1,
            context=context,
            expert=whole(row, "ep", 1),
            expert_tensor=1,
            tensor_sequence=tensor > 1,
            zero_stage=1,
            checkpointing=_checkpointing(row),
        ),
        _machines(row),
        global_batch=whole(row, "gbs_samples"),
        micro_batch=whole(row, "mbs"),
        training={"precision": precision, "grad_dtype": "fp32"},
        planner={"attention": "flash"},
    )


def is_adapter(row: Mapping[str, str]) -> bool:
    """Return whether a row is fine-tuning of adapters."""
    return re.search("lora|adapter", row["workload"], re.IGNORECASE) is not None or (
        "LoRA Performance" in row["notes"]  # the section of Megatron-Bridge's page
    )


def _precision(text: str) -> str:
    if re.search("fp4", text, re.IGNORECASE):
        raise Unmapped("4-bit precision")
    if re.search("fp8", text, re.IGNORECASE):
        return "fp8"
    if re.search("bf16", text, re.IGNORECASE):
        return "bf16"
    raise Unmapped("the table has no precision" if text in ("", "see notes") else f"precision {text}")


def _checkpointing(row: Mapping[str, str]) -> str:
    given = row["act_recompute"]
    return next((kind for kind in ("full", "selective") if given.startswith(kind)), "none")


def _machines(row: Mapping[str, str]) -> Machines:
    found: tuple[str, int, str] | None = _GPUS.get(row["gpu"])
    if found is None:
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    name, per_node, network = found
    if per_node == 8:
        per_node = whole(row, "gpus_per_node", per_node)
    return Machines(name, whole(row, "n_gpus"), per_node, network=network)
