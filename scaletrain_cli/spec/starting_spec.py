"""The spec that `scaletrain init` writes: complete, commented, and valid as written."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from scaletrain_cli.spec.backend_traits import backend_traits
from scaletrain_cli.spec.presets import presets

_COMMENT_COLUMN = 36
_LONGEST_LINE = 110

_HEAD = """\
# ScaleTrain run spec. Keys that are left out have defaults; `scaletrain validate FILE --json` shows all of them.
# Sizes take 80GB or 80GiB, durations 30m or 24:00:00, counts 300B. With `auto`, the planner chooses.
schema: scaletrain/v1
name: $name

"""

_SMALL_MODEL = """\
model:
  family: llama  # llama | gpt
  # preset: llama-7b  # published dimensions instead; keys set here take precedence
  # hf_config: config.json  # or the dimensions in a Hugging Face config.json
  hidden_size: 320
  num_hidden_layers: 8
  num_attention_heads: 10
  num_key_value_heads: 5  # fewer than attention heads: grouped-query attention
  intermediate_size: 896
  vocab_size: 4096
  tie_word_embeddings: true
  seq_len: 128  # tokens per sequence

"""

_PRESET_MODEL = """\
model:
  preset: $preset  # keys set here take precedence over those of the preset:
$dimensions
  seq_len: $seq_len  # tokens per sequence

"""

_HUB_MODEL = """\
model:
  hf_config: $reference  # keys set here take precedence over its config.json:
$dimensions
  weights: $reference  # initial weights; the run keeps the commit
  seq_len: $seq_len  # tokens per sequence

"""

_TRAINING = """\
data:
  source: python-stdlib  # the source of the standard library; or text, jsonl or parquet files
  tokenizer: $tokenizer

training:
  global_batch_size: $global_batch_size  # sequences per optimizer step, over the whole job
  micro_batch_size: $micro_batch_size  # sequences per device and pass
  steps: $steps  # or  tokens: 300B
  precision: $precision  # fp32 | bf16
  optimizer: {name: adamw, lr: $lr, betas: [0.9, 0.95], weight_decay: 0.1}
  schedule: {name: cosine, warmup_steps: $warmup_steps, min_lr: $min_lr}
  gradient_clipping: 1.0  # maximum gradient norm; 0: no clipping
  seed: 42

evaluation: {every: $evaluate_every, batches: $evaluation_batches}  # validation loss; every: 0: none

layout:  # parallelism over the devices
  data_parallel: auto
  tensor_parallel: auto
  pipeline_parallel: auto
  zero_stage: $zero_stage  # 0 | 1 | 2 | 3: what is sharded over the data-parallel ranks
  activation_checkpointing: auto  # none | selective | full

"""

_LOCAL_CLUSTER = """\
cluster:
  scheduler: $scheduler  # local (this machine) | slurm | kubernetes
  nodes: 1
  gpus_per_node: $gpus_per_node
  gpu: $gpu  # cpu: each rank is a CPU process; or an accelerator, such as h100-sxm-80gb
  grace_seconds: 60  # between the preemption signal and the kill

"""

_CLUSTER_OF_NODES = """\
cluster:
  scheduler: $scheduler  # slurm | kubernetes | local (this machine)
  nodes: $nodes
  gpus_per_node: $gpus_per_node
  gpu: $gpu
  inter_node_bandwidth: 50GB/s  # per GPU and direction
  spot: false  # true: nodes can be preempted at any time
  # mean_time_between_interruptions: 12h
  grace_seconds: 120  # between the preemption signal and the kill
