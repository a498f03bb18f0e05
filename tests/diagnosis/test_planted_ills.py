"""Real runs with one ill each, which the diagnosis names, and healthy ones, in which it finds nothing to warn of."""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import pytest

from scaletrain_cli.data.run_datasets import prepare_run_datasets
from scaletrain_cli.diagnosis.checks import Diagnosis, diagnose_run
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec.loading import parse_spec
from tests.drills.campaign.forked_attempts import ForkedRun

pytestmark = [pytest.mark.drill, pytest.mark.long]

TEXT = """
schema: scaletrain/v1
name: tiny
model: {family: llama, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
  intermediate_size: 96, vocab_size: 384, seq_len: 32}
data:
  source: text.txt
  tokenizer: {kind: bpe, vocab_size: 384}
training:
  global_batch_size: 8
  steps: 160
  precision: fp32
  optimizer: {name: adamw, lr: 5.0e-3, betas: [0.9, 0.95], weight_decay: 0.1}
  schedule: {name: cosine, warmup_steps: 16}
  seed: 1
evaluation: {every: 40, batches: 8}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 40}
"""
IMAGES = """
schema: scaletrain/v1
name: digits
model: {family: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], num_channels: 1,
  num_labels: 10, image_size: 16}
data: {source: sklearn-digits, validation_split: 0.2, images: {mean: [0.3], std: [0.38]}}
training: {global_batch_size: 32, steps: 160, precision: fp32, optimizer: {name: momentum, lr: 0.1},
  schedule: {name: cosine, warmup_steps: 16}}
evaluation: {every: 40, batches: 4}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 80}
"""
SOURCES = "data.sources=[{name: text, path: text.txt, weight: 0.7}, {name: noise, path: noise.txt, weight: 0.3}]"

# Overrides, the fault of $SCALETRAIN_FAULT, the finding, and the key of its first change.
ILLS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "learning rate x 300": (
        ("training.optimizer.lr=1.5",),
        "",
        "learning-rate-too-high",
        "training.optimizer.lr",
    ),
    "learning rate / 300": (
        ("training.optimizer.lr=1.6e-5",),
        "",
        "learning-rate-too-low",
        "training.optimizer.lr",
    ),
    "clipping at 0.01": (("training.gradient_clipping=0.01",), "", "always-clipped", "training.gradient_clipping"),
    "first weights x 25": (("model.initializer_range=0.5",), "", "first-loss-high", "model.initializer_range"),
    "a little text, read often": (
        ("data.source=little.txt", "data.validation_split=0.3", "training.steps=320"),
        "",
        "overfitting",
        "data",
    ),
    "a source of noise": (
        ("data.source=null", SOURCES, "training.steps=240"),
        "",
        "source-stands-still",
        "data.sources",
    ),
    "a spike": ((), "spike step=100-104 factor=20", "loss-spikes", "data"),
    "nan": (("guard.nan=rollback", "checkpoint.every=10"), "nan step=60", "not-finite", "data"),
    "a slow disk": (
        ("checkpoint.every=10", "checkpoint.async=false"),
        "slow-save seconds=0.3",
        "saves-block",
        "checkpoint.async",
    ),
    "a slow rank": (("cluster.gpus_per_node=2",), "slow-rank rank=1 seconds=0.03", "slow-rank", ""),
}
HEALTHY: dict[str, tuple[str, tuple[str, ...]]] = {
    "a language model": (TEXT, ()),
    "another architecture, with SGD": (
        TEXT,
        (
            "model={family: gpt, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 384, "
            "seq_len: 32}",
            "training.optimizer={name: momentum, lr: 0.1}",
        ),
    ),
    "adapters": (
        TEXT,
        ("model.adapter={name: lora, rank: 4, targets: all-linear}", 'training.trainable=[{match: ["*embed*"]}]'),
    ),
    "images": (IMAGES, ()),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root, with texts to train on."""
    path = tmp_path_factory.mktemp("runs")
    text = Path(str(argparse.__file__)).read_text(encoding="utf-8")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 7))) for _ in range(9000)]
    noise = "\n\n".join(" ".join(words[at : at + 60]) for at in range(0, len(words), 60))
    for name, content in {"text.txt": text, "little.txt": text[:9000], "noise.txt": noise}.items():
        (path / name).write_text(content, encoding="utf-8")
    return path


@pytest.fixture
def folder(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, as this test's runs root and working folder."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(texts))
    monkeypatch.chdir(texts)
    return texts


def trained(folder: Path, text: str, overrides: tuple[str, ...], fault: str = "") -> tuple[Diagnosis, list[str]]:
    """Train a run in one attempt, and return its diagnosis with the lines of its log."""
    spec = parse_spec(text, file="run.yaml", base_dir=folder, overrides=overrides)
    prepare_run_datasets(spec, folder, {}, 1, lambda *_: None)
    forked = ForkedRun.create(spec)
    forked.attempt(fault=fault)
    return diagnose_run(forked.run, read_record(forked.run)), forked.log().splitlines()[-5:]


@pytest.mark.parametrize("ill", ILLS)
def test_a_planted_ill_is_named_first_or_second(ill: str, folder: Path) -> None:
    overrides, fault, code, key = ILLS[ill]
    found, log = trained(folder, TEXT, overrides, fault)
    codes = [finding.code.removeprefix("diagnosis.") for finding in found.findings]
    assert code in codes[:2], (codes, log)
    finding = found.findings[codes.index(code)]
    assert any(isinstance(value, float) and math.isfinite(value) for value in finding.reason.params.values())
    change = finding.causes[0].change
    assert ("" if change is None else change.key) == key
    assert change is None or change.place == "--set" or change.place.startswith("run.yaml:")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_warning(name: str, folder: Path) -> None:
    text, overrides = HEALTHY[name]
    found, log = trained(folder, text, overrides)
    assert found.last_step == 160, log
    assert [str(finding.reason) for finding in found.findings if finding.severity != "note"] == []
