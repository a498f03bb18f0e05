"""Samples of an index are those that other libraries read from the same source, in any order, with their labels."""

import os
import pickle
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrain_cli.data.images import listing
from scaletrain_cli.data.images.index import find_indexed
from scaletrain_cli.data.images.listing import list_source
from scaletrain_cli.data.images.reading import IndexedImages, open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.sources.places import RemoteFile
from scaletrain_cli.data.sources.stores import PlaceError
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import splits_by_folder
from tests.data.images.pictures import image_bytes, index, write_folder, write_shard, write_shards, write_table


def train(folder: Path) -> IndexedImages:
    return open_images(folder)["train"]


def test_samples_of_shards_are_those_that_tarfile_reads(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "shards", 3, 4)
    expected: dict[str, dict[str, bytes]] = {}
    for shard in sorted(source.iterdir()):
        with tarfile.open(shard) as archive:
            for member in archive:
                content = archive.extractfile(member)
                key, _, suffix = member.name.partition(".")
                expected.setdefault(key, {})[suffix] = content.read()
    samples = train(index(source, tmp_path / "runs", ImageSettings(captions=True, validation_share=0.0)))
    assert len(samples) == len(expected) == 12
    for place in (7, 0, 11, 3, 3):
        sample = samples.read(place)
        parts = list(expected.values())[place]
        assert sample.key == list(expected)[place]
        assert sample.image == parts["jpg"]
        assert sample.label == int(parts["cls"])
        assert sample.caption == parts["txt"].decode().strip()
        assert sample.place == f"{source}/part-{place // 4:04d}.tar:{sample.key}.jpg"


def test_members_are_grouped_as_in_a_webdataset(tmp_path: Path) -> None:
    picture = image_bytes(0)
    members = [
        ("__meta__", b"of the shard"),
        ("a.b/one.JPG", picture),
        ("a.b/one.seg.PNG", b"another suffix"),
        ("a.b/one.cls", b"1"),
        ("a.b/two.cls", b"2"),
        ("a.b/two.png", image_bytes(1, "PNG")),
        ("a.b/one.jpg", image_bytes(2)),  # not adjacent: another sample
        ("a.b/one.cls", b"3"),
        ("a.b/.hidden.jpg", picture),
        ("no-suffix", picture),
    ]
    samples = train(index(write_shard(tmp_path / "a.tar", members), tmp_path / "runs"))
    assert [(samples.read(n).key, samples.read(n).label) for n in range(len(samples))] == [
        ("a.b/one", 1),
        ("a.b/two", 2),
        ("a.b/one", 3),
    ]
    assert samples.read(0).image == picture
    assert samples.read(0).place.endswith("a.tar:a.b/one.JPG")


def test_braces_and_wildcards_name_shards_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "shards", 3, 2)
    assert len(train(index(source / "part-{0000..0002}.tar", tmp_path / "runs"))) == 6
    assert len(train(index(source / "part-{0002,0000}.tar", tmp_path / "runs"))) == 4
    assert len(train(index(source / "*-000[01].tar", tmp_path / "runs"))) == 4
    with pytest.raises(UsageError, match=r"part-0003\.tar names no file"):
        index(source / "part-{0000..0003}.tar", tmp_path / "runs")


def test_a_folder_has_the_classes_that_the_datasets_library_finds(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = [
        f"{split}/{kind}/{number}.png" for split in ("train", "val") for kind in ("dog", "ant") for number in (1, 2)
    ]
    write_folder(tmp_path / "pictures", names)
    opened = open_images(index(tmp_path / "pictures", tmp_path / "runs"))
    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "pictures"), cache_dir=str(tmp_path / "cache")
    )
    theirs = theirs.cast_column("image", datasets.Image(decode=False))
    assert opened["train"].class_names == tuple(theirs["train"].features["label"].names) == ("ant", "dog")
    for split in ("train", "validation"):
        expected = {Path(row["image"]["path"]).read_bytes(): row["label"] for row in theirs[split]}
        found = [opened[split].read(number) for number in range(len(opened[split]))]
        assert {sample.image: sample.label for sample in found} == expected
        assert len(found) == 4


