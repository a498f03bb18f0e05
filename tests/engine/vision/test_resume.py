from pathlib import Path

import pytest

from scaletrain_cli.data.images.prepared import prepare_image_datasets
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.parity.comparison import assert_same
from tests.engine.parity.layouts import train_in_layout

_SPEC = """
schema: scaletrain/v1
name: digits
model: {family: resnet, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic, num_channels: 1,
        num_labels: 10, image_size: 8}
data: {source: sklearn-digits}
training: {global_batch_size: 32, micro_batch_size: 8, steps: 4, precision: fp32, optimizer: {lr: 3.0e-3}}
evaluation: {every: 0}
layout: {zero_stage: 1}
cluster: {gpu: cpu, gpus_per_node: 2}
"""


def digits(folder: Path, *overrides: str) -> RunSpec:
    spec = parse_spec(_SPEC, file="digits.yaml", base_dir=folder, overrides=overrides)
    prepare_image_datasets(spec, runs_root(), {}, 1, lambda *_: None)
    return spec


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "data={sources: [{name: a, path: sklearn-digits, weight: 3}, {name: b, path: sklearn-digits, weight: 1}]}",
            "data.stages=[{start: 3, weights: {a: 1, b: 3}}]",
        ),
        pytest.param(
            ("training.sync_batch_norm=false", "training.averaging={name: ema, decay: 0.5}"), marks=pytest.mark.long
        ),
        pytest.param(("layout.zero_stage=3", "training.precision=bf16"), marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_on_images_continues_bit_exactly(overrides: tuple[str, ...], tmp_path: Path) -> None:
    spec = digits(tmp_path, *overrides)
    whole, resumed = train_in_layout(spec).trained, train_in_layout(spec, 1).trained
    assert_same(resumed, whole)
