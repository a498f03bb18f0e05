"""Llamas of several sizes trained on one GPU for a few steps: speed and memory, measured beside planned.

Each row is a run on the local back end, ended by a fault before its last checkpoint, which would not fit every disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from engine_loops.start import train_here
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.plan import PlanInfeasibleError, accelerator_names, make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.measured import Figure, read_measured
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec, load_spec

STEPS = 26
WARM_UP = 6  # compilation, and the first choices of the allocator and the libraries
_RECIPE = """
schema: scaletrain/v1
name: {name}
model: {model}
data: {{source: python-stdlib, tokenizer: {{kind: bpe, vocab_size: {vocabulary}}}}}
training:
  {{global_batch_size: {sequences}, steps: 1000, precision: bf16, optimizer: {{name: adamw, lr: 1.0e-4}}}}
evaluation: {{every: 0}}
layout: {{offload: none}}
cluster: {{scheduler: local, nodes: 1, gpus_per_node: 1, gpu: {gpu}}}
checkpoint: {{every: 1000000}}
restarts: {{crash: 0}}
"""
MODELS = {
    "0.2B": "hidden_size: 1024, num_hidden_layers: 12, num_attention_heads: 16, num_key_value_heads: 16, "
    "intermediate_size: 2816, vocab_size: 32000, tie_word_embeddings: true",
    # The dimensions of Llama 3.2 1B and 3B, and of Llama 3 8B.
    "1B": "hidden_size: 2048, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, "
    "intermediate_size: 8192, vocab_size: 128256, tie_word_embeddings: true, rope_theta: 500000",
    "3B": "hidden_size: 3072, num_hidden_layers: 28, num_attention_heads: 24, num_key_value_heads: 8, "
    "intermediate_size: 8192, vocab_size: 128256, tie_word_embeddings: true, rope_theta: 500000",
    "8B": "preset: llama-3-8b",
}
SEQUENCES = {"0.2B": 16, "1B": 16, "3B": 8, "8B": 4}  # of a step, so that all steps of a row take about a minute
_TINY = (
    "{family: llama, seq_len: 64, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, intermediate_size: 128, vocab_size: 512, tie_word_embeddings: true}"
)
_PAIRS = ("step ms: plan", "run", "MFU: plan", "run", "peak GB: plan", "run", "off by")
# Settings of the states, in this order, until one fits.
_WAYS = (
    ("training.grad_dtype=fp32",),
    ("training.grad_dtype=bf16",),
    ("training.grad_dtype=bf16", "training.optimizer.name=adamw_8bit"),
)


@dataclass(frozen=True)
class Case:
    """One row: the model, and how it is run."""

    model: str
    compiled: bool
    checkpointing: str

    @property
    def overrides(self) -> list[str]:
        return [
            f"training.compile={str(self.compiled).lower()}",
            f"layout.activation_checkpointing={self.checkpointing}",
        ]


def cases(models: list[str], compiled: list[bool], checkpointing: list[str]) -> Iterator[Case]:
    """Return every combination."""
    return (Case(*combination) for combination in product(models, compiled, checkpointing))


def rows(chosen: Iterator[Case], gpu: str | None, folder: Path) -> Iterator[str]:
    """Yield a Markdown table line by line. ``gpu``: its name in the catalogue; None for a trial run."""
    titles = ("model", "compile", "recomputed", "states", "batch", *_PAIRS)
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * 5 + "---:|" * len(_PAIRS)
    for case in chosen:
        yield f"| {' | '.join(_cells(case, gpu, folder))} |"


def gpu_of_this_machine() -> str | None:
    """Return the catalogue's name of this machine's GPU; None without one. Raises UsageError for an unknown one."""
    import torch  # takes seconds, and most rows need it only in the processes of their run

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return catalogue_name(properties.name, properties.total_memory)


def catalogue_name(product: str, memory_bytes: int) -> str:
    """Return the catalogue's name of a GPU by its driver's name: the nearest in memory of those with its model.

    Raises UsageError for a GPU that is not in the catalogue.
    """
    words = product.lower().replace("-", " ").split()
    known = [name for name in accelerator_names() if name.split("-")[0] in words]
    if not known:
        raise UsageError(f"the catalogue has no {product}; name one that is like it with --gpu.")
    return min(known, key=lambda name: abs(int(name.rpartition("-")[2].removesuffix("gb")) - memory_bytes / 1e9))


def recipe_of(model: str, gpu: str | None, folder: Path) -> Path:
    """Return a file with the spec of a model on this GPU, or of a small model on the CPU under its name."""
    described = _TINY if gpu is None else f"{{family: llama, seq_len: 4096, {MODELS[model]}}}"
    path = folder / f"{model}.yaml"
    name = f"speed-{model.lower().replace('.', '')}"
    vocabulary = 512 if gpu is None else 16384
    path.write_text(
        _RECIPE.format(name=name, model=described, vocabulary=vocabulary, gpu=gpu or "cpu", sequences=SEQUENCES[model]),
        encoding="utf-8",
    )
    return path


@dataclass(frozen=True)
class Outcome:
    """What a row measured. ``states``: type of gradients, and the optimizer; ``mfu`` is None on CPUs.

    ``problem``: why nothing was measured, else empty; without a ``plan`` the run was not started.
    """

    states: str = ""
    plan: RunPlan | None = None
    run: RunDir | None = None
    seconds: float = 0.0  # of a step, median
    mfu: float | None = None
    memory: dict[str, Figure] | None = None
    problem: str = ""


def train_row(recipe: Path, settings: Sequence[str]) -> Outcome:
    """Train a recipe with its settings, in the first of _WAYS whose plan fits, and return what was measured.

    The plan is the one without the user's calibration. A choice of gradients or optimizer in ``settings`` is kept.
    """
    problem = ""
    for more in _WAYS:
        try:
            spec = load_spec(recipe, [*more, *settings])
            plan = make_plan(spec)
            run = train_here(spec, fault=f"exception step={STEPS + 1}")
        except PlanInfeasibleError as error:
            problem = problem or first_line(error)
        except ScaletrainError as error:
            return Outcome(problem=first_line(error))
        else:
            return _outcome(spec, plan, run)
    return Outcome(problem=problem)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text with its first problem, up to 200 characters."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    problems = getattr(error, "problems", ())
    return (f"{problems[0].key}: {problems[0].message}" if problems else first)[:200]


def _outcome(spec: RunSpec, plan: RunPlan, run: RunDir) -> Outcome:
    way = f"{spec.training.grad_dtype} gradients, {spec.training.optimizer.name}"
    lines = [line for line in read_metrics(run) if WARM_UP < line["step"] <= STEPS]
    if len(lines) < STEPS - WARM_UP:
        return Outcome(way, plan, run, problem=f"failed: {run_status(run).why[:160]}")
    mfu = [line["mfu"] for line in lines if line["mfu"] is not None]
    found = read_measured(run)
    return Outcome(
        states=way,
        plan=plan,
        run=run,
        seconds=statistics.median(line["step_seconds"] for line in lines),
        mfu=statistics.median(mfu) if mfu else None,
        memory=found.stages[0].figures if found is not None else None,
    )


def _cells(case: Case, gpu: str | None, folder: Path) -> list[str]:
    shown = [case.model, "yes" if case.compiled else "no", case.checkpointing]
    outcome = train_row(recipe_of(case.model, gpu, folder), case.overrides)
    if outcome.plan is None:
        return [*shown, f"not run: {outcome.problem}"]
    layout, time, memory = outcome.plan.layout, outcome.plan.time, outcome.plan.memory
    shown += [outcome.states, f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}"]
    planned = [f"{time.step * 1e3:.0f}", f"{time.mfu:.1%}", f"{memory.allocated / 1e9:.2f}"]
    if outcome.problem:
        return [*shown, planned[0], outcome.problem, planned[1], "", planned[2], "", ""]
    peak = (outcome.memory or {}).get("allocated")
    return [
        *shown,
        *(planned[0], f"{outcome.seconds * 1e3:.0f}", planned[1]),
        "-" if outcome.mfu is None else f"{outcome.mfu:.1%}",
        planned[2],
        f"{peak.measured / 1e9:.2f}" if peak else "-",
        f"{peak.difference:+.1%}" if peak and peak.difference is not None else "-",
    ]