def test_folders_are_walked_with_links_and_without_hidden_files(tmp_path: Path) -> None:
    contents = write_folder(
        tmp_path / "pictures", ["cat/deep/er/1.jpg", "cat/2.JPEG", "dog/3.png", ".git/4.jpg", "dog/.5.jpg", "_/6.webp"]
    )
    elsewhere = write_folder(tmp_path / "elsewhere", ["7.jpg"])
    (tmp_path / "pictures/emu").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "pictures/dog/8.jpg").symlink_to(tmp_path / "elsewhere/7.jpg")
    (tmp_path / "pictures/dog/around").symlink_to(tmp_path / "pictures")
    (tmp_path / "pictures/dog/readme.md").write_text("not an image")
    samples = train(index(tmp_path / "pictures", tmp_path / "runs"))
    found = {sample.key: sample for sample in map(samples.read, range(len(samples)))}
    assert samples.class_names == ("_", "cat", "dog", "emu")
    assert {key: samples.class_names[int(found[key].label)] for key in found} == {  # type: ignore[arg-type]
        "_/6.webp": "_",
        "cat/2.JPEG": "cat",
        "cat/deep/er/1.jpg": "cat",
        "dog/3.png": "dog",
        "dog/8.jpg": "dog",
        "emu/7.jpg": "emu",
    }
    assert found["cat/deep/er/1.jpg"].image == contents["cat/deep/er/1.jpg"]
    assert found["dog/8.jpg"].image == found["emu/7.jpg"].image == elsewhere["7.jpg"]
    assert samples.document["left_out"] == {".md": 1}


def test_files_beside_an_image_describe_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "pictures", ["a.jpg", "sub/b.jpg"])
    (tmp_path / "pictures/a.txt").write_text("the first")
    (tmp_path / "pictures/sub/b.txt").write_text("the second")
    settings = ImageSettings(targets="none", captions=True, validation_share=0.0)
    samples = train(index(tmp_path / "pictures", tmp_path / "runs", settings))
    assert [samples.read(number).caption for number in (0, 1)] == ["the first", "the second"]
    (tmp_path / "pictures/a.txt").write_text("another")
    assert find_indexed(str(tmp_path / "pictures"), settings, tmp_path / "runs") is None
    samples = train(index(tmp_path / "pictures", tmp_path / "runs", settings))
    assert samples.read(0).caption == "another"


def test_rows_of_parquet_are_those_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
            "text": datasets.Value("string"),
        }
    )
    rows = [
        {"image": {"bytes": image_bytes(n), "path": f"{n}.jpg"}, "label": n % 3, "text": f"caption {n}"}
        for n in range(10)
    ]
    theirs = datasets.Dataset.from_list(rows, features=features)
    (tmp_path / "data").mkdir()
    theirs.to_parquet(str(tmp_path / "data/all-00000-of-00001.parquet"), batch_size=3)
    samples = train(index(tmp_path / "data", tmp_path / "runs", ImageSettings(captions=True, validation_share=0.0)))
    assert samples.class_names == ("ant", "bee", "cat")
    for number in (9, 0, 4, 3, 9):
        sample, row = samples.read(number), theirs[number]
        assert (sample.image, sample.label, sample.caption) == (row["image"]["bytes"], row["label"], row["text"])
    assert samples.read(4).place == f"{tmp_path}/data/all-00000-of-00001.parquet, row 5"


def test_a_column_of_bytes_and_own_names_are_read(tmp_path: Path) -> None:
    images = [image_bytes(n) for n in range(4)]
    write_table(tmp_path / "a.parquet", {"photo": images, "kind": ["b", "a", "b", "a"], "said": list("wxyz")})
    (tmp_path / "classes.txt").write_text("a\nb\n")
    settings = ImageSettings(
        image="photo", label="kind", caption="said", captions=True, class_names=("a", "b"), validation_share=0.0
    )
    samples = train(index(tmp_path / "a.parquet", tmp_path / "runs", settings))
    found = [samples.read(number) for number in range(4)]
    assert [sample.image for sample in found] == images
    assert [(sample.label, sample.caption) for sample in found] == [(1, "w"), (0, "x"), (1, "y"), (0, "z")]


