import shutil
from pathlib import Path

import pytest

from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.launch.hub_fetch import fetched_spec
from scaletrain_cli.launch.node.hub import _uses_of_node
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import entries_of, recorded_folders
from tests.data.images.pictures import files_below, image_bytes, write_folder, write_shards, write_table
from tests.data.images.test_prepared import spec
from tests.data.texts import ignore
from tests.hub.server import Hub

pytestmark = pytest.mark.usefixtures("fetched_here")


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


@pytest.mark.parametrize("path", ["shards", "loose"])
def test_an_index_finds_the_files_in_a_cache_at_another_place(
    path: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "all/shards", 2, 4)
    write_folder(tmp_path / "all/loose", ["train/cat/1.jpg", "train/dog/2.png"])
    hub.add("org/pictures", files_below(tmp_path / "all"), kind="dataset")
    wanted = spec(tmp_path, f"data.source=hf://datasets/org/pictures/{path}", "data.validation_split=0.001")
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("HF_HUB_CACHE", str(first))
    fetched = fetched_spec(wanted, "data")
    made = prepare_run_datasets(fetched, tmp_path / "runs", {}, 1, ignore)
    entries = entries_of(fetched, tmp_path / "runs", made)
    images = [sample.read(0).image for sample in open_images(made["source"]).values() if len(sample)]

    monkeypatch.setenv("HF_HUB_CACHE", str(second))
    elsewhere = fetched_spec(wanted, "data")
    assert elsewhere.data.source != fetched.data.source
    shutil.rmtree(first)
    assert recorded_folders(elsewhere, tmp_path / "runs", entries) == (made, [])
    found = [sample.read(0) for sample in open_images(made["source"]).values() if len(sample)]
    assert [sample.image for sample in found] == images
    assert all(sample.place.startswith(str(second)) for sample in found)


def test_each_node_fetches_images_and_only_the_first_one_text(tmp_path: Path) -> None:
    images = spec(tmp_path, "data.source=hf://datasets/org/pictures")
    text = images.model_copy(update={"training": images.training.model_copy(update={"objective": "causal_lm"})})
    for wanted, counts in ((images, [1, 1]), (text, [1, 0])):
        assert [len(_uses_of_node(RunDir(tmp_path), wanted, rank)) for rank in (0, 1)] == counts


def test_captions_beside_images_are_fetched_with_them(hub: Hub, tmp_path: Path) -> None:
    write_folder(tmp_path / "all/loose", ["cat/1.jpg", "dog/2.png"])
    for name in ("cat/1.json", "cat/1.txt", "cat/1.cls"):
        (tmp_path / "all/loose" / name).write_text("{}")
    hub.add("org/pictures", files_below(tmp_path / "all"), kind="dataset")
    fetched = fetched_spec(spec(tmp_path, "data.source=hf://datasets/org/pictures/loose"), "data")
    found = {path.name for path in Path(str(fetched.data.source)).rglob("*.*")}
    assert found == {"1.jpg", "1.json", "1.txt", "1.cls", "2.png"}
