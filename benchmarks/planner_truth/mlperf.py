"""MLPerf Training submissions: step times from the result logs, layouts from the submitters' configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner_truth.architectures import known_model
from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case, padded_vocab, transformer
from planner_truth.table import Measured, Table, number, whole

_ACCELERATORS = {
    "H100-SXM": ("h100-sxm-80gb", "infiniband-ndr"),
    "H200-SXM": ("h200-sxm-141gb", "infiniband-ndr"),
    "H100-PCIe": ("h100-pcie-80gb", "infiniband-ndr"),
    "B200-SXM": ("b200-sxm-180gb", "infiniband-ndr"),
    "A100-SXM": ("a100-sxm-80gb", "infiniband-hdr"),
    "A100-PCIe": ("a100-pcie-80gb", "infiniband-hdr"),
    "L40S": ("l40s-48gb", "roce-100g"),
}
# If the configuration was not found: the degrees that NVIDIA's and all others of GPT-3 have in common.
_GPT3_TENSOR, _GPT3_PIPELINE, _GPT3_VIRTUAL = 4, 8, 6


def _gpt3(row: Mapping[str, str]) -> Case:
    """Return a run of NVIDIA's implementation: fp8 on Hopper, sequence parallelism, no dropout.

    From conf/custom.yaml and config_fp8.sh. INTERLEAVED_PIPELINE is 12 unless set; since round 4.0 it is set.
    """
    tensor, pipeline = whole(row, "tp", _GPT3_TENSOR), whole(row, "pp", _GPT3_PIPELINE)
    virtual = whole(row, "vp", 12 if row["round"] == "v3.1" else _GPT3_VIRTUAL)
    gpus, batch, accumulation = whole(row, "n_gpus"), whole(row, "global_batch_size"), number(row, "minibs")
    if gpus % (tensor * pipeline):
        raise Unmapped("the degrees do not multiply to the number of GPUs")
    data = gpus // (tensor * pipeline)
    steps = whole(row, "gradient_accumulation_steps", int(accumulation or 1))
    return build_case(
        "megatron",
        transformer(
            "gpt",
            layers=96,
            hidden=12288,
            heads=96,
            vocab=padded_vocab(50257, tensor),
            seq_len=whole(row, "max_sequence_length", 2048),
            tied=True,
        ),
        Degrees(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            virtual=virtual,
            tensor_sequence=True,
            zero_stage=1,
        ),
        _machines(row),
        global_batch=batch,
        micro_batch=whole(row, "micro_batch", max(1, batch // (data * steps))),
        training={"precision": _precision(row), "grad_dtype": "fp32"},
        planner={"attention": "flash"},
    )


_NOT_GIVEN = ("layers", "hidden", "heads", "kv_heads", "ffn")
_ADAPTER = {"name": "lora", "rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def _llama2_lora(row: Mapping[str, str]) -> Case:
    """Return the run of Llama 2 70B with LoRA of rank 16 on the projections of attention (mlcommons/training,
    llama2_70b_lora/README.md).

    Sequences are packed to 8192 tokens, with one per micro-batch.
    """
    gpus, tensor, context = whole(row, "n_gpus"), whole(row, "tp"), whole(row, "cp", 1)
    pipeline = whole(row, "pp", 1)
    return build_case(
        "megatron",
        {**known_model({**row, **dict.fromkeys(_NOT_GIVEN, ""), "seq_len": "8192"}), "adapter": _ADAPTER},
        Degrees(
            data=max(1, gpus // (tensor * pipeline * context)),
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            tensor_sequence=tensor > 1,
            zero_stage=1,
        ),
        _machines(row),
        global_batch=whole(row, "global_batch_size"),
        micro_batch=whole(row, "micro_batch", 1),
        training={"precision": _precision(row), "grad_dtype": "fp32"},
        planner={"attention": "flash"},
    )


def _precision(row: Mapping[str, str]) -> str:
    return "bf16" if "A100" in row["accelerator"] else "fp8"


def _machines(row: Mapping[str, str]) -> Machines:
    found = next((value for name, value in _ACCELERATORS.items() if name in row["accelerator"]), None)
    if found is None:
        raise Unmapped(f"no catalogue name for {row['accelerator']}")
    gpu, network = found
    if "roce" in row["network"].lower() and network == "infiniband-ndr":
        network = "roce-400g"
    return Machines(gpu, whole(row, "n_gpus"), whole(row, "gpus_per_node", 8), network=network)


_BUILDERS: dict[str, Callable[[Mapping[str, str]], Case]] = {"gpt3": _gpt3, "llama2_70b_lora": _llama2_lora}


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row, by its benchmark."""
    builder = _BUILDERS.get(row["benchmark"])
    if builder is None:
        raise Unmapped(f"no mapping for the benchmark {row['benchmark']}")
    return builder({**row, "model": row["benchmark"].replace("_", " ")})


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the median of logged step times; else from the logged throughput, or from the duration of the run."""
    often = (number(truth, "n_throughput_samples") or 0) >= 10
    order = ["step_time_s_median_logged", "step_time_s_from_run", "step_time_s_from_throughput"]
    if often:
        order.insert(1, order.pop())
    found = [seconds for name in order if (seconds := number(truth, name))]
    return Measured(step_seconds=found[0] if found else None)


TABLE = Table(
    file="mlperf_training_runs.csv",
    input_columns=frozenset(
        "round org system benchmark accelerator n_nodes gpus_per_node n_gpus network framework global_batch_size "
        "gradient_accumulation_steps max_sequence_length tp pp cp vp sp minibs micro_batch fp8".split()
    ),
    truth_columns=frozenset(
        "step_time_s_median_logged step_time_s_from_throughput step_time_s_from_run n_throughput_samples".split()
    ),
    build=build,
    measure=measure,
    panel=lambda row: f"{row['benchmark']} {row['accelerator']} {row['n_gpus']}",
    source=lambda row: f"MLPerf {row['benchmark']}",
)
