"""`data show` and `data stats` of images: what they say is what a plain loop over the files and a reader finds."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scaletrain_cli.data.images.index_units import bucket_of
from scaletrain_cli.data.images.report import image_report
from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.engine.data import show, stats, step_view, upload
from scaletrain_cli.engine.data.images.opening import image_reader
from scaletrain_cli.engine.data.images.show import ShownImages
from scaletrain_cli.engine.data.splits import RunData
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.ui.data_images import show_image_report, show_images
from tests.data.images.pictures import image_bytes
from tests.data.texts import ignore

SPEC = """\
schema: scaletrain/v1
name: shown
model: {{family: resnet, embedding_size: 8, hidden_sizes: [8], depths: [1], layer_type: basic, image_size: 16,
        num_labels: 3}}
data:
  sources: [{{name: web, path: {folder}/web, weight: 1}}, {{name: own, path: {folder}/own, weight: 1}}]
  validation_split: 0.3
training: {{global_batch_size: 8, micro_batch_size: 4, steps: 6, precision: fp32, optimizer: {{lr: 1.0e-3}}}}
evaluation: {{every: 0}}
cluster: {{gpu: cpu}}
"""
NAMES = ("cat", "dog", "emu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two prepared sources; one image of each has a copy in the other one."""
    root = tmp_path_factory.mktemp("shown")
    for source, count in (("web", 40), ("own", 12)):
        for number in range(count):
            path = root / source / NAMES[0 if number % 4 else number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_bytes(1000 * len(source + path.name) + number, "PNG", (20 + number, 70 - number)))
    for name in NAMES:
        (root / "own" / name).mkdir(exist_ok=True)
    spec = spec_of(root)
    for copied in sorted((root / "web").glob("*/*.png"))[:10]:
        shutil.copy(copied, root / "own" / "dog" / f"copy-{copied.name}")
    for name in NAMES:
        if not any((root / "own" / name).iterdir()):
            (root / "own" / name / "one.png").write_bytes(image_bytes(77, "PNG"))
    prepare_run_datasets(spec, root / "runs", {}, 1, ignore)
    (root / "spec.json").write_text(spec.model_dump_json(by_alias=True))
    return root


def spec_of(root: Path, *overrides: str) -> RunSpec:
    return parse_spec(SPEC.format(folder=root), file="shown.yaml", base_dir=root, overrides=overrides)


