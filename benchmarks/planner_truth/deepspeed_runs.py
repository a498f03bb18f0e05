"""deepspeed_2026_11.csv: runs of DeepSpeed from many sources, in the columns of train_runs.csv.

A source is a value of ``set``. The rows need no source's name: model, machines and layout are in the columns, and the
notes say which modules, attention kernel and ZeRO variant ran.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_truth.architectures import known_model, model_of_columns
from planner_truth.deepspeed_programs import is_megatron, program_of
from planner_truth.mapping import GBIT, Case, Degrees, Machines, Unmapped, build_case
from planner_truth.table import Measured, Table, number, whole
from planner_truth.train_runs import COLUMNS, TRUTH
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.catalogue.hardware import full_name

# GPUs whose tables give neither form factor nor memory: the usual ones of servers.
_GPUS = {
    "V100": "v100-sxm2-32gb",
    "A100": "a100-sxm-80gb",
    "A800": "a800-sxm-80gb",
    "H100": "h100-sxm-80gb",
    "H800": "h800-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "B200": "b200-sxm-180gb",
    "Max1550": "max-1550-tile-64gb",  # a "GPU" of these rows is one tile
}
_OTHER_MEMORY = {("V100", 16): "v100-sxm2-16gb", ("A100", 40): "a100-sxm-40gb"}
# Links between nodes by words of ``interconnect``: name in the planner's catalogue, and bytes/s per node where the
# site's description has other adapters than the manufacturer's reference system.
_NETWORKS: tuple[tuple[str, str, float | None], ...] = (
    # 4 adapters of 100 Gbit/s per node (BigScience chronicles). The column also has a rate that follows from measured
    # step times, which must not be used.
    ("jean-zay", "omni-path-jean-zay-a100", 4 * 100 * GBIT),
    # 8 adapters of 200 Gbit/s per node (Argonne, Aurora machine overview) and 2 (Polaris)
    ("aurora", "slingshot-11", 8 * 200 * GBIT),
    ("polaris", "slingshot-11", 2 * 200 * GBIT),
    ("4x100gb roce", "roce-100g", 4 * 100 * GBIT),
    ("slingshot", "slingshot-11", None),
    ("omni-?path|opa", "omni-path-100g", None),
    ("efa", "efa-p4d", None),
    ("dgx-2", "infiniband-edr", 8 * 100 * GBIT),
    ("roce", "roce-100g", None),
    ("xdr", "infiniband-xdr", None),
    ("ndr", "infiniband-ndr", None),
    ("hdr", "infiniband-hdr", None),
    ("edr", "infiniband-edr", None),
    ("25 ?g", "ethernet-25g", None),
    ("10 ?g(b|ig|e)", "ethernet-10g", None),
    ("ethernet|tcp", "ethernet-100g", None),
)
# Links of authors who do not print them with the run: InternLM prints those of its nodes with InternEvo's.
_SITES = {"xtuner": "4x100gb roce"}
# What notes say of runs in fp16 whose first steps were timed: until gradients are finite DeepSpeed lowers its loss
# scale, which began at 2^32 in 2021, and does not update (fp16/loss_scaler.py, stage3.py ``step``).
_SKIPPED = "optimizer steps may be skipped by the loss scaler"
# Versions 4.38 to 4.40 of transformers pass a causal mask to torch's attention, so that it cannot choose flash
# attention (pull request 30070; issue 30461 has times of both). DeepSpeed 0.14.0 to 0.14.2 are of the same months.
_MASKS = r"transformers[ =v]*4\.(38|39|40)\b|deepspeed[ =v]*0\.14\.[0-2]\b"
# Pages that print the versions of their program, by a part of their address.
_VERSIONS = {"chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a": "deepspeed 0.14.2"}
_PLAIN = r"gpt|bert|opt|bloom|falcon|pythia|neox|megatron|turing"
# bf16_master_weights_and_grads and bf16_optimizer_states of DeepSpeed's section bf16
_NARROW = {"state_dtype": "bf16", "master_weights": False}
_RECOMPUTED = ("full", "selective")
# The table of chenyaofo (gist d4cd6a20ab4b95cb3a49491747e2139a) prints the memory allocated after a step beside its
# peak. By offload and printed (micro-batch, global batch): the micro-batch of rows whose two figures are both those of
# another one. 2.2 GB with offloaded weights is the row above it, 3.8 GB, without 1.6 GB of weights, so it has the same
# two logits; 21.4 GB is 17.7 GB and the logits of eight sequences more.
_OTHER_MICRO_BATCH = {("optimizer+params", 4, 64): 2, ("", 8, 128): 16}
# Of ZeRO-2 it has 19.4 GB with one sequence and 27.2 GB with four: 6.3 GB more than the logits of three sequences, the
# two moments of AdamW (8 bytes x 6.74e9 / 8 ranks). The first was read before the first update.
_BEFORE_THE_UPDATE = ("ZeRO-2", "", 1)
_TWO_FIGURES = "chenyaofo-deepspeed"


def build(row: Mapping[str, str]) -> Case:
    """Return the run of a row. Raises Unmapped."""
    if re.search("lora|adapter", row["workload"], re.IGNORECASE):
        raise Unmapped("fine-tuning of adapters: frozen weights")
    notes, gpus = row["notes"].lower(), whole(row, "n_gpus")
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1) or 1
    sequence, context = whole(row, "sp", 1), whole(row, "cp", 1)
    data = whole(row, "dp", max(1, gpus // (tensor * pipeline * sequence * context)))
    micro = _micro_batch(row)
    name, per_node, between = _machines(row)
    precision = row["precision"] or "bf16"
    if precision not in ("bf16", "fp16", "fp32"):
        raise Unmapped(f"precision {precision}")
    # Before FlashAttention, Megatron-DeepSpeed ran Megatron's fused kernels; these runs have little traffic of ZeRO.
    fused = "megatron-deepspeed" in notes and _unfused(notes)
    case = build_case(
        "megatron" if fused else "deepspeed",
        _model(row, tensor),
        Degrees(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            virtual=whole(row, "vp", 1),
            sequence=sequence,
            context=context,
            expert=whole(row, "ep", 1),
            tensor_sequence=False,
            zero_stage=_zero_stage(row),
            checkpointing=next((k for k in _RECOMPUTED if row["act_recompute"].startswith(k)), "none"),
            offload=row["cpu_offload"] if row["cpu_offload"] not in ("", "0") else "none",
        ),
        # torchrun and accelerate set OMP_NUM_THREADS to 1 for several processes per node (torch/distributed/run.py).
        Machines(name, gpus, per_node, *between, cpus_per_gpu=1 if per_node > 1 else None),
        global_batch=whole(row, "gbs_samples", data * micro * whole(row, "grad_accum", 1)),
        micro_batch=micro,
        training={
            "precision": precision,
            "grad_dtype": _grad_dtype(row),
            "compile": row["compile"] == "1",
            **({"optimizer": _NARROW} if row["optimizer"].endswith("-bf16-states") else {}),
        },
        planner={"attention": _attention(row)},
        env={"CUDA_LAUNCH_BLOCKING": "1"} if "cuda_launch_blocking=1" in notes else None,
    )
    return replace(case, program=program_of(row), skips_update=_SKIPPED in notes)


def _micro_batch(row: Mapping[str, str]) -> int:
    """Return the sequences of a micro-batch: as printed, unless the memory printed beside the peak is of another."""
    printed = whole(row, "mbs")
    if row["set"] != _TWO_FIGURES:
        return printed
    return _OTHER_MICRO_BATCH.get((row["cpu_offload"], printed, whole(row, "gbs_samples")), printed)


def _has_moments(row: Mapping[str, str]) -> bool:
    """Return whether AdamW had its moments when the memory of a row was read."""
    kind = (row["dp_sharding"], row["cpu_offload"], whole(row, "mbs"))
    return row["set"] != _TWO_FIGURES or kind != _BEFORE_THE_UPDATE


def _zero_stage(row: Mapping[str, str]) -> int:
    """Return the ZeRO stage; with bf16 and stage 0, 1: BF16_Optimizer shards its states too (bf16_optimizer.py)."""
    return max(_configured_stage(row), int(row["precision"] == "bf16"))


def _configured_stage(row: Mapping[str, str]) -> int:
    """Return the stage of DeepSpeed's configuration, which notes may have beside that of the column."""
    printed = r"; (?:printed stage|stage (?=\d printed))\s*(\d)"
    found = re.findall(printed, row["notes"]) or re.findall(r"\d", row["dp_sharding"])
    return int(found[0]) if found else 0


