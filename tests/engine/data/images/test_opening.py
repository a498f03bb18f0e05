import dataclasses
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.images.reading import IndexedImages, open_images
from scaletrain_cli.engine.data import splits
from scaletrain_cli.engine.data.images.opening import ImageSamples
from scaletrain_cli.launch.submit import create_run
from tests.data.images.pictures import index, write_folder
from tests.engine.data.images.pictures import layout, reader
from tests.launch.conftest import make_plan, make_spec

CLASSES, EACH = 8, 25


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> IndexedImages:
    """A split whose files are in the order of their classes."""
    root = tmp_path_factory.mktemp("sorted")
    write_folder(root / "images", [f"{name}/{each}.png" for name in "abcdefgh" for each in range(EACH)])
    train = open_images(index(root / "images", root / "runs"))["train"]
    labels = [train.label(number) for number in range(len(train))]
    assert labels == [number // EACH for number in range(CLASSES * EACH)]
    return train


def labels_of(samples: Any) -> list[int]:
    return [samples.read(number).label for number in range(len(samples))]


def test_an_order_of_samples_has_each_file_once_and_is_the_same_in_another_process(images: IndexedImages) -> None:
    samples = ImageSamples(images, 0, len(images))
    places = [samples.read(number).place for number in range(len(samples))]
    assert sorted(places) == sorted(images.read(number).place for number in range(len(images)))
    assert all(Path(place).is_file() for place in places)
    copy = pickle.loads(pickle.dumps(samples.part(10, 30)))
    assert [copy.read(number).place for number in range(30)] == places[10:40]
    with pytest.raises(IndexError):
        copy.read(30)


def test_samples_that_are_held_back_for_validation_are_of_many_classes(images: IndexedImages) -> None:
    spec = make_spec("training.global_batch_size=16")
    made = create_run(spec, make_plan(spec), "r1")
    fitted = dataclasses.replace(made.record.plan, layout=layout(16, 2, 4))
    record = dataclasses.replace(made.record, plan=fitted)
    samples = ImageSamples(images, 0, len(images))
    rest = len(samples) - splits.sequences_held_back(made.run, record, len(samples), 0)
    train, validation = samples.part(0, rest), samples.part(rest, len(samples) - rest)
    assert (len(train), len(validation)) == (184, 16)
    kept, held = Counter(labels_of(train)), Counter(labels_of(validation))
    assert kept + held == Counter(dict.fromkeys(range(CLASSES), EACH))
    assert len(kept) == CLASSES
    assert len(held) >= 6
    assert max(held.values()) <= 5


def test_an_evaluation_of_a_part_of_a_split_has_its_classes_in_proportion(images: IndexedImages) -> None:
    samples, at = ImageSamples(images, 0, len(images)), layout(16, 2, 4)
    found: Counter[int] = Counter()
    for rank in range(2):
        for micro in reader(samples, at=at, rank=rank, size=8).in_order(64):
            found.update(micro.targets.tolist())
            assert micro.targets.tolist() == [samples.read(number).label for number in micro.numbers.tolist()]
    assert sum(found.values()) == 64
    assert set(found) == set(range(CLASSES))
    # A random draw of 64 of 200: 8 of each class on average, with a standard deviation of 2.2.
    assert all(8 - 3 * 2.2 < count < 8 + 3 * 2.2 for count in found.values()), found
