import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.decode import BadImageError, decode
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.mixture import Stage
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch, ImageStepBatch
from scaletrain_cli.engine.data.images.mixing import finish
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.data.reader_processes import _portable_error
from scaletrain_cli.engine.data.sample_order import SampleOrder, sample_at
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec.images import AugmentSpec
from tests.data.images.pictures import image_bytes, index, write_folder, write_shards, write_table
from tests.engine.data.images.pictures import CLASSES, Pictures, layout, noted, reader
from tests.engine.data.test_loader import wait_for_start

CPU = torch.device("cpu")
LAYOUTS = [layout(12), layout(12, 1, 4), layout(12, 2, 6), layout(12, 2, 2), layout(12, 3, 4), layout(12, 3, 2)]


def by_sample(batches: list[ImageStepBatch]) -> dict[int, dict[str, Any]]:
    """Return the parts of each sample of a global batch by its number in the run."""
    found: dict[int, dict[str, Any]] = {}
    for micro in (micro for batch in batches for micro in batch.micro_batches()):
        size = len(micro.samples)
        for row, sample in enumerate(micro.samples.tolist()):
            parts = {name: part for name, part in micro._asdict().items() if part is not None}
            views = {name: parts.pop(name).unflatten(0, (-1, size))[:, row] for name in ("images", "erased")}
            assert sample not in found
            found[sample] = {**views, **{name: part[row] for name, part in parts.items()}}
    return found


def whole(number: int, at: Layout, **settings: Any) -> dict[int, dict[str, Any]]:
    ranks = range(at.data_parallel)
    return by_sample([reader(at=at, rank=rank, **settings).batch(number) for rank in ranks])