def _grad_dtype(row: Mapping[str, str]) -> str:
    """Return the type in which gradients accumulate: fp32 for bf16 in stage 0, else that of the weights.

    So did earlier versions of DeepSpeed, which these runs used (engine.py ``get_data_types``; pull request 4713). In
    0.19.8 the default is the type of the weights in every stage.
    """
    return "fp32" if row["precision"] == "bf16" and _configured_stage(row) == 0 else row["precision"] or "bf16"


def _attention(row: Mapping[str, str]) -> str:
    """Return the kernel of attention: that of the notes, or that which the versions of the program choose."""
    printed = [versions for page, versions in _VERSIONS.items() if page in row["source"]]
    words = " ".join([row["notes"], row["source"], *printed]).lower()
    if _unfused(row["notes"].lower()) or (row["gpu"] == "V100" and is_megatron(row)):  # FlashAttention needs Ampere
        return "materialised"
    if re.search(r"flash[- ]?att(ention|n)[- ]?v?3|\bfa3\b", words):
        return "flash3"
    masked = re.search(_MASKS, words) and "flash" not in words and not is_megatron(row)
    return "masked" if masked else "flash"


def _unfused(notes: str) -> bool:
    """Return whether the notes say that attention stored its scores."""
    return re.search(r"(no|without) flash[- ]?att|flash[- ]?attention off", notes) is not None