@pytest.mark.parametrize("format", ["shards", "table"])
def test_targets_of_several_classes_and_of_numbers(format: str, tmp_path: Path) -> None:
    source = write_shards(tmp_path / "shards", 2, 4)
    fields = {"classes": "json:classes", "numbers": "json:numbers"}
    if format == "table":
        columns = {
            "image": [image_bytes(n) for n in range(8)],
            "classes": [[n % 3, 3] for n in range(8)],
            "numbers": [[n / 4, -1.0] for n in range(8)],
        }
        source = write_table(tmp_path / "a.parquet", columns)
        fields = {"classes": "classes", "numbers": "numbers"}
    several = ImageSettings(targets="classes", label=fields["classes"], validation_share=0.0)
    samples = train(index(source, tmp_path / "runs", several))
    assert samples.num_classes == 4
    for number in (5, 0, 7):
        expected = [0.0] * 4
        expected[number % 3] = expected[3] = 1.0
        assert samples.read(number).label == samples.label(number) == tuple(expected)
    numbers = ImageSettings(targets="numbers", label=fields["numbers"], validation_share=0.0)
    samples = train(index(source, tmp_path / "runs", numbers))
    assert [samples.read(number).label for number in range(8)] == [(n / 4, -1.0) for n in range(8)]
    assert samples.document["target_size"] == 2


def test_the_digits_of_scikit_learn_are_an_embedded_source(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    from scaletrain_cli.data.images.decode import decode

    digits = datasets.load_digits()
    opened = open_images(index("sklearn-digits", tmp_path, ImageSettings(captions=True, validation_share=0.2)))
    found: dict[str, Any] = {}
    for samples in opened.values():
        found |= {sample.key: sample for sample in map(samples.read, range(len(samples)))}
    assert len(found) == sum(map(len, opened.values())) == 1797
    for number in (0, 5, 1796):
        sample = found[f"digit-{number:04d}"]
        pixels = np.asarray(decode(sample.image, sample.place, 1))
        assert np.array_equal(pixels, np.rint(digits.images[number] * 255 / 16))
        assert sample.label == digits.target[number]
    assert found["digit-0000"].caption == "a handwritten zero"
    assert 0.15 < len(opened["validation"]) / 1797 < 0.25


def test_the_embedded_source_names_the_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="requires scikit-learn") as caught:
        index("sklearn-digits", tmp_path)
    assert caught.value.reason.remedies == ("Run: pip install scikit-learn",)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-0.tar", "validation-0.tar", "test-0.tar"], (1, 1)),
        (["train/0.tar", "val/0.tar", "val/1.tar"], (1, 2)),
        (["train-0.tar", "test-0.tar"], (1, 0)),  # drawn from the training data, here none
        (["cc3m-train-0.tar", "cc3m-val-0.tar", "cc3m_test.tar"], (1, 1)),
        (["sets/a.train.0.tar", "sets/a.dev2017.0.tar"], (1, 1)),
        (["train/part-0.tar", "train/part-1.tar", "valid/part-0.tar"], (2, 1)),
        (["cc3m-val-0.tar", "cc3m-val-1.tar"], (2, 0)),  # all of them are given
        (["trainable-0.tar", "contest-0.tar"], (2, 0)),
    ],
)
def test_names_of_shards_say_their_split(names: list[str], splits: tuple[int, int], tmp_path: Path) -> None:
    for seed, name in enumerate(names):
        write_shard(tmp_path / "data" / name, [(f"{seed}.jpg", image_bytes(seed)), (f"{seed}.cls", b"0")])
    opened = open_images(index(tmp_path / "data", tmp_path / "runs"))
    assert (len(opened["train"]), len(opened["validation"])) == splits


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a-0.tar", "validation-0.tar"], r"validation-0\.tar names the validation split and a-0\.tar names none"),
        (["cc3m-0.tar", "cc3m-val-0.tar"], r"cc3m-val-0\.tar names the validation split and cc3m-0\.tar names none"),
        (["test-0.tar", "val-0.tar"], "none of a training split"),
        (["train-and-val.tar", "train.tar"], r"train-and-val\.tar names several splits: train"),
        (["train/a/0.jpg", "val/a/0.jpg", "more/a/0.jpg"], r"more/a/0\.jpg lies in neither"),
    ],
)
def test_files_with_and_without_a_split_are_refused(names: list[str], problem: str, tmp_path: Path) -> None:
    for seed, name in enumerate(names):
        write_shard(tmp_path / "data" / name, [(f"{seed}.jpg", image_bytes(seed)), (f"{seed}.cls", b"0")])
    with pytest.raises(UsageError, match=problem):
        index(tmp_path / "data", tmp_path / "runs")


def test_folders_whose_names_contain_a_split_are_classes_unless_one_is_for_validation() -> None:
    assert splits_by_folder({"imagenet-train", "imagenet-val"})
    assert splits_by_folder({"train", "test"})
    assert not splits_by_folder({"bullet-train", "freight-train"})
    assert not splits_by_folder({"train", "bus"})