def assert_equal(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
        assert first.dtype == second.dtype
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_equal(first[name], second[name])
    else:
        assert_equal(dict(enumerate(first)), dict(enumerate(second)))


def assert_same_batches(first: ImageStepBatch, second: ImageStepBatch) -> None:
    assert_equal(
        {n: p for n, p in first._asdict().items() if p is not None},
        {n: p for n, p in second._asdict().items() if p is not None},
    )


@pytest.mark.parametrize("at", LAYOUTS[1:], ids=lambda at: f"{at.data_parallel} ranks of {at.micro_batch_size}")
def test_every_layout_has_the_same_samples_augmented_and_mixed_alike(at: Layout) -> None:
    for number in (1, 3):
        assert_equal(whole(number, at, views=2), whole(number, LAYOUTS[0], views=2))


def test_the_finished_global_batch_is_the_same_in_every_layout() -> None:
    def finished(at: Layout) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for rank in range(at.data_parallel):
            for micro in reader(at=at, rank=rank).batch(2).micro_batches():
                done = finish(micro, mean=(0.5,) * 3, std=(0.2,) * 3, classes=CLASSES)
                found |= {int(s): (i, t) for s, i, t in zip(done.samples, done.images, done.targets, strict=True)}
        return found

    expected = finished(LAYOUTS[0])
    assert any(0 < float(target.max()) < 1 for _, target in expected.values())  # some are mixed
    for at in LAYOUTS[1:]:
        assert_equal(finished(at), expected)


def test_a_batch_is_read_by_its_number_alone() -> None:
    first = reader()
    read = [first.batch(number) for number in range(1, 6)]
    resumed = pickle.loads(pickle.dumps(reader().without_groups()))
    assert_same_batches(resumed.batch(4), read[3])
    assert_same_batches(first.batch(2), read[1])


def test_an_epoch_has_each_sample_once_and_other_changes_than_the_one_before() -> None:
    source = Pictures(24)
    read = reader(source, augment=AugmentSpec())
    epochs = []
    for numbers in ((1, 2), (3, 4)):
        batches = [read.batch(number) for number in numbers]
        indices = torch.cat([batch.numbers.flatten() for batch in batches if batch.numbers is not None])
        assert sorted(indices.tolist()) == list(range(24))
        images = torch.cat([batch.images.flatten(0, 1) for batch in batches])
        epochs.append((indices.tolist(), {int(index): image for index, image in zip(indices, images, strict=True)}))
    assert epochs[0][0] == [sample_at(place, seed=7, samples=24) for place in range(24)]
    assert epochs[0][0] != epochs[1][0]
    assert not any(torch.equal(epochs[0][1][index], epochs[1][1][index]) for index in range(24))


def test_another_seed_has_another_order_and_other_changes() -> None:
    first, second = reader().batch(1), reader(seed=8).batch(1)
    assert not torch.equal(first.numbers, second.numbers)
    shared = set(first.numbers.flatten().tolist()) & set(second.numbers.flatten().tolist())
    assert shared
    for number in shared:
        places = [int((batch.numbers == number).flatten().nonzero()[0]) for batch in (first, second)]  # type: ignore
        assert not torch.equal(first.images[0, places[0]], second.images[0, places[1]])


def test_pixels_targets_and_numbers_belong_to_the_same_sample() -> None:
    source = Pictures(20, side=16)
    read = reader(source, augment=AugmentSpec(random_resized_crop=None, horizontal_flip=0), size=14)
    batch = read.batch(2)
    for row, number in enumerate(batch.numbers[0].tolist()):
        sample = source.read(number)
        expected = read.transform.evaluation(decode(sample.image, sample.place, 3))
        assert np.array_equal(batch.images[0, row].numpy(), expected)
        assert batch.targets[0, row] == number % CLASSES
    assert batch.mix is None
    assert batch.erased is None
    (micro,) = batch.micro_batches()
    assert micro.images.shape == (12, 3, 14, 14)
    assert micro.images.is_contiguous(memory_format=torch.channels_last)


def test_several_sources_are_mixed_and_each_has_its_own_epochs() -> None:
    sources = Pictures(8, "a.tar"), Pictures(30, "bb.tar")
    order = SampleOrder(7, (8, 30), (Stage(0, (0.5, 0.5)),))
    batches = [reader(*sources, order=order, augment=AugmentSpec()).batch(number) for number in range(1, 5)]
    seen: dict[int, list[tuple[int, torch.Tensor]]] = {0: [], 1: []}
    for batch in batches:
        for source, number, image in zip(
            batch.sources.flatten(), batch.numbers.flatten(), batch.images.flatten(0, 1), strict=True
        ):
            seen[int(source)].append((int(number), image))
    assert [number for number, _ in seen[0]] == [sample_at(place, seed=7, samples=8) for place in range(24)]
    assert all(8 <= number < 38 for number, _ in seen[1])
    first, second = dict(seen[0][:8]), dict(seen[0][8:16])
    assert not any(torch.equal(first[number], second[number]) for number in range(8))
    # A source keeps its changes when another one is added.
    alone = by_sample_number(reader(sources[0], augment=AugmentSpec()).batch(1))
    assert all(torch.equal(alone[number], first[number]) for number in first)


def by_sample_number(batch: ImageStepBatch) -> dict[int, torch.Tensor]:
    """Return the first image of each sample of a batch."""
    found: dict[int, torch.Tensor] = {}
    for number, image in zip(batch.numbers.flatten().tolist(), batch.images.flatten(0, 1), strict=True):
        found.setdefault(number, image)
    return found


def test_views_of_an_image_are_changed_independently_and_follow_each_other() -> None:
    two, one = reader(views=2).batch(1), reader(views=1).batch(1)
    assert two.images.shape == (1, 24, 16, 16, 3)
    assert torch.equal(two.images[:, :12], one.images)
    assert not any(torch.equal(two.images[0, row], two.images[0, 12 + row]) for row in range(12))
    assert two.targets.shape == (1, 12)


def test_numbers_as_labels_become_float_targets() -> None:
    class Numbers(Pictures):
        def read(self, index: int) -> Any:
            return super().read(index)._replace(label=(0.5 * index, 1.0))

    batch = reader(Numbers()).batch(1)
    assert batch.targets.dtype == torch.float32
    assert torch.equal(batch.targets[0, :, 0], 0.5 * batch.numbers[0])


@pytest.mark.parametrize("count", [12, 17])
@pytest.mark.parametrize("at", LAYOUTS, ids=lambda at: f"{at.data_parallel} ranks of {at.micro_batch_size}")
def test_an_evaluation_reads_the_first_samples_in_order_without_random_changes(at: Layout, count: int) -> None:
    source = Pictures(20)
    rounds = [list(reader(source, at=at, rank=rank).in_order(count)) for rank in range(at.data_parallel)]
    assert len({len(each) for each in rounds}) == 1
    real: list[int] = []
    for micro in (micro for each in zip(*rounds, strict=True) for micro in each):
        assert micro.mix is None
        assert micro.erased is None
        assert micro.images.shape[0] == at.micro_batch_size
        counts = torch.ones(len(micro.samples), dtype=torch.bool) if micro.real is None else micro.real
        real += micro.numbers[counts].tolist()
        read = reader(source)
        for image, number in zip(micro.images, micro.numbers.tolist(), strict=True):
            sample = source.read(number)
            expected = read.transform.evaluation(decode(sample.image, "", 3))
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
    assert real == list(range(count))


def test_rounds_of_an_evaluation_are_read_by_their_numbers() -> None:
    read = reader(at=layout(12, 1, 4))
    expected = list(read.in_order(17))
    assert read.rounds(17) == len(expected) == 5
    for number in (5, 1, 3):
        (micro,) = read.round(number, 17).micro_batches()
        assert isinstance(micro, ImageMicroBatch)
        assert torch.equal(micro.images, expected[number - 1].images)


def test_a_bad_image_ends_the_read_and_is_named_with_its_place() -> None:
    read = reader(Pictures(12, "shard-3.tar", bad=5))
    with pytest.raises(BadImageError, match=r"^batch 1: shard-3\.tar:5\.png: the image cannot be decoded") as bad:
        read.batch(1)
    assert bad.value.evidence["batch"] == 1
    assert "scaletrain resume RUN --set 'data.skip=[[1, 1]]'" in str(bad.value)


@pytest.mark.parametrize("part", ["label", "caption"])
def test_a_sample_without_what_the_batch_needs_is_named_with_its_place(part: str) -> None:
    class Without(Pictures):
        def read(self, index: int) -> Any:
            return super().read(index)._replace(**{part: None})

    read = reader(Without(), captions=object() if part == "caption" else None)
    with pytest.raises(CorruptDataError, match=rf"a\.tar:\d+\.png: it has no {part}"):
        read.batch(1)
    assert reader(Without(), labeled=part != "label").batch(1).targets is None or part == "caption"


def test_mixing_needs_even_micro_batches() -> None:
    with pytest.raises(UsageError, match=r"training\.micro_batch_size = 3"):
        reader(at=layout(12, 2, 3))
    reader(at=layout(12, 2, 3), augment=AugmentSpec())


@pytest.fixture
def loaders() -> Iterator[list[Loader[Any]]]:
    opened: list[Loader[Any]] = []
    yield opened
    for each in opened:
        each.close()


@pytest.mark.process
@pytest.mark.parametrize(  # tests/engine/data/test_loader.py has several processes with other batches
    "workers", [1, *(pytest.param(workers, marks=pytest.mark.long) for workers in (2, 4))]
)
def test_reader_processes_read_the_same_bytes_once(workers: int, loaders: list[Loader[Any]], tmp_path: Path) -> None:
    read, reads = reader().without_groups(), tmp_path / "reads"
    loader = Loader(partial(noted, reads, read.batch), CPU, workers=workers)
    loaders.append(loader)
    wait_for_start(loader)
    reads.unlink()
    for number in range(1, 12):
        assert_same_batches(loader.take(number, range(number + 1, number + 5)), read.batch(number))
    by = [tuple(map(int, line.split())) for line in reads.read_text(encoding="utf-8").splitlines()]
    assert sorted(number for _, number in by if number < 12) == list(range(1, 12))
    assert {process for process, _ in by} <= set(loader._processes.pids)
    for number in (20, 5):
        assert_same_batches(loader.take(number, [number + 1]), read.batch(number))


def test_the_error_of_a_bad_image_comes_whole_from_a_reader_process() -> None:
    error = BadImageError("shard-3.tar:5.png", "truncated")
    found, _ = pickle.loads(_portable_error(error, ""))
    assert isinstance(found, BadImageError)
    assert str(found) == str(error)
    assert found.evidence == error.evidence


def test_a_reader_holds_the_batches_read_ahead_alone(loaders: list[Loader[Any]]) -> None:
    read: ImageBatchReader = reader(at=layout(4), augment=AugmentSpec(), size=8)
    made: list[weakref.ref[Any]] = []
    ahead = 2

    def batch(number: int) -> ImageStepBatch:
        found = read.batch(number)
        made.append(weakref.ref(found.images))
        return found

    loader = Loader(batch, CPU)
    loaders.append(loader)
    gc.collect()  # what is garbage now would never be freed
    gc.freeze()  # what exists already is not searched 30 times
    for number in range(1, 31):
        taken = loader.take(number, range(number + 1, number + 1 + ahead))
        gc.collect()
        assert taken.images is not None
        assert sum(held() is not None for held in list(made)) <= 1 + ahead
    assert len(made) >= 30


def write_folder_of_classes(folder: Path) -> Path:
    write_folder(folder, [f"{name}/{number}.png" for name in ("ant", "bee", "cat") for number in range(6)])
    return folder


def write_rows(path: Path) -> Path:
    images = [{"bytes": image_bytes(row), "path": None} for row in range(18)]
    write_table(path, {"image": images, "label": [row % 4 for row in range(18)], "caption": list(map(str, range(18)))})
    return path


@pytest.mark.parametrize("kind", ["folder", "shards", "table"])
def test_every_format_is_read_as_its_source_has_it(kind: str, tmp_path: Path) -> None:
    captions = kind in ("shards", "table")
    settings = ImageSettings(captions=captions, validation_share=0.0)
    source: Any = {
        "folder": lambda: write_folder_of_classes(tmp_path / "folder"),
        "shards": lambda: write_shards(tmp_path / "shards", 3, 6),
        "table": lambda: write_rows(tmp_path / "table.parquet"),
    }[kind]()
    train = open_images(index(source, tmp_path / "runs", settings))["train"]
    read = reader(train, size=8, augment=AugmentSpec(random_resized_crop=None, horizontal_flip=0))
    batch = pickle.loads(pickle.dumps(read)).batch(1)
    for row, number in enumerate(batch.numbers[0].tolist()):
        sample = train.read(number)
        expected = read.transform.evaluation(decode(sample.image, sample.place, 3))
        assert np.array_equal(batch.images[0, row].numpy(), expected)
        assert batch.targets[0, row] == sample.label
    assert len(set(batch.numbers[0].tolist())) == 12
    augmented = reader(train, size=8)
    assert_same_batches(pickle.loads(pickle.dumps(augmented)).batch(2), augmented.batch(2))


def test_images_of_a_model_are_gray_or_rgb() -> None:
    with pytest.raises(UsageError, match=r"model\.num_channels = 4"):
        reader(channels=4)


def test_digits_have_the_pixels_of_scikit_learn(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    train = open_images(index("sklearn-digits", tmp_path, ImageSettings(validation_share=0.0)))["train"]
    plain = AugmentSpec(random_resized_crop=None, horizontal_flip=0)
    read = reader(train, channels=1, size=8, augment=plain)
    read = replace(read, transform=replace(read.transform, crop_ratio=1.0))
    batch, digits = read.batch(1), datasets.load_digits()
    shades = np.stack([digits.images[number] for number in batch.numbers[0].tolist()])
    found = batch.images[0, ..., 0].numpy().astype(float)
    assert np.corrcoef(found.ravel(), shades.ravel())[0, 1] > 0.999
    assert batch.targets[0].tolist() == [digits.target[number] for number in batch.numbers[0].tolist()]
