"""`checkpoint verify` of a run whose frozen weights are those of a repository."""

import json
import shutil
from pathlib import Path

import pytest

from scaletrain_cli.launch.hub_fetch import fetched_spec
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.checkpoints import digests_of, to_document, weight_files
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.worker import checkpoint_commit
from tests.cli.command_line import scaletrain
from tests.hub import tiny
from tests.hub.conftest import forget
from tests.hub.server import Hub
from tests.launch.conftest import make_plan


def save(run: RunDir, step: int, base: Path) -> None:
    """Commit a checkpoint that records the files of the folder as its frozen weights."""
    state = json.dumps({"base": to_document(base, digests_of(base, weight_files(base)))}).encode()
    checkpoint_commit.open_attempt(run.checkpoints, 1)
    staged = checkpoint_commit.stage_checkpoint(run.checkpoints, 1, step)
    writer = checkpoint_commit.HashingWriter(staged / "state.json")
    writer.write(state)
    files = {"state.json": writer.close()}
    checkpoint_commit.commit_checkpoint(run.checkpoints, step, files, world_size=2, clean=True, attempt=1)


def test_frozen_weights_of_the_hub_are_compared_where_this_machine_has_them_without_a_request(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.publish(hub)
    sets = ("model.adapter={name: lora, rank: 2}",)
    spec = parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)
    run = create_run(spec, make_plan(spec), "tuned").run
    local = Path(fetched_spec(spec, "model.weights").transformer.weights or "")
    save(run, 1, local)
    other = tmp_path / "other"
    shutil.copytree(local, other)  # of the files behind the links
    with (other / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    save(run, 2, other)
    forget()
    hub.log.clear()
    hub.add(tiny.MODEL, tiny.model_files(seed=1))  # the run keeps its commit
    ended = scaletrain("checkpoint", "verify", "tuned", code=1)
    assert [line.partition("/")[0] for line in ended.out.splitlines()] == ["step-00000002"]
    assert "model-00002-of-00002.safetensors is not the file that was in" in ended.out
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    ended = scaletrain("checkpoint", "verify", "tuned", code=0)
    assert f"hf://{tiny.MODEL}@main is not in the hub cache of this machine" in " ".join(ended.err.split())
    assert not hub.log
