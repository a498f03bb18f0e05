"""`scaletrain data prepare` and `validate` for a spec of images: the settings of its index come from its loss."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.images.compatibility import settings_of
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.prepared import find_run_datasets, prepare_run_datasets
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.dataset_checks import require_usable
from scaletrain_cli.launch.resource_checks.files import class_file_problems, row_problems
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.rundir.shared_datasets import entries_of, read_entries, record_datasets, recorded_folders
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.data.images.pictures import write_folder, write_shards
from tests.data.texts import ignore
from tests.forked import scaletrain

SPEC = """\
schema: scaletrain/v1
name: pictures
model: {family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic, image_size: 8, \
num_labels: 5}
data: {source: shards, validation_split: 0.25}
training: {global_batch_size: 8, micro_batch_size: 8, steps: 10, precision: fp32, optimizer: {name: adamw, lr: 1.0e-3}}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
"""


def spec(folder: Path, *overrides: str) -> RunSpec:
    return parse_spec(SPEC, file="run.yaml", base_dir=folder, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "targets", "captions"),
    [
        ((), "class", False),
        (("training.loss=bce",), "classes", False),
        (("training.objective=regression",), "numbers", False),
        (("training.objective=contrastive", "training.loss=nt_xent", "evaluation.every=0"), "none", False),
        (("model={family: clip, preset: clip-vit-base-patch32}",), "none", True),
    ],
)
def test_the_loss_decides_what_is_read_of_a_sample(
    overrides: tuple[str, ...], targets: str, captions: bool, tmp_path: Path
) -> None:
    run = spec(tmp_path, *overrides)
    found = settings_of(run, run.data.all_sources[0])
    assert (found.targets, found.captions) == (targets, captions)
    assert (found.validation_share, found.skips_bad) == (0.25, False)


def test_datasets_of_images_are_prepared_found_and_kept_by_their_run(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "shards", 2, 10)
    run, runs = spec(tmp_path, f"data.source={source}"), tmp_path / "runs"
    assert find_run_datasets(run, runs, {}) is None
    made = prepare_run_datasets(run, runs, {}, 1, ignore)
    assert find_run_datasets(run, runs, {}) == made
    assert len(open_images(made["source"])["train"]) > 8
    note = tmp_path / "datasets.json"
    record_datasets(note, entries_of(run, runs, made))
    write_shards(source, 1, 3)
    assert find_run_datasets(run, runs, {}) is None
    assert find_run_datasets(run, runs, recorded_folders(run, runs, read_entries(note))[0]) == made
    changed = spec(tmp_path, f"data.source={source}", "data.on_bad=skip")
    assert recorded_folders(changed, runs, read_entries(note))[0] == {}
    given = spec(tmp_path, f"data.source={made['source']}")
    assert find_run_datasets(given, runs, {}) == made


def test_more_classes_than_labels_are_an_error(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "shards", 1, 10)
    run = spec(tmp_path, f"data.source={source}", "model.num_labels=4")
    with pytest.raises(UsageError, match=r"have 5 classes, and model\.num_labels = 4"):
        prepare_run_datasets(run, tmp_path / "runs", {}, 1, ignore)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.validation_split=0.5", r"with data\.validation_split = 0\.25, and the spec has 0\.5"),
        ("data.on_bad=skip", r"with data\.on_bad = stop, and the spec has skip"),
        ("data.images.fields.label=json:classes", r"with data\.images\.fields\.label = auto, and the spec has json"),
        ("training.loss=bce", r"made for cross_entropy, and has not what training\.loss = bce needs"),
        ("data.images.classes=names.txt", r"with data\.images\.classes = a, b, and the spec has x, y"),
    ],
)
def test_an_index_of_other_settings_is_refused_as_the_source(override: str, problem: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "two", [f"{kind}/{number}.jpg" for kind in "ab" for number in range(8)])
    runs = tmp_path / "runs"
    made = prepare_run_datasets(spec(tmp_path, f"data.source={tmp_path / 'two'}"), runs, {}, 1, ignore)["source"]
    (tmp_path / "names.txt").write_text("x\ny\n")
    given = (f"data.source={made}", "model.num_labels=2")
    assert find_run_datasets(spec(tmp_path, *given, "data.format=image_folder"), runs, {}) == {"source": made}
    other = spec(tmp_path, *given, override)
    with pytest.raises(UsageError, match=problem):
        find_run_datasets(other, runs, {}, tmp_path)
    (found,) = row_problems(View(other, tmp_path, {}))
    assert re.search(problem, found.message)


def test_a_recorded_index_needs_no_file_of_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "two", [f"{kind}/{number}.jpg" for kind in "ab" for number in range(8)])
    (tmp_path / "names.txt").write_text("a\nb\n")
    run = spec(tmp_path, f"data.source={tmp_path / 'two'}", f"data.images.classes={tmp_path / 'names.txt'}")
    made = prepare_run_datasets(run, tmp_path / "runs", {}, 1, ignore)
    (tmp_path / "names.txt").unlink()
    with pytest.raises(UsageError, match=r"names\.txt cannot be read"):
        find_run_datasets(run, tmp_path / "runs", {})
    assert find_run_datasets(run, tmp_path / "runs", made) == made
    assert prepare_run_datasets(run, tmp_path / "runs", made, 1, ignore) == made
    assert len(list(class_file_problems(View(run, tmp_path, {})))) == 1
    assert list(class_file_problems(View(run, tmp_path, {}, prepared=("source",)))) == []


@pytest.mark.parametrize(
    ("override", "document", "problem"),
    [
        ("model.num_labels=4", {"num_classes": 5}, "have 5 classes"),
        ("model.num_labels=5", {"num_classes": 5}, ""),
        ("training.objective=regression", {"target_size": 3}, "have 3 numbers"),
        ("training.loss=bce", {"num_classes": 4, "settings": {"targets": "classes"}}, "have 4 classes"),
        ("evaluation.every=5", {"validation_samples": 7, "train_samples": 15}, "too small to validate on"),
        ("evaluation.every=5", {"validation_samples": 7, "train_samples": 16}, ""),
        ("evaluation.every=5", {"validation_samples": 8, "train_samples": 9}, ""),
        ("evaluation.every=0", {"validation_samples": 0, "train_samples": 9}, ""),
    ],
)
def test_prepared_images_that_a_run_cannot_use_are_refused_before_the_queue(
    override: str, document: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / "datasets/d"
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps(document))
    entries = [{"source": "source", "folder": "d"}]
    if not problem:
        require_usable(spec(tmp_path, override), tmp_path, entries)
        return
    with pytest.raises(UsageError, match=problem):
        require_usable(spec(tmp_path, override), tmp_path, entries)


def test_prepare_prints_the_counts_and_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "shards", [f"{kind}/{number}.jpg" for kind in "ab" for number in range(8)])
    (tmp_path / "shards/a/bad.jpg").write_bytes(b"no image")
    (tmp_path / "run.yaml").write_text(SPEC)
    command = ["data", "prepare", "run.yaml", "--json", "--workers", "1"]
    environment = {"SCALETRAIN_RUNS": str(tmp_path / "runs"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd())}
    refused = scaletrain(*command, environment=environment, folder=tmp_path)
    assert refused.returncode == 2
    assert "a/bad.jpg: the image cannot be decoded" in refused.stdout
    done = scaletrain(*command, "--set", "data.on_bad=skip", environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer: Any = json.loads(done.stdout)
    assert answer["train_samples"] + answer["validation_samples"] == 16
    assert answer["bad_samples"] == 1
    assert answer["sources"][0]["num_classes"] == 2
    assert (Path(answer["path"]) / "dataset.json").is_file()


@pytest.mark.parametrize(
    ("source", "problem"),
    [("absent", "names no file"), ("empty", "has no file of the format"), ("six", r"have 6 classes, and model\.num")],
)
def test_a_source_that_cannot_be_used_is_found_before_a_run(source: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "six", [f"{kind}/1.jpg" for kind in "abcdef"])
    write_folder(tmp_path / "five", [f"{kind}/1.jpg" for kind in "abcde"])
    view = View(spec(tmp_path, f"data.source={tmp_path / source}"), tmp_path, {})
    (found,) = row_problems(view)
    assert found.key == "data.source"
    assert re.search(problem, found.message)
    good = View(spec(tmp_path, f"data.source={tmp_path / 'five'}"), tmp_path, {})
    assert list(row_problems(good)) == []
