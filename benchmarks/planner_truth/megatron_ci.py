"""Megatron-LM's functional tests: peak allocated bytes and iteration time, by the arguments of each test."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case
from planner_truth.megatron_arguments import model_section, whole_or_none
from planner_truth.table import Measured, Table, number, whole

# "unknown": tests from the time when all ran on A100. GPUs per node, and network.
_GPUS = {
    "a100": ("a100-sxm-80gb", 8, "infiniband-hdr"),
    "unknown": ("a100-sxm-80gb", 8, "infiniband-hdr"),
    "h100": ("h100-sxm-80gb", 8, "infiniband-ndr"),
    "gb200": ("gb200-186gb", 64, "infiniband-ndr"),  # of one NVLink domain
}
# recipes/*.yaml of the tests: eight GPUs each; those of the release runs are not public, 64 is assumed.
_RELEASE_GPUS = 64
# Arguments that change memory and have no key in a run spec.
_UNSAYABLE = {
    "cuda_graph_impl": "CUDA graphs",
    "enable_cuda_graph": "CUDA graphs",
    "external_cuda_graph": "CUDA graphs",
    "fine_grained_activation_offloading": "activation offloading",
    "cpu_offloading": "activation offloading",
    "flextron": "elastic model",
    "perform_rl_step": "reinforcement learning",
    "mtp_num_layers": "multi-token prediction",
    "pipeline_model_parallel_layout": "uneven pipeline stages",
    "decoder_first_pipeline_num_layers": "uneven pipeline stages",
    "account_for_embedding_in_pipeline_split": "uneven pipeline stages",
    "hybrid_layer_pattern": "state-space layers",
    "use_megatron_fsdp": "Megatron's own FSDP",
}


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row, with Megatron-LM's defaults for missing arguments. Only decoders and BERT."""
    if row["family"] not in ("gpt", "moe", "mixtral", "bert"):
        raise Unmapped(f"family {row['family']}")
    args = _arguments(row)
    for name, what in _UNSAYABLE.items():
        if args.get(name):
            raise Unmapped(what)
    if re.search("gb_?200", row["case"]) and row["gpu"] != "gb200":
        raise Unmapped("values kept from an older configuration of the test")
    if args.get("optimizer", "adam") != "adam":
        raise Unmapped(f"optimizer {args['optimizer']}")
    if int(args.get("num_distributed_optimizer_instances", 1)) > 1:
        raise Unmapped("several instances of the distributed optimizer")
    if row["gpu"] not in _GPUS:
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    gpu, per_node, network = _GPUS[row["gpu"]]
    count = whole(row, "n_gpus", _gpu_count(row))
    tensor, pipeline = int(args.get("tensor_model_parallel_size", 1)), int(args.get("pipeline_model_parallel_size", 1))
    context = int(args.get("context_parallel_size", 1))
    if count % (tensor * pipeline * context):
        raise Unmapped("the degrees do not divide the number of GPUs")
    return build_case(
        "megatron",
        model_section(args, row["family"], tensor),
        Degrees(
            data=count // (tensor * pipeline * context),
            tensor=tensor,
            pipeline=pipeline,
            virtual=_virtual(args, pipeline),
            context=context,
            expert=int(args.get("expert_model_parallel_size", 1)),
            expert_tensor=int(args.get("expert_tensor_parallel_size", tensor)),
            tensor_sequence=bool(args.get("sequence_parallel")) and tensor > 1,
            zero_stage=1 if args.get("use_distributed_optimizer") else 0,
            checkpointing=_checkpointing(args),
        ),
        Machines(gpu, count, per_node, network=network),
        global_batch=int(args.get("global_batch_size", 0)) or _first_batch(args),
        micro_batch=int(args["micro_batch_size"]),
        training=_training(args),
        planner={"attention": _attention(args)},
    )


