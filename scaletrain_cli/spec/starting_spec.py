"""The spec that `scaletrain init` writes: complete, commented, and valid as written."""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.spec.backend_traits import backend_traits
from scaletrain_cli.spec.presets import LONGEST_DEFAULT_SEQ_LEN, presets

_COMMENT_COLUMN = 36
_LONGEST_ROWS = 4096  # as the sequences of Tulu 3 (arXiv:2411.15124)
_EPOCHS = 3  # of fine-tuning
_STEPS, _STEPS_PER_EPOCH = 1000, 20
_EVALUATION_BATCHES, _MOST_VALIDATION = 20, 0.01
_LONGEST_LINE = 110
_PLACEHOLDER = "/path/to/your/corpus"  # which validate and submit reject

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
$recipe
model:
  preset: $preset  # keys set here take precedence over those of the preset:
$dimensions
  seq_len: $seq_len  # tokens per sequence

"""

_TUNED_MODEL = """\
model:
  weights: $reference  # initial weights; keys set here take precedence over those of their config.json:
$dimensions
$adapter  seq_len: $seq_len  # tokens per sequence

"""

_TRAINING = """\
data:
  source: $source
  tokenizer: $tokenizer
$more_data
training:
$objective  global_batch_size: $global_batch_size  # sequences per optimizer step, over the whole job
  micro_batch_size: $micro_batch_size  # sequences per device and pass
  $length
  precision: $precision  # fp32 | bf16
  optimizer: {name: adamw, lr: $lr, betas: [0.9, 0.95], weight_decay: 0.1}
  schedule: {name: $schedule, warmup_steps: $warmup_steps, min_lr: $min_lr}
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
class GivenData:
    """Data to fine-tune on: a path, and the objective that its rows fit.

    ``samples``: about how many packed sequences, or pairs, it has; 0 if that is not known.
    """

    path: str
    objective: str
    samples: int = 0

    def batch_of(self, ranks: int) -> int:
        """Return a global batch size: 16 samples of each rank, or fewer so that an epoch has some steps."""
        usual = max(16, 16 * ranks)
        return usual if not self.samples else min(usual, ranks * max(1, self.samples // (_STEPS_PER_EPOCH * ranks)))

    def steps_of(self, ranks: int) -> int:
        """Return about as many steps as the epochs of the spec are; some number if that is not known."""
        return math.ceil(_EPOCHS * self.samples / self.batch_of(ranks)) if self.samples else _STEPS


@dataclass(frozen=True)
class GivenModel:
    """A model of the Hugging Face Hub, or in a folder: its reference or path, and what its files say.

    ``dimensions``: keys of the model section, from config.json. ``restricted``: reading its files requires a token.
    ``tokenizer_class``: to be stated in place of that of its tokenizer; None: none is to be stated.
    """

    reference: str
    name: str
    dimensions: Mapping[str, Any]
    seq_len: int
    has_tokenizer: bool
    restricted: bool = False
    tokenizer_class: str | None = None


@dataclass(frozen=True)
class GivenPreset:
    """A preset to train from random weights: how its authors train it, or a model of its size.

    ``batch``, ``tokens``: of a step and of the run, in tokens. ``source``: of these settings, as text.
    """

    name: str
    batch: float
    tokens: float
    lr: float
    min_lr: float
    warmup_steps: int
    schedule: str
    source: str

    @property
    def seq_len(self) -> int:
        """The tokens of a sequence."""
        return min(int(presets()[self.name]["max_position_embeddings"]), LONGEST_DEFAULT_SEQ_LEN)

    def batch_of(self, nodes: int, gpus_per_node: int) -> int:
        """Return the global batch size in sequences, a multiple of the ranks; of the nodes if it is below the ranks."""
        whole = int(self.batch // self.seq_len)
        unit = next((count for count in (nodes * gpus_per_node, nodes) if count <= whole), 1)
        return whole // unit * unit


def starting_spec(
    *,
    preset: GivenPreset | None = None,
    model: GivenModel | None = None,
    data: GivenData | None = None,
    lora: bool = False,
    gpu: str = "cpu",
    scheduler: str = "local",
    nodes: int = 1,
    gpus_per_node: int = 2,
) -> str:
    """Return a spec for this model and hardware; without a preset or a model of the hub, a small model for one node.

    A model of the hub or of a folder is fine-tuned from its weights, at the learning rate that TRL uses for it; with
    LoRA at ten times that, as in its documentation. DPO has the rates of the Zephyr recipes (arXiv:2310.16944).
    """
    ranks = nodes * gpus_per_node
    small, on_cpu, tuned = preset is None and model is None, gpu == "cpu", model is not None
    batch = max(16, ranks * (8 if small else 16)) if data is None else data.batch_of(ranks)
    steps = 100 if small else _STEPS if data is None else data.steps_of(ranks)
    length = f"steps: {steps}  # or  {'tokens: 300B' if data is None else f'epochs: {_EPOCHS}'}"
    if data is not None and data.samples:
        length = f"epochs: {_EPOCHS}  # passes over the data, about {steps} steps"
    warmup, schedule = 10 if small else min(100, max(1, steps // 10)), "cosine"
    known = model.dimensions if model is not None else {} if preset is None else presets()[preset.name]
    vocabulary = min(int(known["vocab_size"]), 32000) if known else 4096
    tokenizer = f"{{kind: bpe, vocab_size: {vocabulary}}}"
    explained = "trained on the source; or {kind: file, path: tokenizer.json}"
    if model is not None and model.has_tokenizer:
        beside = "" if is_reference(model.reference) else "/tokenizer.json"
        stated = "" if model.tokenizer_class is None else f", tokenizer_class: {model.tokenizer_class}"
        tokenizer = f"{{kind: file, path: {model.reference.rstrip('/')}{beside}{stated}}}"
        explained = "that of the weights"
    elif tuned:
        explained = "the repository has no tokenizer.json: give one that fits the weights"
    text = _HEAD + (_SMALL_MODEL if small else _TUNED_MODEL if tuned else _PRESET_MODEL) + _TRAINING
    traits = backend_traits(scheduler)
    text += _CLUSTER_OF_NODES + (traits.section.starting_text or "\n") if traits.max_nodes != 1 else _LOCAL_CLUSTER
    secrets = _HUB_SECRETS if model is not None and model.restricted else _SECRETS
    text += _TAIL + (secrets if traits.secrets_from_submitter else "")
    own: dict[str, object] = {}
    source = "python-stdlib  # the source of the standard library; or text, jsonl or parquet files"
    objective = "causal_lm" if data is None else data.objective
    rate = (5e-7 if objective == "dpo" else 2e-5) * (10 if lora else 1) if tuned else 2e-3
    least = rate / 10
    more_data = "  packing: best_fit  # several rows in a sequence, each with attention of its own\n"
    more_data = more_data if objective == "sft" else ""
    if preset is not None:
        recipe = textwrap.fill(preset.source, _LONGEST_LINE, initial_indent="# ", subsequent_indent="# ")
        own = {"preset": preset.name, "recipe": recipe, **_dimensions(known, preset.seq_len)}
        source = f"{_PLACEHOLDER}  # text, jsonl or parquet files; python-stdlib to try it"
        batch, rate, least, schedule = preset.batch_of(nodes, gpus_per_node), preset.lr, preset.min_lr, preset.schedule
        steps = math.ceil(preset.tokens / (batch * preset.seq_len))
        warmup = min(preset.warmup_steps, max(1, steps // 20))
        held = min(_MOST_VALIDATION, 15 * _EVALUATION_BATCHES / steps)
        more_data = f"  validation_split: {held:.1g}  # of the documents: about 15 evaluations' worth of tokens\n"
        length = f"tokens: {preset.tokens / 1e9:g}B  # 20 per active parameter (arXiv:2203.15556), {steps:,} steps"
    if model is not None:
        longest = model.seq_len if data is None else min(model.seq_len, _LONGEST_ROWS)
        adapter = "  adapter: {name: lora, rank: 16, alpha: 32, targets: all-linear}  # of PEFT\n" if lora else ""
        own = {"reference": model.reference, "adapter": adapter, **_dimensions(model.dimensions, longest)}
    filled = Template(text).substitute(
        **own,
        name=model.name if model is not None else "llama-10m" if preset is None else preset.name,
        tokenizer=f"{tokenizer}  # {explained}",
        global_batch_size=batch,
        micro_batch_size=8 if small else "auto",
        length=length,
        precision="fp32" if on_cpu else "bf16",
        lr=_rate(rate),
        min_lr=_rate(least),
        schedule=schedule,
        warmup_steps=warmup,
        evaluate_every=40 if small else min(500, max(1, steps // 4)),
        source=source if data is None else data.path,
        more_data=more_data,
        objective="" if objective == "causal_lm" else f"  objective: {objective}\n",
        evaluation_batches=4 if small else _EVALUATION_BATCHES,
        zero_stage=2 if small else "auto",
        scheduler=scheduler,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        gpu=gpu,
        checkpoint_every=20 if small else "auto",
    )
    return "".join(f"{_aligned(line)}\n" for line in filled.splitlines())


def _rate(rate: float) -> str:
    return re.sub(r"e([-+])0", r"e\1", f"{rate:.1e}")


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
        for inner, nested in value.items():
            yield from _commented(inner, nested, f"{start}  ")
        return
    text = f"{key}: {json.dumps(value)}"
    yield from textwrap.wrap(text, _LONGEST_LINE, initial_indent=start, subsequent_indent=f"{start}    ")
