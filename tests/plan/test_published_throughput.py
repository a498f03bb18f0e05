"""Step times against throughput that others have published.

Three numbers of the model were fitted on the LLM Foundry table (shares of the peak of A100 and H100, and the width at
which matrices run at half rate); torchtitan's rows were not used. None of these runs used our engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from scaletrain_cli.plan.hardware import find_accelerator
from scaletrain_cli.plan.layouts import build_layout, resolve_axes
from scaletrain_cli.plan.timing import plan_time
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of


@dataclass(frozen=True)
class Row:
    model: str
    seq_len: int
    gpus: int
    gpu: str
    micro_batch: int
    accumulation: int
    checkpointing: str
    tokens_per_second_per_gpu: float


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md, FULL_SHARD, up to 4096 tokens: about one row for each
# model size, device and number of nodes, and the row that the model gets most wrong.
FOUNDRY = [
    Row("70b", 2048, 64, "h100-sxm-80gb", 8, 4, "full", 1039),
    Row("30b", 4096, 8, "h100-sxm-80gb", 1, 21, "full", 1802),
    Row("30b", 2048, 32, "h100-sxm-80gb", 14, 3, "full", 2308),
    Row("13b", 4096, 8, "h100-sxm-80gb", 10, 3, "full", 4717),
    Row("13b", 2048, 64, "h100-sxm-80gb", 2, 1, "none", 4800),
    Row("7b", 4096, 8, "h100-sxm-80gb", 16, 2, "full", 8611),
    Row("7b", 2048, 8, "h100-sxm-80gb", 6, 1, "none", 10643),
    Row("3b", 2048, 64, "h100-sxm-80gb", 6, 3, "none", 22525),
    Row("1b", 2048, 8, "h100-sxm-80gb", 14, 1, "none", 45455),
    Row("760m", 2048, 32, "h100-sxm-80gb", 24, 1, "none", 67971),
    Row("70b", 2048, 64, "a100-sxm-80gb", 8, 4, "full", 410),
    Row("30b", 2048, 8, "a100-sxm-80gb", 3, 21, "full", 916),
    Row("13b", 2048, 8, "a100-sxm-80gb", 2, 3, "none", 2262),
    Row("7b", 4096, 8, "a100-sxm-80gb", 16, 2, "full", 3684),
    Row("7b", 2048, 8, "a100-sxm-80gb", 6, 2, "none", 4641),
    Row("3b", 2048, 8, "a100-sxm-80gb", 10, 2, "none", 10811),
    Row("1b", 2048, 8, "a100-sxm-80gb", 14, 4, "none", 20513),
    Row("350m", 2048, 8, "a100-sxm-80gb", 32, 2, "none", 58782),
    Row("125m", 2048, 8, "a100-sxm-80gb", 40, 2, "none", 142830),
    Row("70b", 2048, 128, "a100-sxm-40gb", 4, 1, "full", 376),
    Row("70b", 2048, 64, "a100-sxm-40gb", 2, 1, "full", 276),
    Row("13b", 2048, 128, "a100-sxm-40gb", 16, 1, "full", 1972),
    Row("7b", 2048, 128, "a100-sxm-40gb", 18, 1, "full", 3623),
]
# pytorch/torchtitan, docs/performance.md, FSDP2, 64 A100; H100 at 500 W with slower memory are left out.
TORCHTITAN = [
    Row("llama-3-8b", 8192, 64, "a100-sxm-80gb", 1, 1, "selective", 2904),
    Row("llama-3-70b", 8192, 64, "a100-sxm-80gb", 1, 1, "full", 331),
]
# hidden size, layers, heads (MPT's configurations)
DIMENSIONS = {
    "70b": (8192, 80, 64),
    "30b": (7168, 48, 56),
    "13b": (5120, 40, 40),
    "7b": (4096, 32, 32),
    "3b": (2560, 32, 20),
    "1b": (2048, 24, 16),
    "760m": (1536, 24, 12),
    "350m": (1024, 24, 16),
    "125m": (768, 12, 12),
}


def spec_for(row: Row) -> RunSpec:
    run = {
        "model__seq_len": row.seq_len,
        "training__global_batch_size": row.micro_batch * row.accumulation * row.gpus,
        "training__micro_batch_size": row.micro_batch,
        "layout__zero_stage": 3,
        "layout__activation_checkpointing": row.checkpointing,
        "cluster__nodes": row.gpus // 8,
        "cluster__gpu": row.gpu,
        "cluster__inter_node_bandwidth": "50GB/s" if row.gpu.startswith("h100") else "25GB/s",
    }
    if row.model not in DIMENSIONS:
        return spec_of(row.model, **run)
    hidden, layers, heads = DIMENSIONS[row.model]
    shape = {
        "model__hidden_size": hidden,
        "model__num_hidden_layers": layers,
        "model__num_attention_heads": heads,
        "model__vocab_size": 50432,
        "model__max_position_embeddings": row.seq_len,
    }
    return spec_of("gpt2", **run, **shape)


def time_error(row: Row) -> float:
    """Logarithm of planned over measured time; positive when the plan is slower than the run was."""
    spec = spec_for(row)
    layout = build_layout(spec, resolve_axes(spec), 3, row.checkpointing, row.micro_batch)
    time, _ = plan_time(spec, layout, find_accelerator(spec.cluster))
    return math.log(row.tokens_per_second_per_gpu / time.tokens_per_second_per_gpu)


@pytest.mark.parametrize("row", [*FOUNDRY, *TORCHTITAN], ids=lambda row: f"{row.model}-{row.gpus}x{row.gpu}")
def test_a_published_run_takes_about_as_long_as_planned(row: Row) -> None:
    assert abs(time_error(row)) < 0.35


def test_the_mean_error_is_about_a_tenth_and_hardly_biased() -> None:
    errors = [time_error(row) for row in FOUNDRY]
    assert sum(map(abs, errors)) / len(errors) < 0.12
    assert abs(sum(errors)) / len(errors) < 0.10
