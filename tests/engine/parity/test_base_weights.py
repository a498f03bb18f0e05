"""Training a part of a pretrained model: as transformers and AdamW do, with checkpoints of that part only."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from scaletrain_cli.engine.checkpoint.export import export
from scaletrain_cli.engine.checkpoint.shard_file import ShardFile
from scaletrain_cli.engine.checkpoint.tokenizer_export import TextFiles
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.trained_parameters import base_names
from scaletrain_cli.rundir.checkpoints import Checkpoint, latest_valid
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from tests.cli.command_line import scaletrain
from tests.engine.parity.comparison import FP32, assert_same, difference
from tests.engine.parity.layouts import train_in_layout
from tests.engine.parity.reference import train_alone
from tests.engine.parity.rows import STEPS, Row
from tests.engine.ranks import RanksFailedError

# The head first, then the last block as well, with a learning rate of its own; the rest never trains.
STAGES = "training.trainable=[{match: 'lm_head.*'}, {match: '*.layers.2.*', lr: 5.0e-3, start_step: 3}]"
NO_TEXT = TextFiles({}, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))


@pytest.fixture
def base(tmp_path: Path, dataset: Path) -> Path:
    """A folder with the weights of a model of transformers, in several files."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**to_hugging_face(Row().spec(dataset).transformer))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base", max_shard_size="100KB")
    return tmp_path / "base"


def spec_of(row: Row, dataset: Path, base: Path, *overrides: str, steps: int = STEPS) -> RunSpec:
    sets = (STAGES, f"model.weights={base}", *overrides)
    return Row(**{**vars(row), "overrides": sets}).spec(dataset, steps)


@pytest.mark.long
@pytest.mark.parametrize("row", [Row(2, data=2), Row(3, data=2, tensor=2)], ids=lambda row: row.name)
def test_a_part_of_a_pretrained_model_trains_as_with_transformers(row: Row, dataset: Path, base: Path) -> None:
    found = difference(train_in_layout(spec_of(row, dataset, base)).trained, train_alone(spec_of(Row(), dataset, base)))
    assert found.within(FP32), found


def newest() -> tuple[Checkpoint, RunSpec]:
    (run,) = [RunDir(path) for path in runs_root().iterdir() if (path / "run.json").exists()]
    checkpoint, _ = latest_valid(run.checkpoints)
    assert checkpoint is not None
    return checkpoint, read_record(run).spec


def exported(checkpoint: Checkpoint, spec: RunSpec, folder: Path) -> dict[str, Tensor]:
    export([checkpoint.path], spec, folder, torch.float32, NO_TEXT)
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_checkpoints_hold_what_trains_and_continue_on_the_same_base(dataset: Path, base: Path, tmp_path: Path) -> None:
    row, steps = Row(1, data=2), 4
    whole = train_in_layout(spec_of(row, dataset, base, steps=steps)).trained
    shutil.rmtree(runs_root())
    resumed = train_in_layout(spec_of(row, dataset, base, steps=steps), 3).trained
    assert_same(resumed, whole)

    checkpoint, spec = newest()
    stored = {name for file in checkpoint.files if file.startswith("rank") for name in slices(checkpoint.path / file)}
    assert stored == set(whole.weights) - base_names(spec)
    assert "lm_head.weight" in stored
    assert not any(
        name.startswith(("model.embed", "model.layers.0", "model.layers.1", "model.norm")) for name in stored
    )

    first = dict(transformers.AutoModelForCausalLM.from_pretrained(base).named_parameters())
    after = exported(checkpoint, spec, tmp_path / "exported")
    assert after.keys() == first.keys()
    for name, weight in after.items():
        assert torch.equal(weight, first[name]) == (name in base_names(spec)), name

    run_id = checkpoint.path.parent.parent.name
    assert scaletrain("checkpoint", "verify", run_id).code == 0
    file = change_a_file(base)
    ended = scaletrain("checkpoint", "verify", run_id, code=1)
    assert f"{file.name} is not the file that was in" in ended.out
    with pytest.raises(UsageError, match=f"{file.name} is not the file that was in"):
        exported(checkpoint, spec, tmp_path / "again")
    shutil.rmtree(base)
    with pytest.raises(UsageError, match="cannot read the weights that the run starts from"):
        exported(checkpoint, spec, tmp_path / "again")


def change_a_file(folder: Path) -> Path:
    file = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def slices(path: Path) -> list[str]:
    return list(ShardFile(path).header.slices)


@pytest.mark.long
def test_a_run_does_not_resume_on_other_weights(dataset: Path, base: Path) -> None:
    spec = spec_of(Row(0), dataset, base, steps=4)
    with pytest.raises(RanksFailedError, match="was trained on other weights than those in"):
        train_in_layout(spec, 1, between=lambda: change_a_file(base))
    assert json.loads((base / "config.json").read_text())["model_type"] == "llama"
