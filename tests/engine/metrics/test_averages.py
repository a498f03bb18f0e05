from pathlib import Path

import torch

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.model.vision.batch_norm import statistics_of
from scaletrain_cli.engine.optim.averaging import WeightAverage
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.ranks import on_ranks

_SPEC = """
schema: scaletrain/v1
name: averages
model: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 64, vocab_size: 64, seq_len: 16}
data: {source: python-stdlib, tokenizer: {vocab_size: 64}}
training: {global_batch_size: 4, micro_batch_size: 2, steps: 3, averaging: {name: AVERAGING}}
layout: {zero_stage: 1}
cluster: {gpu: cpu, gpus_per_node: 2}
"""

_IMAGES = """
schema: scaletrain/v1
name: averages
model: {family: resnet, layer_type: basic, embedding_size: 4, hidden_sizes: [4, 8], depths: [1, 1], num_channels: 1,
        num_labels: 10, image_size: 32}
data: {source: sklearn-digits}
training: {global_batch_size: 4, micro_batch_size: 2, steps: 3, averaging: {name: AVERAGING}}
layout: {zero_stage: 1}
cluster: {gpu: cpu, gpus_per_node: 2}
"""


def _spec(text: str, averaging: str) -> RunSpec:
    return parse_spec(text.replace("AVERAGING", averaging), file="averages.yaml", base_dir=Path())


def _planned(text: str, averaging: str) -> int:
    return make_plan(_spec(text, averaging)).memory.optimizer_states


def _held() -> list[int]:
    found = []
    for text in (_SPEC, _IMAGES):
        spec = _spec(text, "ema")
        layout = make_plan(spec).layout
        composed = compose(spec, layout, build_mesh(layout), torch.device("cpu"))
        statistics = statistics_of(composed.model)
        found.append(WeightAverage(composed.engine, spec.training.averaging, spec.total_steps, statistics).bytes)
    return found


def test_the_plan_counts_what_averages_take() -> None:
    planned = [_planned(text, "ema") - _planned(text, "none") for text in (_SPEC, _IMAGES)]
    assert on_ranks(2, _held) == 2 * [planned]
