"""Sources of images in data sets of the hub: their files are fetched, and indexed as local ones."""

from __future__ import annotations

from pathlib import Path

from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.run_datasets import prepare_run_datasets
from scaletrain_cli.launch.hub_files import fetched_spec
from tests.data.images.pictures import files_below, ignore, image_bytes, write_folder, write_shards, write_table
from tests.data.images.test_prepared import spec
from tests.hub.server import Hub


def test_shards_tables_and_folders_of_the_hub_are_indexed(hub: Hub, tmp_path: Path) -> None:
    write_shards(tmp_path / "all/shards", 2, 4)
    images = [image_bytes(number) for number in range(6)]
    write_table(tmp_path / "all/data/train-00000-of-00001.parquet", {"image": images, "label": [0, 1] * 3})
    write_folder(tmp_path / "all/loose", ["train/cat/1.jpg", "train/dog/2.png"])
    hub.add("org/pictures", {"README.md": b"#", **files_below(tmp_path / "all")}, kind="dataset")
    for path, samples in (("shards", 8), ("data", 6), ("loose", 2), ("shards/*-0001.tar", 4)):
        wanted = spec(tmp_path, f"data.source=hf://datasets/org/pictures/{path}", "data.validation_split=0.001")
        fetched = fetched_spec(wanted, "data")
        assert not str(fetched.data.source).startswith("hf://")
        made = prepare_run_datasets(fetched, tmp_path / "runs", {}, 1, ignore)
        assert sum(map(len, open_images(made["source"]).values())) == samples
