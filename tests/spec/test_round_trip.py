import json
from pathlib import Path

import pytest

from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.spec import RunSpec, load_spec
from scaletrain_cli.spec.presets import presets
from tests.spec.samples import RECIPES, SPEC, load

FULL = """\
layout: {data_parallel: 2, zero_stage: 3, activation_checkpointing: full}
cluster:
  scheduler: slurm
  nodes: 2
  gpu: {name: mine, memory: 80GiB, fp32_flops: 67TFLOPS, memory_bandwidth: 3.35TB/s, intra_node_bandwidth: 450GB/s}
  mean_time_between_interruptions: 3h
  slurm: {partition: gpu, time: 24:00:00, memory_per_node: 1TiB, extra: {exclusive: true, nice: -5, wckey: a}}
checkpoint: {every: 7, async: false, dir: /tmp/a b}
guard: {hang: 10m}
restarts: {preemption: 4}
env: {A: "1 $(x)", B: "a\\nb"}
secret_env: [TOKEN]
"""


@pytest.mark.parametrize("text", [SPEC, SPEC + FULL], ids=["small", "full"])
def test_a_spec_round_trips_through_json(text: str) -> None:
    spec = load(text)
    dumped = json.loads(json.dumps(spec.model_dump(mode="json", by_alias=True), allow_nan=False))
    assert RunSpec.model_validate(dumped) == spec
    assert load(json.dumps(dumped)) == spec, "JSON is YAML, so a resolved spec can be planned again"


def test_ranges_of_skipped_batches_round_trip_through_json() -> None:
    spec = load(SPEC, "data.skip=[[3, 5], [9, 9]]")
    assert spec.data.skip == ((3, 5), (9, 9))
    assert RunSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json", by_alias=True)))) == spec


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_round_trips_through_json(path: Path) -> None:
    spec = load_spec(path)
    assert RunSpec.model_validate(spec.model_dump(mode="json", by_alias=True)) == spec


@pytest.mark.parametrize("name", presets())
def test_every_preset_round_trips_through_json(name: str) -> None:
    spec = load(SPEC, f"model={{preset: {name}}}")
    assert RunSpec.model_validate(spec.model_dump(mode="json", by_alias=True)) == spec


def test_steps_follow_from_tokens_rounded_up() -> None:
    assert load(SPEC, "training.steps=null", f"training.tokens={8 * 32 * 5}").total_steps == 5
    assert load(SPEC, "training.steps=null", f"training.tokens={8 * 32 * 5 + 1}").total_steps == 6


def test_recipes_with_frozen_embeddings_have_weights_in_which_the_chat_tokens_are_trained() -> None:
    specs = [load(path.read_text(encoding="utf-8")) for path in RECIPES]
    adapted = [spec for spec in specs if is_reference(spec.language_weights) and spec.transformer.adapter is not None]
    assert len(adapted) >= 2
    assert [spec.language_weights for spec in adapted] == [spec.data.tokenizer.path for spec in adapted]
