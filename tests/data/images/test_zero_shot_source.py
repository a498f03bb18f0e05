from pathlib import Path

import pytest

from scaletrain_cli.data.commands import prepare_images
from scaletrain_cli.data.images.compatibility import zero_shot_classes, zero_shot_settings
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.prepared import find_run_datasets, prepare_run_datasets
from scaletrain_cli.engine.data.stats import datasets_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.dataset_checks import require_usable
from scaletrain_cli.launch.resource_checks.files import not_checked
from scaletrain_cli.launch.resource_checks.images import zero_shot_problems
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import entries_of, read_entries, record_datasets, recorded_folders
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from tests.data.images.pictures import index, write_folder, write_shards
from tests.data.texts import ignore

SPEC = """\
schema: scaletrain/v1
name: pairs
model: {family: clip, preset: clip-vit-base-patch32}
data: {source: shards, tokenizer: {kind: file, path: tokenizer.json}}
training: {global_batch_size: 8, micro_batch_size: 8, steps: 10, precision: fp32}
evaluation: {zero_shot: {source: pictures}}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
"""


def spec(folder: Path, *overrides: str) -> RunSpec:
    return parse_spec(SPEC, file="run.yaml", base_dir=folder, overrides=(f"data.source={folder}/shards", *overrides))


def source(path: Path) -> str:
    return f"evaluation.zero_shot.source={path}"


def names_in(folder: Path, *names: str) -> str:
    (folder / "names.txt").write_text("\n".join(names), encoding="utf-8")
    return f"evaluation.zero_shot.classes={folder / 'names.txt'}"


def problems(run: RunSpec, folder: Path) -> list[str]:
    return [str(problem) for problem in zero_shot_problems(View(run, folder, {}))]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("b/1.png", "a/1.png", "a/2.png"), ["a/1.png", "a/2.png", "b/1.png"]),
        (("train/a/1.png", "train/b/1.png", "val/b/2.png", "test/a/3.png"), ["b/2.png"]),
        (("train/a/1.png", "train/b/1.png", "test/a/3.png", "test/b/3.png"), ["a/3.png", "b/3.png"]),
    ],
)
def test_images_of_a_held_out_split_are_indexed_alone(names: tuple[str, ...], read: list[str], tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 20)
    write_folder(tmp_path / "pictures", names)
    run, runs = spec(tmp_path, source(tmp_path / "pictures")), tmp_path / "runs"
    assert problems(run, tmp_path) == []
    assert find_run_datasets(run, runs, {}) is None
    made = prepare_run_datasets(run, runs, {}, 1, ignore)
    assert list(made) == ["source", ZERO_SHOT]
    assert find_run_datasets(run, runs, {}) == made
    found = open_images(made[ZERO_SHOT])["train"]
    samples = [found.read(number) for number in range(len(found))]
    assert [sample.key for sample in samples] == read
    classes = zero_shot_classes(run, found.document, made[ZERO_SHOT])
    assert [classes[int(str(sample.label))] for sample in samples] == [key.partition("/")[0] for key in read]
    assert datasets_of(run, runs) == {"source": made["source"]}, "they are not shown as a source of training"
    answer = prepare_images(run, runs, 1)
    assert answer["train_samples"] + answer["validation_samples"] == 20  # of pairs alone
    assert answer["sources"][1]["train_samples"] == len(read)


def test_a_run_keeps_its_images_and_others_are_looked_up_again(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 20)
    write_folder(tmp_path / "pictures", ("a/1.png", "b/1.png"))
    run, runs, note = spec(tmp_path, source(tmp_path / "pictures")), tmp_path / "runs", tmp_path / "datasets.json"
    made = prepare_run_datasets(run, runs, {}, 1, ignore)
    record_datasets(note, entries_of(run, runs, made))
    require_usable(run, runs, entries_of(run, runs, made))
    (tmp_path / "pictures/a/1.png").unlink()
    assert find_run_datasets(run, runs, {}) is None
    assert find_run_datasets(run, runs, recorded_folders(run, runs, read_entries(note))[0]) == made
    other = spec(tmp_path, source(tmp_path / "pictures"), names_in(tmp_path, "cat", "dog"))
    assert list(recorded_folders(other, runs, read_entries(note))[0]) == ["source"]
    without = spec(tmp_path, "evaluation.every=0")
    assert list(prepare_run_datasets(without, runs, {}, 1, ignore)) == ["source"]
    given = spec(tmp_path, source(made[ZERO_SHOT]))
    assert find_run_datasets(given, runs, {}) == made


def test_a_file_names_the_classes_of_folders_in_their_order(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 20)
    write_folder(tmp_path / "pictures", ("n02/1.png", "n01/1.png", "n01/2.png"))
    run = spec(tmp_path, source(tmp_path / "pictures"), names_in(tmp_path, "goldfish", "great white shark"))
    assert problems(run, tmp_path) == []
    made = prepare_run_datasets(run, tmp_path / "runs", {}, 1, ignore)[ZERO_SHOT]
    found = open_images(made)["train"]
    names = zero_shot_classes(run, found.document, made)
    assert [(found.read(n).key, names[int(str(found.read(n).label))]) for n in (0, 2)] == [
        ("n01/1.png", "goldfish"),
        ("n02/1.png", "great white shark"),
    ]
    some = spec(tmp_path, source(tmp_path / "pictures"), names_in(tmp_path, "n01", "shark"))
    with pytest.raises(UsageError, match="has the label 'n02', which is none of the 2 names"):
        prepare_run_datasets(some, tmp_path / "runs", {}, 1, ignore)