def test_with_several_classes_per_image_a_folder_is_a_list_of_one_class_unless_files_have_lists(tmp_path: Path) -> None:
    settings = ImageSettings(targets="classes", validation_share=0.0)
    write_folder(tmp_path / "data", ["ant/0.jpg", "bee/0.jpg"])
    samples = train(index(tmp_path / "data", tmp_path / "runs", settings))
    assert [samples.read(number).label for number in range(2)] == [(1.0, 0.0), (0.0, 1.0)]
    for name, classes in (("ant", "[0, 2]"), ("bee", "[1]")):
        (tmp_path / "data" / name / "0.cls").write_text(classes)
    samples = train(index(tmp_path / "data", tmp_path / "runs", settings))
    assert [samples.read(number).label for number in range(2)] == [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0)]


def test_folders_have_no_targets_of_numbers(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", ["ant/0.jpg"])
    settings = ImageSettings(targets="numbers", validation_share=0.0)
    with pytest.raises(UsageError, match="no file with the numbers of a target beside its images"):
        index(tmp_path / "data", tmp_path / "runs", settings)
    (tmp_path / "data/ant/0.cls").write_text("[1.5, 2]")
    assert train(index(tmp_path / "data", tmp_path / "runs", settings)).read(0).label == (1.5, 2.0)


def test_a_split_by_hash_depends_on_the_key_alone(tmp_path: Path) -> None:
    settings = ImageSettings(validation_share=0.3)
    opened = open_images(index(write_shards(tmp_path / "a", 1, 40), tmp_path / "runs", settings))
    more = open_images(index(write_shards(tmp_path / "b", 2, 40), tmp_path / "runs", settings))
    keys = [{each.read(n).key for n in range(len(each))} for each in (opened["validation"], more["validation"])]
    assert 4 < len(keys[0]) < 20
    assert keys[0] == {key for key in keys[1] if key.startswith("0000")}


def test_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    samples = train(index(write_shards(tmp_path / "a", 1, 4), tmp_path / "runs"))
    samples.read(0)
    copy = pickle.loads(pickle.dumps(samples))
    assert copy.read(3) == samples.read(3)
    child = os.fork()
    if not child:
        os._exit(0 if samples.read(2).key == "000000002" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert samples.read(1).key == "000000001"


def test_mixed_compressed_and_missing_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="images in folders, tar shards"):
        index(tmp_path / "empty", tmp_path / "runs")
    with pytest.raises(UsageError, match="names no file"):
        index(tmp_path / "absent", tmp_path / "runs")
    (tmp_path / "empty/a.tar.gz").write_bytes(b"")
    with pytest.raises(UsageError, match="is compressed"):
        index(tmp_path / "empty", tmp_path / "runs")
    write_shards(tmp_path / "mixed", 1, 2)
    write_folder(tmp_path / "mixed", ["cat/a.jpg"])
    with pytest.raises(UsageError, match="1 of image_folder, 1 of webdataset"):
        index(tmp_path / "mixed", tmp_path / "runs")
    assert (
        len(train(index(tmp_path / "mixed", tmp_path / "runs", ImageSettings("webdataset", validation_share=0)))) == 2
    )


def test_shards_of_a_web_server_are_asked_for_together_and_stay_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    lock, most, now = threading.Lock(), 0, 0

    def answer(path: str, seconds: float | None) -> list[RemoteFile]:
        nonlocal most, now
        number = int(path[-6:-4])
        with lock:
            now += 1
            most = max(most, now)
            asked.append(number)
        # Long enough after the one that is missing for the caller to learn of it before all have been asked.
        time.sleep(0.2 if "missing" in path and number > 3 else 0.001 * (number % 7))
        with lock:
            now -= 1
        if "missing" in path and number == 3:
            raise PlaceError(Reason("remote.not-found", {"path": path}))
        return [RemoteFile(path, 10 + number, f"etag {number}")]

    monkeypatch.setattr(listing, "list_files", answer)
    found = list_source("https://host/part-{00..79}.tar", ImageSettings())
    assert [file.size for file, _ in found.shards] == [10 + number for number in range(80)]
    assert sorted(asked) == list(range(80))
    assert 1 < most <= 16
    asked.clear()
    with pytest.raises(PlaceError, match=r"data\.source: https://host/missing-03\.tar does not exist"):
        list_source("https://host/missing-{00..79}.tar", ImageSettings())
    assert len(asked) < 80
