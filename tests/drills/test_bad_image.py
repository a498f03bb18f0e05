"""A run on two sources of images that meets an image which cannot be decoded, and continues as its message says."""

import math
import re
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import find_run
from tests.cli.command_line import scaletrain
from tests.data.images.pictures import write_folder

pytestmark = [pytest.mark.drill, pytest.mark.long]
SPEC = """\
schema: scaletrain/v1
name: bad
model: {{family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic, image_size: 8,
        num_labels: 3}}
data:
  sources: [{{name: web, path: {folder}/web, weight: 3}}, {{name: own, path: {folder}/own, weight: 1}}]
  validation_split: 0.2
  loader: {{workers: 1}}
training: {{global_batch_size: 8, micro_batch_size: 4, steps: 8, precision: fp32, seed: 7, optimizer: {{lr: 1.0e-3}}}}
evaluation: {{every: 4, batches: 2}}
checkpoint: {{every: 2, async: false}}
cluster: {{gpu: cpu, gpus_per_node: 1}}
"""


def test_a_run_continues_without_the_batch_of_a_cut_jpeg(tmp_path: Path) -> None:
    write_folder(tmp_path / "web", [f"{'abc'[number % 3]}/{number}.jpg" for number in range(60)])
    images = write_folder(tmp_path / "own", [f"{'abc'[number % 3]}/{number}.jpg" for number in range(24)])
    (tmp_path / "own/b/1.jpg").write_bytes(images["b/1.jpg"][:-60])  # its header is that of an image
    (tmp_path / "run.yaml").write_text(SPEC.format(folder=tmp_path))
    ended = scaletrain("train", tmp_path / "run.yaml", "--run-id", "r1", code=ExitCode.DO_NOT_REQUEUE)
    named = re.search(r"batch (\d+): (\S+own/b/1\.jpg): the image cannot be decoded", ended.err)
    assert named, ended.err
    batch = int(named[1])
    assert batch == 4
    refused = scaletrain("resume", "r1", "--set", "data.skip=[[1, 1]]", code=ExitCode.USAGE)
    assert "changes which batches the run was trained on" in " ".join(refused.err.split())
    explained = scaletrain("explain", "r1")
    assert "--set 'data.skip=[[B, B]]'" in " ".join(explained.out.split())
    scaletrain("resume", "r1", "--set", f"data.skip=[[{batch}, {batch}]]", code=ExitCode.DONE)
    assert scaletrain("status", "r1", "--wait", "1h").code == ExitCode.DONE
    lines = list(read_metrics(find_run("r1")))
    steps = [line["step"] for line in lines if "loss" in line]
    assert sorted(set(steps)) == list(range(1, 9))
    for line in lines:
        if "loss" in line and {"loss/web", "loss/own"} <= line.keys():
            assert line["loss"] == pytest.approx(0.75 * line["loss/web"] + 0.25 * line["loss/own"], rel=1e-5)
    (last,) = [line for line in lines if line["step"] == 8 and "validation_loss" in line]
    mean = 0.75 * last["validation_loss/web"] + 0.25 * last["validation_loss/own"]
    assert last["validation_loss"] == pytest.approx(mean, rel=1e-6)
    assert math.isfinite(last["validation_top1"])
