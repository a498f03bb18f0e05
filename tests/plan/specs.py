"""Run specs for the planner's tests, from a preset and dotted overrides, without a file."""

from pathlib import Path
from typing import Any

from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.loading import complete

# Overrides of spec_of that leave the ranks data parallelism alone, which the search would not.
DATA_ALONE = {"layout__tensor_parallel": 1, "layout__pipeline_parallel": 1, "layout__sequence_parallel": 1}

# One layout: for tests of what follows from a plan, whichever layout it has.
ONE_LAYOUT = DATA_ALONE | {
    "layout__zero_stage": 3,
    "layout__activation_checkpointing": "full",
    "training__micro_batch_size": 1,
}


def model_of(preset: str, **overrides: Any) -> ModelSpec:
    return ModelSpec.model_validate(complete({"preset": preset, **overrides}, Path(), {}))


def spec_of(preset: str = "llama-7b", **overrides: Any) -> RunSpec:
    """A bf16 run on one node of eight H100; ``training__steps=5`` sets ``training.steps``."""
    raw: dict[str, dict[str, Any]] = {
        "model": {"preset": preset},
        "data": {"source": "python-stdlib", "tokenizer": {"kind": "bpe", "vocab_size": 1000}},
        "training": {"global_batch_size": 256, "steps": 1000},
        "layout": {},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "scheduler": "slurm"},
    }
    for dotted, value in overrides.items():
        section, key = dotted.split("__")
        raw.setdefault(section, {})[key] = value
    raw["model"] = complete(raw["model"], Path(), {})
    return RunSpec.model_validate({"schema": "scaletrain/v1", "name": "test", **raw})
