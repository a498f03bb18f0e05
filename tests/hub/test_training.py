"""`scaletrain train` with weights, tokenizer and data from the hub, on CPU processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from tests.hub import tiny
from tests.hub.server import Hub
from tests.launch.conftest import PROJECT

pytestmark = pytest.mark.long
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def run_verb(*words: str, **environment: str) -> str:
    own = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(
        [sys.executable, "-m", "scaletrain_cli", *words], env=own, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def losses(run: RunDir) -> list[Any]:
    lines = (json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_from_the_hub_trains_as_from_local_files_offline_after_the_branch_moved(hub: Hub, tmp_path: Path) -> None:
    model, _ = tiny.publish(hub)
    runs = tmp_path / "runs"
    spec = str(tiny.write_spec(tmp_path))
    first = RunDir(runs / run_verb("train", spec, "--run-id", "first").splitlines()[-1])
    assert all(len(hub.downloads(name)) == 1 for name in ("a.txt", "b.txt", "tokenizer_config.json"))
    assert all(len([one for one in hub.downloads(name) if not one.range]) == 1 for name in SHARDS)

    local = tmp_path / "local"
    for name, content in tiny.model_files().items():
        (local / "model").mkdir(parents=True, exist_ok=True)
        (local / "model" / name).write_bytes(content)
    half = len(tiny.TEXT) // 2
    for name, text in (("a", tiny.TEXT[:half]), ("b", tiny.TEXT[half:])):
        (local / f"{name}.txt").write_text(text, encoding="utf-8")
    text = tiny.spec_text().replace(f"hf://datasets/{tiny.DATA}/train/*.txt", f"{local}/*.txt")
    text = text.replace(f"path: hf://{tiny.MODEL}@main", f"path: {local}/model/tokenizer.json")
    (tmp_path / "local.yaml").write_text(text.replace(f"hf://{tiny.MODEL}@main", f"{local}/model"), encoding="utf-8")
    run_verb("train", str(tmp_path / "local.yaml"), "--run-id", "local")
    assert losses(first) == losses(RunDir(runs / "local"))
    assert len(losses(first)) == 2

    hub.add(tiny.MODEL, tiny.model_files(seed=1))  # the branch moves; the run stays
    hub.log.clear()
    assert read_record(first).hub[f"hf://{tiny.MODEL}@main"] == model
    pinned = str(tiny.write_spec(tmp_path, revision=model))
    hub.log.clear()
    run_verb("train", pinned, "--run-id", "offline", HF_HUB_OFFLINE="1")
    assert not hub.log
    assert losses(RunDir(runs / "offline")) == losses(RunDir(runs / "local"))
    assert not [event for event in read_events(RunDir(runs / "offline")) if event["event"].startswith("hub-")]