def size_of_file(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def files(root: Path) -> dict[str, Path]:
    return {f"{path.parts[-3]}/{path.parts[-2]}/{path.name}": path for path in root.glob("*/*/*.png")}


def test_the_report_has_the_counts_of_a_plain_loop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = stats.run_command([str(folder / "spec.json"), str(folder / "runs"), ""])
    data = opened(folder)
    place_of = {split: [s.place for each in getattr(data, split).values() for s in all_of(each)] for split in SPLITS}
    contents = {split: [Path(place).read_bytes() for place in places] for split, places in place_of.items()}
    assert report["images"] == {split: len(places) for split, places in place_of.items()}
    (web, own) = report["sources"]
    sides = Counter(bucket_of(min(size_of_file(path))) for path in (folder / "web").glob("*/*.png"))
    assert web["short_side"]["images"] == {str(side): sides[side] for side in sorted(sides)}
    small = sum(count for side, count in sides.items() if side < 16) / sides.total()
    assert web["short_side"]["smaller"] == pytest.approx(small)
    sizes = sorted(path.stat().st_size for path in (folder / "own").glob("*/*.png"))
    assert (own["bytes_per_image"]["least"], own["bytes_per_image"]["most"]) == (sizes[0], sizes[-1])
    for source in (web, own):
        classes = Counter(Path(s.place).parent.name for s in all_of(data.train[source["source"]]))
        assert {each["name"]: each["train"] for each in source["classes"]["classes"]} == {n: classes[n] for n in NAMES}
        assert source["classes"]["imbalance"] == pytest.approx(max(classes.values()) / min(classes.values()))
    found = report["duplicates"]
    for split in SPLITS:
        assert found[split] == len(contents[split]) - len(set(contents[split]))
    assert found["leaked"] == sum(content in set(contents["train"]) for content in contents["validation"])
    of_content: dict[bytes, set[str]] = {}
    for path in files(folder).values():
        of_content.setdefault(path.read_bytes(), set()).add(path.parent.name)
    assert found["other_labels"] == sum(len(names) > 1 for names in of_content.values()) > 0
    assert found["leaked"] > 0
    for pair in found["examples"]:
        paths = [folder / pair[split]["source"] / pair[split]["image"] for split in SPLITS]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    shares = {each["source"]: each["share"] for each in report["mixture"]["sources"]}
    assert shares == {"web": 0.5, "own": 0.5}
    show_image_report(report)
    out = capsys.readouterr().out
    assert f"{found['leaked']} images to validate on are also trained on" in out
    assert "3 classes; the largest has" in out
    alone = stats.run_command([web["dataset"]])
    assert alone["sources"][0]["classes"] == web["classes"]
    assert alone["sources"][0]["short_side"]["smaller"] is None


SPLITS = ("train", "validation")


def opened(folder: Path, *overrides: str) -> RunData:
    spec = spec_of(folder, *overrides)
    datasets = stats.datasets_of(spec, folder / "runs")
    return step_view.opened_data(spec, make_plan(spec).layout, None, datasets)


def all_of(samples: Any) -> list[Any]:
    return [samples.read(number) for number in range(len(samples))]


def test_buckets_are_exact_to_63_and_within_a_thirtieth_above() -> None:
    assert [bucket_of(side) for side in (0, 1, 63, 64, 224, 256, 384)] == [0, 1, 63, 64, 224, 256, 384]
    assert all(0 <= side - bucket_of(side) <= side / 30 for side in range(1, 5000))


def test_captions_are_counted_as_the_tower_reads_them(tmp_path: Path) -> None:
    from scaletrain_cli.data.images.samples import ImageSettings
    from tests.data.images.pictures import index, write_shards

    source = write_shards(tmp_path / "shards", 1, 12)
    made = index(source, tmp_path / "runs", ImageSettings(targets="none", captions=True, validation_share=0.0))
    report = image_report(
        {"pairs": made}, count_tokens=lambda texts: [len(text) for text in texts], positions=len("caption 9 é")
    )
    lengths = sorted(len(f"caption {number} é") for number in range(12))
    captions = report["sources"][0]["captions"]
    assert captions["counted"] == 12
    assert (captions["tokens"]["least"], captions["tokens"]["most"]) == (lengths[0], lengths[-1])
    assert captions["cut"] == pytest.approx(2 / 12)
    assert report["sources"][0]["classes"] is None


def test_samples_have_the_label_and_size_of_their_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = folder / "sheet.png"
    command = [str(folder / "spec.json"), str(folder / "runs"), "3", "4", "", "train", str(sheet)]
    answer = show.run_command(command)
    assert [sample["number"] for sample in answer["samples"]] == [3, 4, 5, 6]
    for sample in answer["samples"]:
        path = Path(sample["place"])
        assert (sample["class"], tuple(sample["size"])) == (path.parent.name, size_of_file(path))
        assert sample["bytes"] == path.stat().st_size
    with Image.open(sheet) as image:
        assert image.width > 5 * 16 * 7  # five pictures of 16 pixels, each seven times as large
    show_images(answer)
    out = capsys.readouterr().out
    assert f"class {answer['samples'][0]['class']}" in out
    assert f"wrote {sheet}" in out
    last = sum(answer["images"].values())
    assert len(show.run_command([*command[:2], str(last), "9"])["samples"]) == 1
    assert show.run_command([*command[:2], "1", "2", "", "validation"])["split"] == "validation"
    with pytest.raises(UsageError, match=f"there is no row {last + 1}"):
        show.run_command([*command[:2], str(last + 1), "1"])


def test_pictures_of_a_step_are_what_the_model_gets_without_its_normalization(folder: Path) -> None:
    plain = ("data.images.augment.random_resized_crop=null", "data.images.augment.horizontal_flip=0")
    spec = spec_of(folder, *plain)
    (folder / "plain.json").write_text(spec.model_dump_json(by_alias=True))
    answer = step_view.run_command([str(folder / "plain.json"), str(folder / "runs"), "", "3", "", "", "8", ""])
    assert [sample["sample"] for sample in answer["samples"]] == list(range(16, 24))
    assert [sample["source"] for sample in answer["samples"]] == ["web", "own"] * 4
    data = opened(folder, *plain)
    layout = make_plan(spec).layout
    order = step_view.order_of(spec, layout, None, data)
    shown = ShownImages(spec, layout, data, order)
    reader = image_reader(spec, data.samples, layout, Mesh(), order)  # type: ignore[arg-type]
    read = [micro.images.permute(0, 2, 3, 1) for micro in reader.batch(3).micro_batches()]
    places = [(micro, 0, row) for micro in range(2) for row in range(4)]
    for (about, picture), (micro, _, row) in zip(shown.of_step(3, places, {0: Mesh()}), places, strict=True):
        assert np.array_equal(picture.images[0], read[micro][row].numpy())
        path = Path(about["place"])
        with Image.open(path) as image:
            expected = reader.transform.evaluation(image.convert("RGB"))
        assert np.array_equal(picture.images[0], expected)


def test_the_screen_of_a_step_names_its_batch_and_each_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = step_view.run_command([str(folder / "spec.json"), str(folder / "runs"), "", "3", "", "", "2", ""])
    show_images(answer)
    shown = capsys.readouterr().out
    assert shown.startswith("step 3 (batch 3 of the data): 2 of 8 samples\nmicro-batches of 4 on 1 replica\n\nimage ")
    for sample in answer["samples"]:
        assert f"sample {sample['sample']} of the run, micro-batch {sample['micro_batch']}, replica 0" in shown


def test_mixed_pictures_name_the_other_class_and_its_share(folder: Path) -> None:
    mixed = ("data.images.augment.mixup=0.8",)
    spec = spec_of(folder, *mixed)
    data, layout = opened(folder, *mixed), make_plan(spec).layout
    order = step_view.order_of(spec, layout, None, data)
    pairs = list(ShownImages(spec, layout, data, order).of_step(1, [(0, 0, 0), (0, 0, 1)], {0: Mesh()}))
    reader = image_reader(spec, data.samples, layout, Mesh(), order)  # type: ignore[arg-type]
    batch = reader.batch(1).micro_batches()[0]
    share = float(batch.mix[0, 0])
    (first, picture), (second, _) = pairs
    assert first["mix"] == {"kind": "mixup", "share": share, "with": second["class"]}
    expected = share * batch.images[0].float() + (1 - share) * batch.images[1].float()
    found = torch.from_numpy(picture.images[0]).permute(2, 0, 1).float()
    assert (found - expected).abs().max() <= 0.51


def test_an_upload_of_images_says_what_to_copy(folder: Path) -> None:
    with pytest.raises(UsageError, match="an index of files that stay where they are") as refused:
        upload.run_command([str(folder / "spec.json"), str(folder / "runs"), "s3://bucket/x"])
    assert "s3://BUCKET/shards/{0000..0099}.tar" in str(refused.value)