def _machines(row: Mapping[str, str]) -> tuple[str, int, tuple[str | None, float | None]]:
    """Return the accelerator's catalogue name, GPUs per node, and the network's name and bytes/s per GPU."""
    per_node = min(whole(row, "gpus_per_node", 8), whole(row, "n_gpus"))
    memory = number(row, "gpu_mem_gb")
    name = _OTHER_MEMORY.get((row["gpu"], int(memory or 0)), _GPUS.get(row["gpu"]))
    if name is None:
        try:
            name = full_name(f"{row['gpu']} {int(memory)}gb" if memory else row["gpu"])
        except UsageError:
            raise Unmapped(f"no catalogue name for {row['gpu']}") from None
    words = row["interconnect"].lower() or _SITES.get(row["set"].split("-")[0], "")
    network, rate = next(((known, each) for key, known, each in _NETWORKS if re.search(key, words)), (None, None))
    return name, per_node, (network, rate / per_node if rate else None)


def _model(row: Mapping[str, str], tensor: int) -> dict[str, Any]:
    """Return the model section, from the columns or, where these are incomplete, from the model's name."""
    name = row["model"].lower()
    if any(not row[key] for key in ("layers", "hidden", "heads", "vocab")):
        return known_model(row, tensor)
    hidden = whole(row, "hidden")
    # A gated MLP has another width than 4 x hidden, as in AuroraGPT, which is a Llama.
    plain = re.search(_PLAIN, name) is not None and whole(row, "ffn", 4 * hidden) == 4 * hidden
    vocab = -(-whole(row, "vocab") // tensor) * tensor
    tied = ("tied embedding" in row["notes"] or plain) and "untied" not in row["notes"]
    return model_of_columns(row, plain=plain, vocab=vocab, tied=tied)


def measure(inputs: Mapping[str, str], truth: Mapping[str, str]) -> Measured:
    """Return step time, and memory of the kind that the source names, unless it lacks the optimizer's states.

    Programs print GB of 2^30 bytes (torch.cuda.max_memory_allocated() / 1024**3), unless the note says 1e9.
    """
    memory, note = number(truth, "peak_mem_gib"), truth["mem_unit_note"].lower()
    kind = "allocated" if re.search("allocated|maxmem", note) else "reserved" if "reserved" in note else "cached"
    seconds, rate = number(truth, "step_time_s"), number(truth, "tokens_per_s_per_gpu")
    if seconds is None and rate and inputs["gbs_samples"]:
        seconds = whole(inputs, "gbs_samples") * whole(inputs, "seq_len") / (rate * whole(inputs, "n_gpus"))
    return Measured(
        step_seconds=seconds,
        memory_bytes=None if memory is None or not _has_moments(inputs) else memory * (1e9 if "1e9" in note else 2**30),
        memory_kind=kind,
        ran=truth["oom"] != "1",
    )


TABLE = Table(
    file="deepspeed_2026_11.csv",
    input_columns=COLUMNS,
    truth_columns=TRUTH,
    build=build,
    measure=measure,
    panel=lambda row: " ".join(row[key] for key in ("set", "model", "gpu", "n_gpus", "seq_len", "gbs_samples")),
)
