"""Runs on images and pairs that are resized, preempted, killed, damaged or rolled back train as undisturbed ones do."""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.data.images.prepared import prepare_image_datasets
from scaletrain_cli.engine.data.images.batches import ImageStepBatch
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.spec import RunSpec
from tests.cli.command_line import PROJECT, scaletrain
from tests.drills.campaign.elastic import resize
from tests.drills.campaign.forked_attempts import ForkedRun, be_rank, strays
from tests.drills.vision_runs import draw_pairs, vision_spec, vision_text
from tests.engine.checkpoint.whole_state import whole_state

pytestmark = [pytest.mark.drill, pytest.mark.long]
EMA = "{name: ema, every: 1, decay: 0.9}"


@pytest.fixture
def prepared() -> Path:
    """Return a runs root."""
    return runs_root()


def prepared_spec(family: str, root: Path, **overrides: Any) -> RunSpec:
    """Return the spec of a small run whose images are prepared."""
    folder = draw_pairs(root / "shapes") if family == "clip" else root
    spec = vision_spec(family, folder, **overrides)
    prepare_image_datasets(spec, root, {}, 1, lambda *_: None)
    return spec


def noting_rank(path: Path, number: int) -> int:
    """Be a rank that writes down a hash of everything that it takes of each sample, by its number in the run."""
    notes, take = RunDir(path).attempt(number) / f"samples-{os.environ['RANK']}.jsonl", Loader.take

    def noting_take(loader: Any, number: Any, following: Sequence[Any] = ()) -> Any:
        batch = take(loader, number, following)
        if isinstance(batch, ImageStepBatch) and isinstance(number, int):
            with notes.open("a") as file:
                for micro in batch.micro_batches():
                    parts = [part for part in micro if part is not None]
                    for row, sample in enumerate(micro.samples.tolist()):
                        content = b"".join(part[row].contiguous().numpy().tobytes() for part in parts)
                        file.write(json.dumps([sample, hashlib.sha256(content).hexdigest()]) + "\n")
        return batch

    Loader.take = noting_take  # type: ignore[method-assign]
    return be_rank(path, number)


def contents_by_sample(run: RunDir) -> dict[int, str]:
    """Return the hash of each sample that any attempt took. Raises AssertionError if two attempts took other ones."""
    found: dict[int, str] = {}
    for path in run.path.glob("attempts/*/samples-*.jsonl"):
        for sample, content in map(json.loads, path.read_text().splitlines()):
            assert found.setdefault(sample, content) == content, f"sample {sample} has changed"
    return found


