"""Published throughput of ResNet, ConvNeXt, DeiT and CLIP: timm on one GPU, NVIDIA's examples, MLPerf and OpenCLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_truth.mapping import Case, Degrees, Machines, Unmapped, build_case
from planner_truth.table import Measured, Table, number, whole
from scaletrain_cli.spec.data import NO_DATA
from scaletrain_cli.spec.presets import vision_presets

_CONVNEXT = {"nano": ((80, 160, 320, 640), (2, 2, 8, 2)), "xlarge": ((256, 512, 1024, 2048), (3, 3, 27, 3))}
_DEIT = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
_RESNET = {"26": (2, 2, 2, 2), "200": (3, 24, 36, 3)}
_GPUS = {
    "RTX 3090": "rtx-3090-24gb",
    "RTX 4090": "rtx-4090-24gb",
    "A100": "a100-sxm-80gb",
    "NVIDIA A100-PCIe-80GB": "a100-pcie-80gb",
    "NVIDIA A30": "a30-24gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA L40": "l40-48gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA H100-SXM5-80GB": "h100-sxm-80gb",
    "NVIDIA H100-SXM-80GB": "h100-sxm-80gb",
    "NVIDIA H100-SXM5-96GB": "h100-sxm-96gb",
    "NVIDIA H100-PCIe-80GB": "h100-pcie-80gb",
    "NVIDIA H200-SXM5-141GB": "h200-sxm-141gb",
}
# timm's benchmark makes its images, and NVIDIA's runs decode them on GPUs or many cores (DALI).
_NO_FILES = {"source": NO_DATA}
_PRECISIONS = {"amp fp16": "fp16", "amp bf16": "bf16", "fp32": "fp32"}


def build_timm(row: Mapping[str, str]) -> Case:
    """Return a run of timm's benchmark.py: one GPU, torch.autocast, SGD with momentum, unfused attention before PyTorch
    2.
    """
    model = _timm_model(row["model"]) | {"image_size": whole(row, "img_size")}
    if model["family"] == "resnet":
        model["memory_format"] = "channels_last" if row["memory_format"] == "nhwc" else "contiguous_format"
    if row["gpu"] not in _GPUS:
        raise Unmapped(f"no catalogue name for {row['gpu']}")
    if row["precision"] not in _PRECISIONS:
        raise Unmapped(f"no precision {row['precision']}")
    precision, batch = _PRECISIONS[row["precision"]], whole(row, "batch_size")
    return build_case(
        "fsdp",
        model,
        Degrees(data=whole(row, "n_gpus", 1)),
        Machines(_GPUS[row["gpu"]], whole(row, "n_gpus", 1)),
        global_batch=batch * whole(row, "n_gpus", 1),
        micro_batch=batch,
        training={"precision": precision, "grad_dtype": "fp32", "optimizer": {"name": "momentum"}},
        planner={
            "autocast": precision != "fp32",
            "attention": "materialised" if "PyTorch 1." in row["software"] else "auto",
        },
        data=_NO_FILES,
    )


def _timm_model(name: str) -> dict[str, Any]:
    """Return the model of a plain variant; variants with other stems, activations or attention are other networks."""
    kind, _, rest = name.partition("_")
    presets = vision_presets()
    if kind == "convnext" and rest:
        size = rest.removesuffix("_in22ft1k").removesuffix("_384")
        if f"convnext-{size}" in presets:
            return dict(presets[f"convnext-{size}"])
        if size in _CONVNEXT:
            widths, depths = _CONVNEXT[size]
            return {"family": "convnext", "hidden_sizes": widths, "depths": depths}
    if kind in ("deit", "vit") and rest.partition("_")[2] in ("patch16_224", "patch16_384"):
        size = rest.partition("_")[0]
        if f"vit-{size}-patch16" in presets:
            return dict(presets[f"vit-{size}-patch16"])
        if size in _DEIT:
            hidden, heads = _DEIT[size]
            sizes = {"hidden_size": hidden, "num_hidden_layers": 12, "num_attention_heads": heads}
            return {"family": "vit", **sizes, "intermediate_size": 4 * hidden}
    if not rest and kind.startswith("resnet"):
        depth = kind.removeprefix("resnet")
        if f"resnet-{depth}" in presets:
            return dict(presets[f"resnet-{depth}"])
        if depth in _RESNET:
            return dict(presets["resnet-50"]) | {"depths": _RESNET[depth]}
    raise Unmapped("not a plain ResNet, ConvNeXt or ViT")


def measure_timm(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the seconds of a step: forward, backward and update."""
    milliseconds = number(truth, "train_step_time_ms")
    return Measured(step_seconds=None if milliseconds is None else milliseconds / 1e3)


