"""A run on two ranks whose data are at an S3 server trains as on local data, with a small cache and faults."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.block_cache import BLOCK_BYTES, block_cache
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec.sources import CacheSpec
from tests.cli.command_line import SMALL
from tests.data.remote.conftest import BUCKET
from tests.data.remote.faults import FaultyProxy
from tests.data.remote.measuring import measured_folder
from tests.launch.conftest import PROJECT

pytestmark = pytest.mark.long
CACHE_BYTES = 2 * BLOCK_BYTES
SETS = (
    *(("model.num_hidden_layers", "1"), ("model.hidden_size", "40"), ("model.intermediate_size", "64")),
    *(("training.steps", "25"), ("training.schedule.warmup_steps", "2"), ("evaluation.every", "10")),
    ("checkpoint.every", "10"),
)


def run_verb(*words: str) -> list[str]:
    own = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scaletrain_cli", *words]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip().splitlines()


def measured(run: RunDir) -> list[Any]:
    """Return the losses of all steps and validations."""
    lines = (json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines())
    return [(line.get("step"), line.get("loss"), line.get("validation_loss")) for line in lines]


def write_spec(path: Path, data: str) -> str:
    path.write_text(SMALL.read_text().replace("  source: python-stdlib", data))
    return str(path)


def write_text(path: Path, seed: int, words: int) -> None:
    draw = random.Random(seed)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 9))) for _ in range(3000)]
    path.write_text("\n\n".join(" ".join(draw.choices(known, k=60)) for _ in range(words // 60)))


def test_losses_are_those_of_local_data_with_a_small_cache_and_faults(s3: FaultyProxy, tmp_path: Path) -> None:
    write_text(tmp_path / "web.txt", 1, 1_500_000)
    write_text(tmp_path / "code.txt", 2, 700_000)
    sources = [
        f"    - {{name: {name}, path: {tmp_path}/{name}.txt, weight: {w}}}" for name, w in (("web", 3), ("code", 1))
    ]
    local = write_spec(tmp_path / "local.yaml", "\n".join(["  sources:", *sources]))
    sets = [word for key, value in SETS for word in ("--set", f"{key}={value}")]
    run_verb("data", "prepare", local, *sets)
    run_verb("train", local, "--run-id", "local", *sets)
    head, *lines = run_verb("data", "upload", local, f"s3://{BUCKET}/prepared", *sets)
    assert head == "data:"

    cache = tmp_path / "scratch"
    folder = block_cache(CacheSpec(size=CACHE_BYTES, path=str(cache))).folder

    draw, kinds = random.Random(4), ["slow-down", "reset", "short", "changed", "delay"]
    s3.fault = lambda request: draw.choice(kinds) if request.range and draw.random() < 0.2 else None
    remote = write_spec(
        tmp_path / "remote.yaml", "\n".join([*lines, f"  cache: {{size: {CACHE_BYTES}, path: {cache}}}"])
    )
    before = len(s3.seen)
    with measured_folder(folder / "blocks") as inside:
        run_verb("train", remote, "--run-id", "remote", *sets)
    found, expected = (measured(RunDir(tmp_path / "runs" / name)) for name in ("remote", "local"))
    assert found == expected
    assert sum(loss is not None for _, loss, _ in found) == 25
    assert any(loss is not None for _, _, loss in found)
    assert BLOCK_BYTES <= inside.most <= CACHE_BYTES
    assert inside.times > 100
    blocks = [request.range for request in s3.seen[before:] if request.path.endswith("train.bin")]
    assert len(blocks) > 2 * CACHE_BYTES // BLOCK_BYTES, "blocks were removed and fetched again"
    assert set(s3.broken) == set(kinds)
    print(f"{len(found)} lines of metrics equal; most bytes in the cache {inside.most} of {CACHE_BYTES}")
    print(f"{len(s3.seen) - before} requests, of which {len(s3.broken)} were broken: {sorted(set(s3.broken))}")