def test_an_index_of_other_runs_can_be_given_with_names(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    made = index(write_shards(tmp_path / "shards", 1, 20), runs)  # classes 0 to 4
    without = spec(tmp_path, source(made))
    with pytest.raises(UsageError, match="have no names, which are a part of the prompts"):
        prepare_run_datasets(without, runs, {}, 1, ignore)
    (problem,) = problems(without, tmp_path)
    assert "Set evaluation.zero_shot.classes" in problem
    few = spec(tmp_path, source(made), names_in(tmp_path, "a", "b"))
    (problem,) = problems(few, tmp_path)
    assert "has 2 names, and" in problem
    assert "has 5 classes" in problem
    run = spec(tmp_path, source(made), names_in(tmp_path, *"abcdef"))
    assert problems(run, tmp_path) == []
    assert zero_shot_classes(run, read_document(made / "dataset.json") or {}, made) == list("abcdef")
    captions = prepare_run_datasets(spec(tmp_path, "evaluation.zero_shot=null"), runs, {}, 1, ignore)["source"]
    (problem,) = problems(spec(tmp_path, source(captions)), tmp_path)
    assert "an index of images without one class each" in problem


def test_the_classes_of_an_index_that_is_given_have_the_names_of_the_file(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 20)
    write_folder(tmp_path / "pictures", ("cat/1.png", "red_dog/1.png"))
    runs = tmp_path / "runs"
    made = prepare_run_datasets(spec(tmp_path, source(tmp_path / "pictures")), runs, {}, 1, ignore)[ZERO_SHOT]

    def named(*names: str) -> list[str]:  # in the order of the labels: cat, red_dog
        run = spec(tmp_path, source(made), names_in(tmp_path, *names))
        return zero_shot_classes(run, read_document(made / "dataset.json") or {}, made)

    assert named("red_dog", "cat") == ["cat", "red_dog"]
    assert named("Red dog", "Cat") == ["Cat", "Red dog"]
    assert named("goldfish", "shark") == ["goldfish", "shark"]
    with pytest.raises(UsageError, match=r"names\.txt has no name for the class red_dog"):
        named("cat", "shark")


@pytest.mark.parametrize(
    ("names", "labels"),
    [(("Red-Dog", "Cat"), {"cat": 1, "red_dog": 0}), (("goldfish", "shark"), {"cat": 0, "red_dog": 1})],
)
def test_a_file_names_classes_of_training_alike(names: tuple[str, ...], labels: dict[str, int], tmp_path: Path) -> None:
    write_folder(tmp_path / "pictures", ("cat/1.png", "red_dog/1.png"))
    settings = ImageSettings(class_names=names, validation_share=0.0)
    found = open_images(index(tmp_path / "pictures", tmp_path / "runs", settings))["train"]
    samples = [found.read(number) for number in range(2)]
    assert {sample.key.partition("/")[0]: sample.label for sample in samples} == labels


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("evaluation.zero_shot.source=nowhere",), "/nowhere names no file"),
        (("evaluation.zero_shot.source=shards",), "the classes of shards have no names"),
        (("evaluation.zero_shot.source=flat",), "the classes of flat have no names"),
        (("evaluation.zero_shot.classes=none.txt",), "evaluation.zero_shot.classes = none.txt: "),
        (("evaluation.zero_shot.classes=twice.txt",), "has the name a a second time in line 2"),
    ],
)
def test_problems_are_found_before_a_run_is_queued(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 5)
    write_folder(tmp_path / "pictures", ("a/1.png",))
    write_folder(tmp_path / "flat", ("1.png",))
    (tmp_path / "twice.txt").write_text("a\na\n")
    (problem,) = problems(spec(tmp_path, *overrides), tmp_path)
    assert said in problem
    on_node = View(spec(tmp_path, *overrides), tmp_path, {}, prepared=("source", ZERO_SHOT))
    assert list(zero_shot_problems(on_node)) == []


def test_images_without_names_are_refused_before_they_are_read(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 1, 20)
    run = spec(tmp_path, source(tmp_path / "shards"))
    with pytest.raises(UsageError, match="have no names, which are a part of the prompts"):
        prepare_run_datasets(run, tmp_path / "runs", {}, 1, ignore)
    named = zero_shot_settings(spec(tmp_path, source(tmp_path / "shards"), names_in(tmp_path, *"abcde")))
    assert (named.targets, named.captions, named.class_names) == ("class", False, tuple("abcde"))


def test_paths_that_only_the_nodes_have_are_stated(tmp_path: Path) -> None:
    slurm = "cluster={scheduler: slurm, nodes: 1, gpus_per_node: 1, gpu: a100-sxm-80gb}"
    run = spec(tmp_path, slurm, "evaluation.zero_shot.source=/scratch/a", "evaluation.zero_shot.classes=/scratch/b")
    assert problems(run, tmp_path) == []
    noted = " ".join(map(str, not_checked(View(run, tmp_path, {}))))
    assert "evaluation.zero_shot.source = /scratch/a" in noted
    assert "evaluation.zero_shot.classes = /scratch/b" in noted
