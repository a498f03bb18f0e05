import random
from dataclasses import replace
from pathlib import Path

import pytest

from scaletrain_cli.data.block_cache import BLOCK_BYTES, BlockCache
from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.index import find_indexed
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.sources.places import write_file
from scaletrain_cli.errors import UsageError
from tests.data.images.pictures import files_below, image_bytes, index, write_folder, write_shards, write_table
from tests.data.remote.conftest import BUCKET
from tests.data.remote.faults import FaultyProxy, Request

ROOT = f"s3://{BUCKET}/pictures"
SETTINGS = ImageSettings(captions=True, validation_share=0.2)


def uploaded(folder: Path, root: str = ROOT) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            write_file(f"{root}/{path.relative_to(folder)}", path)
    return root


def breaks_some(request: Request) -> str | None:
    """Break every third request, each time in another way."""
    return ("slow-down", "reset", "short")[request.number // 3 % 3] if request.number % 3 == 0 else None


def test_shards_in_a_store_are_indexed_and_read_at_random_while_requests_fail(s3: FaultyProxy, tmp_path: Path) -> None:
    local = write_shards(tmp_path / "local", 3, 8)
    uploaded(local)
    s3.fault = breaks_some
    dataset = index(f"{ROOT}/part-{{0000..0002}}.tar", tmp_path / "runs", SETTINGS)
    cache = BlockCache(tmp_path / "cache", 2 * BLOCK_BYTES)
    remote = open_images(dataset, cache)
    here = open_images(index(local, tmp_path / "other", SETTINGS))
    order = list(range(len(here["train"]))) * 2
    random.Random(0).shuffle(order)
    for number in order:
        expected, found = here["train"].read(number), remote["train"].read(number)
        assert found == expected._replace(place=expected.place.replace(str(local), ROOT))
    assert {"slow-down", "reset", "short"} <= set(s3.broken)
    assert sum(len(content) for name, content in files_below(cache.folder).items() if "blocks" in name) <= cache.size


def test_rows_in_a_store_are_read_with_errors_injected(s3: FaultyProxy, tmp_path: Path) -> None:
    images = [image_bytes(number) for number in range(20)]
    write_table(tmp_path / "local/train-0.parquet", {"image": images, "label": [n % 4 for n in range(20)]})
    root = uploaded(tmp_path / "local")
    s3.fault = breaks_some
    settings = ImageSettings(validation_share=0.0)
    samples = open_images(index(root, tmp_path / "runs", settings), BlockCache(tmp_path / "cache", 1 << 24))["train"]
    for number in (19, 0, 7, 7, 12):
        found = samples.read(number)
        assert (found.image, found.label) == (images[number], number % 4)
    assert found.place == f"{ROOT}/train-0.parquet, row 13"


def test_a_byte_that_differs_is_read_again_and_a_changed_object_is_an_error(s3: FaultyProxy, tmp_path: Path) -> None:
    uploaded(write_shards(tmp_path / "local", 1, 4))
    samples = open_images(index(ROOT, tmp_path / "runs"), BlockCache(tmp_path / "cache", 1 << 24))["train"]
    good = samples.read(2)
    for kept in (tmp_path / "cache").rglob("blocks/*/*"):  # a fault of the disk
        content = bytearray(kept.read_bytes())
        kept.write_bytes(bytes(len(content)))
    assert samples.read(2) == good
    uploaded(write_shards(tmp_path / "other", 1, 5))
    assert samples.read(2) == good  # in the cache
    samples = open_images(samples.folder, BlockCache(tmp_path / "new-cache", 1 << 24))["train"]
    with pytest.raises(CorruptDataError, match=r"part-0000\.tar:000000002\.jpg: .*replaced|has changed"):
        samples.read(2)


def test_an_index_of_a_store_is_found_until_an_object_changes(s3: FaultyProxy, tmp_path: Path) -> None:
    uploaded(write_shards(tmp_path / "local", 2, 2))
    dataset = index(ROOT, tmp_path / "runs")
    s3.seen.clear()
    settings = ImageSettings(validation_share=0.0)
    assert find_indexed(ROOT, settings, tmp_path / "runs") == dataset
    assert all("tar" not in request.path for request in s3.seen if request.method == "GET")
    uploaded(write_shards(tmp_path / "more", 1, 3))
    assert find_indexed(ROOT, settings, tmp_path / "runs") is None


def test_loose_images_in_a_store_are_refused(s3: FaultyProxy, tmp_path: Path) -> None:
    write_folder(tmp_path / "local", ["cat/1.jpg", "cat/2.jpg"])
    uploaded(tmp_path / "local")
    with pytest.raises(UsageError, match="2 images as separate objects") as caught:
        index(ROOT, tmp_path / "runs", replace(SETTINGS, captions=False))
    assert caught.value.reason is not None