def build_mlperf(row: Mapping[str, str]) -> Case:
    """Return a run of MLPerf's ResNet-50 in MXNet: channels last, 16 bits, LARS or SGD, reduction beside backward."""
    if row["benchmark"] != "resnet":
        raise Unmapped("not ResNet-50")
    if row["accelerator"] not in _GPUS:
        raise Unmapped(f"no catalogue name for {row['accelerator']}")
    gpus, batch = whole(row, "n_gpus"), whole(row, "global_batch_size")
    return build_case(
        "fsdp",
        vision_presets()["resnet-50"],
        Degrees(data=gpus),
        Machines(_GPUS[row["accelerator"]], gpus, whole(row, "gpus_per_node", 8)),
        global_batch=batch,
        micro_batch=batch // gpus,
        training={"precision": "fp16", "grad_dtype": "fp16", "optimizer": {"name": "momentum"}, "compile": True},
        data=_NO_FILES,
    )


def measure_mlperf(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the seconds of a step from the logged throughput, else from the run's duration without evaluations."""
    seconds = (number(truth, column) for column in _MLPERF_SECONDS)
    return Measured(step_seconds=next((value for value in seconds if value), None))


_DEVICES = {
    "DGX A100 (8x A100 80GB)": ("a100-sxm-80gb", 256),
    "DGX-1 (8x V100 16GB)": ("v100-sxm2-16gb", 192),
    "DGX-1 16GB (8x V100 16GB)": ("v100-sxm2-16gb", 128),
    "DGX-1 32GB (8x V100 32GB)": ("v100-sxm2-32gb", 256),
    "DGX-2 (16x V100 32GB)": ("v100-sxm2-32gb", 256),
}


def build_dle(row: Mapping[str, str]) -> Case:
    """Return a run of ResNet-50 v1.5 in NVIDIA's examples; a missing batch is that of their commands.

    Only mixed precision uses channels last. MXNet and PaddlePaddle fuse norm, addition and ReLU there.
    """
    if "resnet50" not in row["model"] and "RN50" not in row["model"]:
        raise Unmapped("not ResNet-50")
    section = row["section"].removeprefix("Training performance: NVIDIA ")
    metric = row["metric"].removeprefix("Throughput - ")
    if section not in _DEVICES or metric not in ("mixed precision", "TF32", "FP32"):
        raise Unmapped("not a throughput of a DGX")
    gpu, batch = _DEVICES[section]
    precision = {"mixed precision": "fp16", "TF32": "tf32", "FP32": "fp32"}[metric]
    batch = whole(row, "batch_per_gpu", batch if precision == "fp16" else batch // 2)
    gpus = whole(row, "n_gpus")
    mixed = precision == "fp16"
    return build_case(
        "fsdp",
        vision_presets()["resnet-50"] | {"memory_format": "channels_last" if mixed else "contiguous_format"},
        Degrees(data=gpus),
        Machines(gpu, gpus, max(8, gpus)),
        global_batch=batch * gpus,
        micro_batch=batch,
        training={
            "precision": precision,
            "grad_dtype": "fp32",
            "optimizer": {"name": "momentum"},
            "compile": mixed and not row["model"].startswith("PyTorch"),
        },
        planner={"autocast": mixed},
        data=_NO_FILES,
    )


def measure_dle(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the seconds of a step from the images per second of all GPUs."""
    rate = number(truth, "value")
    try:
        batch = build_dle(inputs).spec.training.global_batch_size
    except Unmapped:
        return Measured()
    return Measured(step_seconds=batch / rate if rate else None)


# mlfoundations/open_clip, model_configs: image and text tower of those that are no preset.
_TEXT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_LARGE_CLIP = {"H/14": (1280, 32, 5120), "g/14": (1408, 40, 6144)}


def build_openclip(row: Mapping[str, str]) -> Case:
    """Return a run of OpenCLIP on JUWELS Booster: autocast, unfused attention, JPEG decoded by torch's DataLoader.

    README.md, "SLURM": four GPUs per node, and six cores and eight workers for each. docs/PRETRAINED.md: 40 GB, L/14
    with gradient checkpointing.
    """
    gpus, batch, arch = whole(row, "gpus"), whole(row, "local_bs"), row["arch"]
    if arch in _LARGE_CLIP:
        width, layers, inner = _LARGE_CLIP[arch]
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
        tower = {**sizes, "num_attention_heads": 16, "patch_size": 14}
        model = {"family": "clip", "vision_config": tower, "text_config": _TEXT, "projection_dim": 1024}
    else:
        size, _, patch = arch.partition("/")
        model = dict(vision_presets()[f"clip-vit-{ {'B': 'base', 'L': 'large'}[size] }-patch{patch}"])
    return build_case(
        "fsdp",
        model,
        Degrees(data=gpus, checkpointing="none" if arch.startswith("B") else "full"),
        Machines("a100-sxm-40gb", gpus, 4, network="infiniband-hdr", cpus_per_gpu=6),
        global_batch=batch * gpus,
        micro_batch=batch,
        training={"precision": "fp16", "grad_dtype": "fp32"},
        planner={"autocast": True, "attention": "materialised"},
        data={"source": "laion", "loader": {"workers": 8}},
    )


def measure_openclip(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return the seconds of a step from the pairs per second of all GPUs, which the log prints with all waits."""
    rate = number(truth, "samples_per_sec")
    return Measured(step_seconds=whole(inputs, "gpus") * whole(inputs, "local_bs") / rate if rate else None)


# LAION-AI/scaling-laws-openclip@529d3701013ce53ecf3e62824e471b31f99749a3, trained_models_info.csv (arXiv:2212.07143)
OPENCLIP = Table(
    file="openclip.csv",
    input_columns=frozenset({"arch", "gpus", "local_bs"}),
    truth_columns=frozenset({"samples_per_sec"}),
    build=build_openclip,
    measure=measure_openclip,
    source=lambda row: "openclip",
)
TIMM = Table(
    file="cnn_vit_single_gpu_timm.csv",
    input_columns=frozenset("model gpu gpu_mem_gb n_gpus precision memory_format batch_size img_size software".split()),
    truth_columns=frozenset({"train_step_time_ms", "train_samples_per_s"}),
    build=build_timm,
    measure=measure_timm,
    source=lambda row: "timm",
)
_MLPERF_SECONDS = ("step_time_s_median_logged", "step_time_s_from_throughput", "step_time_s_from_run")
MLPERF = Table(
    file="mlperf_training_runs.csv",
    input_columns=frozenset("benchmark accelerator n_nodes gpus_per_node n_gpus global_batch_size".split()),
    truth_columns=frozenset(_MLPERF_SECONDS),
    build=build_mlperf,
    measure=measure_mlperf,
    source=lambda row: "MLPerf resnet",
)
DLE = Table(
    file="cnn_bert_multi_gpu_nvidia_dle.csv",
    input_columns=frozenset("model section n_gpus metric batch_per_gpu".split()),
    truth_columns=frozenset({"value"}),
    build=build_dle,
    measure=measure_dle,
    source=lambda row: "NVIDIA examples",
)