def _arguments(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments by Megatron-LM's names: those of the columns, and all others of the test."""
    args: dict[str, Any] = {}
    for column in row:
        text = row[column]
        if column.startswith("arg_") and text:
            args[column.removeprefix("arg_")] = text == "True" if text in ("True", "False") else text
    try:
        given = json.loads(row["model_args_json"] or "{}")
    except ValueError:
        raise Unmapped("model_args_json is not JSON") from None
    args |= {name.replace("-", "_"): value for name, value in given.items()}
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") if name not in args]
    if missing or "micro_batch_size" not in args:
        raise Unmapped(f"no {', '.join(missing) or 'micro_batch_size'}")
    return args


def _gpu_count(row: Mapping[str, str]) -> int:
    if row["test_type"] == "release":
        return _RELEASE_GPUS
    return 4 if row["gpu"] == "gb200" and row["case"].endswith("_1node") else 8


def _first_batch(args: Mapping[str, Any]) -> int:
    """Return the first batch size of a schedule such as ``0:384 200B:768``."""
    found = re.match(r"0:(\d+)", str(args.get("step_batch_size_schedule", "")))
    if found is None:
        raise Unmapped("no global_batch_size")
    return int(found[1])


def _virtual(args: Mapping[str, Any], pipeline: int) -> int:
    if pipeline == 1:
        return 1
    if "num_virtual_stages_per_pipeline_rank" in args:
        return int(args["num_virtual_stages_per_pipeline_rank"])
    layers = whole_or_none(args, "num_layers_per_virtual_pipeline_stage")
    return int(args["num_layers"]) // pipeline // layers if layers else 1


def _checkpointing(args: Mapping[str, Any]) -> str:
    granularity = args.get("recompute_granularity") or ("selective" if args.get("recompute_activations") else None)
    if granularity != "selective":
        return "full" if granularity == "full" else "none"
    modules = re.findall(r"\w+", str(args.get("recompute_modules", "core_attn")))
    if modules != ["core_attn"]:
        raise Unmapped("recomputation of chosen modules")
    return "selective"


def _training(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training section. Gradients of bf16 are accumulated in fp32, of fp16 in fp16 (validate_args)."""
    if args.get("fp8_format"):
        return {"precision": "fp8", "grad_dtype": "fp32"}
    if args.get("bf16"):
        return {"precision": "bf16", "grad_dtype": "bf16" if args.get("grad_reduce_in_bf16") else "fp32"}
    if args.get("fp16"):
        in_fp32 = args.get("accumulate_allreduce_grads_in_fp32")
        return {"precision": "fp16", "grad_dtype": "fp32" if in_fp32 else "fp16"}
    return {"precision": "fp32", "grad_dtype": "fp32"}


def _attention(args: Mapping[str, Any]) -> str:
    backend = args.get("attention_backend", "flash" if args.get("use_flash_attn") else "auto")
    if backend in ("unfused", "local"):
        return "materialised"
    if backend in ("flash", "fused"):
        return "flash"
    if args.get("transformer_impl") != "transformer_engine":
        return "materialised"  # Megatron's own layers keep the scores
    return "flash"  # left alone, Transformer Engine takes a fused kernel


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the peak over all logged steps of the last rank, which writes to TensorBoard (global_vars.py)."""
    return Measured(
        step_seconds=number(truth, "iter_time_s_median"),
        memory_bytes=number(truth, "mem_max_allocated_bytes_max"),
        memory_kind="allocated",
        memory_stage="last",
    )


_ARGUMENTS = (
    "tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
    "use_distributed_optimizer use_megatron_fsdp num_layers hidden_size ffn_hidden_size num_attention_heads "
    "group_query_attention num_query_groups kv_channels swiglu normalization position_embedding_type "
    "untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by tokenizer_type seq_length "
    "micro_batch_size global_batch_size num_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq "
    "moe_shared_expert_intermediate_size recompute_granularity recompute_modules recompute_activations bf16 fp16 "
    "fp8_format attention_dropout hidden_dropout disable_bias_linear transformer_impl use_flash_attn "
    "attention_backend cpu_offloading optimizer accumulate_allreduce_grads_in_fp32 cuda_graph_impl "
    "enable_cuda_graph external_cuda_graph mtp_num_layers multi_latent_attention"
)
TABLE = Table(
    file="megatron_ci_golden_memory_time.csv",
    input_columns=frozenset(
        {"family", "case", "env", "gpu", "n_gpus", "test_type", "model_args_json", "env_vars_json"}
        | {f"arg_{name}" for name in _ARGUMENTS.split()}
    ),
    truth_columns=frozenset({"mem_max_allocated_bytes_max", "iter_time_s_median"}),
    build=build,
    measure=measure,
    panel=lambda row: f"{row['case']} {row['gpu']}",
    source=lambda row: "Megatron-LM's tests",
    usual_kernels=False,  # deterministic ones (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0), and norms logged in each step
)