"""

_TAIL = """\
checkpoint: {every: $checkpoint_every, keep: 3}  # in steps; written in the background
restarts: {preemption: unlimited, node: 10, crash: 3}
# tracking: [tensorboard, {wandb: {project: $name}}]  # also mlflow; metrics.jsonl is always written
# telemetry: {enabled: false}  # by default ranks, GPUs and nodes are measured each second
# notify: [{webhook: SLACK_URL}]  # name of a variable; told of findings, failures and the end
# code: {path: ., engine: train}  # your own program in a git working tree, instead of the built-in engine
# env: {NCCL_DEBUG: WARN}
"""

_HUB_SECRETS = """\
# secret_env: [HF_TOKEN]  # names only: on a cluster, the nodes need the token that may read the weights
"""

_SECRETS = """\
# secret_env: [WANDB_API_KEY]  # names only; values are read from your environment at submission
"""


@dataclass(frozen=True)
class HubModel:
    """A model of the Hugging Face Hub: its reference, and what its repository says.

    ``dimensions``: keys of the model section, from config.json. ``restricted``: reading its files requires a token.
    """

    reference: str
    name: str
    dimensions: Mapping[str, Any]
    seq_len: int
    has_tokenizer: bool
    restricted: bool = False


def starting_spec(
    *,
    preset: str | None = None,
    hub_model: HubModel | None = None,
    gpu: str = "cpu",
    scheduler: str = "local",
    nodes: int = 1,
    gpus_per_node: int = 2,
) -> str:
    """Return a spec for this model and hardware; without a preset or a model of the hub, a small model for one node.

    A model of the hub is fine-tuned from its weights, at the learning rate that TRL uses for it.
    """
    small, on_cpu = preset is None and hub_model is None, gpu == "cpu"
    known = hub_model.dimensions if hub_model is not None else {} if preset is None else presets()[preset]
    vocabulary = min(int(known["vocab_size"]), 32000) if known else 4096
    tuned = hub_model is not None
    tokenizer = f"{{kind: bpe, vocab_size: {vocabulary}}}"
    explained = "trained on the source; or {kind: file, path: tokenizer.json}"
    if hub_model is not None and hub_model.has_tokenizer:
        tokenizer, explained = f"{{kind: file, path: {hub_model.reference}}}", "its tokenizer.json"
    elif tuned:
        explained = "the repository has no tokenizer.json: give one that fits the weights"
    text = _HEAD + (_SMALL_MODEL if small else _HUB_MODEL if tuned else _PRESET_MODEL) + _TRAINING
    traits = backend_traits(scheduler)
    text += _CLUSTER_OF_NODES + (traits.section.starting_text or "\n") if traits.max_nodes != 1 else _LOCAL_CLUSTER
    secrets = _HUB_SECRETS if hub_model is not None and hub_model.restricted else _SECRETS
    text += _TAIL + (secrets if traits.secrets_from_submitter else "")
    own: dict[str, object] = {} if preset is None else _preset(preset)
    if hub_model is not None:
        own = {"reference": hub_model.reference, **_dimensions(hub_model.dimensions, hub_model.seq_len)}
    filled = Template(text).substitute(
        **own,
        name=hub_model.name if hub_model is not None else preset or "llama-10m",
        tokenizer=f"{tokenizer}  # {explained}",
        global_batch_size=max(16, nodes * gpus_per_node * (8 if small else 16)),
        micro_batch_size=8 if small else "auto",
        steps=100 if small else 1000,
        precision="fp32" if on_cpu else "bf16",
        lr="2.0e-3" if small else "2.0e-5" if tuned else "3.0e-4",
        min_lr="2.0e-4" if small else "2.0e-6" if tuned else "3.0e-5",
        warmup_steps=10 if small else 100,
        evaluate_every=40 if small else 500,
        evaluation_batches=4 if small else 20,
        zero_stage=2 if small else "auto",
        scheduler=scheduler,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        gpu=gpu,
        checkpoint_every=20 if small else "auto",
    )
    return "".join(f"{_aligned(line)}\n" for line in filled.splitlines())


def _preset(preset: str) -> dict[str, object]:
    known = presets()[preset]
    return {"preset": preset, **_dimensions(known, min(int(known["max_position_embeddings"]), 8192))}


def _dimensions(known: Mapping[str, Any], seq_len: int) -> dict[str, object]:
    lines = "\n".join(line for key, value in known.items() for line in _commented(key, value, "  # "))
    return {"dimensions": lines, "seq_len": seq_len}


def _aligned(line: str) -> str:
    code, mark, comment = line.rpartition("  # ")
    return f"{code:<{_COMMENT_COLUMN}}  # {comment}" if mark and code.strip() else line


def _commented(key: str, value: object, start: str) -> Iterator[str]:
    """Yield the lines of a key in YAML, each after ``start``; mappings as blocks, long lists on several lines."""
    if isinstance(value, dict):
        yield f"{start}{key}:"
        for inner, each in value.items():
            yield from _commented(inner, each, f"{start}  ")
        return
    text = f"{key}: {json.dumps(value)}"
    yield from textwrap.wrap(text, _LONGEST_LINE, initial_indent=start, subsequent_indent=f"{start}    ")