def test_a_vit_on_2_then_1_then_3_ranks_has_the_same_images_augmentations_and_losses(prepared: Path) -> None:
    folder = draw_pairs(prepared / "shapes")
    images = {"data__source": folder / "pairs", "model__num_channels": 3, "model__num_labels": 2}
    images |= {"data__images__mean": "null", "data__images__std": "null", "evaluation__every": 0}
    spec = prepared_spec("vit", prepared, **images, training__steps=9, layout__zero_stage=2)
    undisturbed, run = (ForkedRun.create(spec, noting_rank) for _ in range(2))
    undisturbed.attempts_to_end()
    for ranks, last in ((2, 4), (1, 7), (3, None)):
        resize(run, [f"cluster.gpus_per_node={ranks}"])
        ended = run.attempt(fault=f"sigterm rank=0 step={last}" if last else "")
        assert ended.exit_codes == ([75] if last else [0]) * ranks, run.log()
    assert [event["step"] for event in run.events("resumed")] == [4, 7]
    ours, theirs = (contents_by_sample(each.run) for each in (run, undisturbed))
    assert len(ours) >= 9 * 12
    assert {sample: ours[sample] for sample in range(9 * 12)} == {sample: theirs[sample] for sample in range(9 * 12)}
    losses = [[line["loss"] for line in read_metrics(each.run)] for each in (run, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_pairs_preempted_and_then_killed_beside_a_damaged_checkpoint_train_to_the_same_bits(prepared: Path) -> None:
    settings = {"checkpoint__every": 5, "training__steps": 20, "training__averaging": EMA, "layout__zero_stage": 1}
    spec = prepared_spec("clip", prepared, **settings)
    undisturbed, run = ForkedRun.create(spec), ForkedRun.create(spec)
    undisturbed.attempts_to_end()
    assert run.attempt(fault="sigterm rank=1 step=7").exit_codes == [75, 75]
    assert run.newest_step() == 7
    assert run.attempt(fault="flip rank=0 step=12").exit_codes is None
    run.attempts_to_end()
    preempted, killed = run.events("resumed")
    assert preempted["step"] == 7
    assert killed["step"] < 12
    assert any("safetensors" in line for line in killed["passed_over"])
    assert strays(run, undisturbed) == []


def test_images_with_a_loss_that_is_no_number_are_skipped_as_if_from_the_start(prepared: Path) -> None:
    settings = {"layout__zero_stage": 1, "training__averaging": EMA, "guard__nan": "rollback"}
    spec = prepared_spec("resnet", prepared, **settings, data__loader__workers=1)
    run = ForkedRun.create(spec)
    assert run.attempt(fault="spike step=31 factor=nan").exit_codes == [0, 0], run.log()
    (back,) = run.events("rolled-back")
    assert (back["from_step"], back["to_step"], back["cause"]) == (31, 20, "nan")
    first, last = back["skip"]
    assert first <= 31 <= last
    skipping = ForkedRun.create(prepared_spec("resnet", prepared, **settings, data__skip=f"[[{first}, {last}]]"))
    skipping.attempts_to_end()
    assert strays(run, skipping) == []


def test_layers_that_are_frozen_in_a_stage_keep_their_batch_norm_statistics_to_the_bit(prepared: Path) -> None:
    """The classifier trains, then everything, then the classifier again; a run that is killed in between as well."""
    stages = "[{match: 'classifier*', end_step: 4}, {match: '*', start_step: 5, end_step: 8},"
    stages += " {match: 'classifier*', start_step: 9}]"
    settings = {"training__trainable": stages, "training__steps": 12, "layout__zero_stage": 1}
    spec = prepared_spec("resnet", prepared, **settings, checkpoint__every=4, checkpoint__keep=4)
    undisturbed, run = ForkedRun.create(spec), ForkedRun.create(spec)
    undisturbed.attempts_to_end()
    first, *states = (
        {name.removeprefix("weight/"): each for name, each in state.items() if name.startswith("weight/")}
        for state in (
            {f"weight/{name}": each.flatten() for name, each in drawn_weights(spec).items()},
            *(whole_state(checkpoint.path) for checkpoint in list_checkpoints(undisturbed.run.checkpoints)),
        )
    )
    body = [name for name in first if not name.startswith("classifier")]
    statistics = [name for name in body if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) > 8
    before = [[name for name in body if not torch.equal(a[name], b[name])] for a, b in pairwise([first, *states])]
    assert before[0] == []
    assert set(statistics) <= set(before[1])
    assert before[2] == []
    assert all(not torch.equal(a["classifier.1.weight"], b["classifier.1.weight"]) for a, b in pairwise(states))
    assert run.attempt(fault="sigkill rank=1 step=7").exit_codes is None
    assert run.attempt(fault="sigkill rank=0 step=11").exit_codes is None
    run.attempts_to_end()
    assert strays(run, undisturbed) == []


def drawn_weights(spec: RunSpec) -> dict[str, torch.Tensor]:
    """Return the weights and running statistics that a run begins with."""
    model, device = outline(spec.model), torch.device("cpu")
    materialize(model, model.first_weights(spec.training.seed, device), device)
    return model.state_dict()


def test_the_drill_verb_reports_that_runs_on_images_and_pairs_recovered(prepared: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.yaml"
    pairs.write_text(vision_text("clip", draw_pairs(tmp_path / "shapes")))
    for spec, kinds in ((PROJECT / "recipes/vision-digits-cpu.yaml", ["sigterm", "spike"]), (pairs, ["flip"])):
        ended = scaletrain("drill", *kinds, "--spec", spec, "--steps", 40, code=0)
        rows = [row.split() for row in ended.out.splitlines() if row.split()[:1] and row.split()[0] in kinds]
        assert [row[1] for row in rows] == ["survived"] * len(kinds)
        assert ended.out.count("bit for bit") == 1
