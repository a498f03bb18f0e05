import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.decode import decode
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings, class_names
from scaletrain_cli.errors import ExitCode, UsageError
from tests.data.images.pictures import image_bytes, index, write_folder, write_shard, write_table

CLASSES = ImageSettings(validation_share=0.0, class_names=("ant", "bee", "cat"))
GOOD = image_bytes(0)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def bomb() -> bytes:
    """Return the PNG of one color that has more pixels than Pillow decodes."""
    content = saved(Image.new("1", (1, 1)), "PNG")
    width_and_height = (20_000).to_bytes(4, "big") * 2
    header = b"IHDR" + width_and_height + content[24:29]
    return content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:]


class Case(NamedTuple):
    """``make``: writes a source with two good samples and a bad one into a folder, and returns its path."""

    make: Callable[[Path], Path]
    where: str
    reason: str
    settings: ImageSettings = CLASSES
    skips: bool = False  # found by decoding, which on_bad: skip does


def folder(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        write_folder(place / "pictures", ["ant/1.jpg", "cat/3.jpg"])
        (place / "pictures" / name).parent.mkdir(exist_ok=True)
        (place / "pictures" / name).write_bytes(content)
        return place / "pictures"

    return make


def shard(*members: tuple[str, bytes]) -> Callable[[Path], Path]:
    good = [
        ("1.jpg", GOOD),
        ("1.cls", b"0"),
        ("1.txt", b"one"),
        ("1.json", b'{"text": "one"}'),
        ("3.jpg", GOOD),
        ("3.cls", b"2"),
        ("3.txt", b"three"),
        ("3.json", b'{"text": ["two", "three"]}'),
    ]

    def make(place: Path) -> Path:
        return write_shard(place / "a.tar", [*good[:4], *members, *good[4:]])

    return make


def cut(at: Callable[[int, int], int]) -> Callable[[Path], Path]:
    """Return what writes a shard that ends early; ``at``: from the first byte of the last image, and its end."""

    def make(place: Path) -> Path:
        path = shard(("2.jpg", GOOD), ("2.cls", b"1"))(place)
        write_shard(path, [("1.jpg", GOOD), ("1.cls", b"0"), ("3.jpg", GOOD), ("3.cls", b"1"), ("2.jpg", GOOD)])
        with tarfile.open(path) as archive:
            last = archive.getmember("2.jpg")
        os.truncate(path, at(last.offset_data, last.offset_data + last.size))
        return path

    return make


def table(image: Any = GOOD, label: Any = 1, **others: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        import pyarrow

        in_struct = isinstance(image, dict)
        good = {"bytes": GOOD, "path": None} if in_struct else GOOD
        columns: dict[str, Any] = {"image": [good, image, good], "label": [0, label, 2]}
        columns |= {name: pyarrow.array(["one", value, "three"]) for name, value in others.items()}
        return write_table(place / "a.parquet", columns)

    return make


def damaged_table(place: Path) -> Path:
    path = write_table(place / "a.parquet", {"image": [image_bytes(n) for n in range(9)], "label": [0] * 9})
    content = bytearray(path.read_bytes())
    content[40:600] = bytes(560)
    path.write_bytes(content)
    return path


CAPTIONS = replace(CLASSES, captions=True)
NUMBERS = ImageSettings(targets="numbers", validation_share=0.0)
CASES = {
    "empty file": Case(folder("bee/2.jpg", b""), "pictures/bee/2.jpg", "the file is empty"),
    "text with the suffix of an image": Case(folder("bee/2.jpg", b"hello"), "bee/2.jpg", "not an image in one of the"),
    "EPS": Case(
        folder("bee/2.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "bee/2.jpg", "not an image in one"
    ),
    "truncated JPEG": Case(folder("bee/2.jpg", GOOD[:-200]), "bee/2.jpg", "truncated", skips=True),
    "truncated header": Case(folder("bee/2.jpg", GOOD[:20]), "bee/2.jpg", "not an image in one of the"),
    "decompression bomb": Case(folder("bee/2.png", bomb()), "bee/2.png", "decompression bomb"),
    "32 bits a pixel": Case(
        folder("bee/2.tif", saved(Image.new("F", (3, 3)), "TIFF")), "bee/2.tif", "pixels have 32 bits"
    ),
    "no class": Case(folder("2.jpg", GOOD), "pictures/2.jpg", "has no label"),
    "unknown class": Case(folder("dog/2.jpg", GOOD), "dog/2.jpg", "'dog', which is none of the 3 names"),
    "damaged PNG": Case(
        shard(("2.png", image_bytes(1, "PNG")[:-60] + bytes(60)), ("2.cls", b"1")), "a.tar:2.png", "", skips=True
    ),
    "member named twice": Case(
        shard(("2.jpg", GOOD), ("2.cls", b"1"), ("2.JPG", GOOD)), "a.tar:2.jpg", "second member with the suffix jpg"
    ),
    "no image in the sample": Case(shard(("2.cls", b"1"), ("2.txt", b"")), "a.tar:2", "has no image .* cls, txt"),
    "no label": Case(shard(("2.jpg", GOOD)), "a.tar:2.jpg", "has no label"),
    "empty label": Case(shard(("2.jpg", GOOD), ("2.cls", b"\n")), "a.tar:2.jpg", "has no label"),
    "label beyond the classes": Case(
        shard(("2.jpg", GOOD), ("2.cls", b"3")), "a.tar:2.jpg", "label 3, and there are 3 classes"
    ),
    "negative label": Case(shard(("2.jpg", GOOD), ("2.cls", b"-2")), "a.tar:2.jpg", "label -2, and there are 3"),
    "label with a fraction": Case(shard(("2.jpg", GOOD), ("2.cls", b"1.5")), "a.tar:2.jpg", "'1.5', which is none"),
    "no caption": Case(shard(("2.jpg", GOOD), ("2.cls", b"1")), "a.tar:2.jpg", "has no caption", CAPTIONS),
    "caption of other text": Case(
        shard(("2.jpg", GOOD), ("2.cls", b"1"), ("2.txt", b"\xff\xfe")), "a.tar:2.jpg", "not UTF-8 text", CAPTIONS
    ),
    "damaged JSON": Case(
        shard(("2.jpg", GOOD), ("2.json", b"{"), ("2.cls", b"1")),
        "a.tar:2.jpg",
        "JSON member that cannot be read",
        replace(CAPTIONS, caption="json:text"),
    ),
    "tar cut in an image": Case(cut(lambda start, stop: start + 9), "a.tar:2.jpg", "cut at byte"),
    "tar cut between members": Case(cut(lambda start, stop: start - 512), "a.tar", "no end of a tar file at byte"),
    "tar cut in a header": Case(cut(lambda start, stop: start - 100), "a.tar", "no end of a tar file at byte"),
    "row without an image": Case(table(None), "a.parquet, row 2", "no image in the column image"),
    "row with a path alone": Case(
        table({"bytes": None, "path": "x.jpg"}), "a.parquet, row 2", "names the file x.jpg in place of the bytes"
    ),
    "row of other bytes": Case(table(b"no image"), "a.parquet, row 2", "not an image in one of the"),
    "row without a label": Case(table(label=None), "a.parquet, row 2", "has no label"),
    "row that is not labeled": Case(table(label=-1), "a.parquet, row 2", "has no label"),
    "row with a label beyond the classes": Case(table(label=7), "a.parquet, row 2", "label 7, and there are 3"),
    "row without a caption": Case(table(caption=None), "a.parquet, row 2", "has no caption", CAPTIONS),
    "group of rows that is damaged": Case(damaged_table, "a.parquet, row 1", "cannot be read as a parquet file"),
}


LOST = {"tar cut in an image": 2, "group of rows that is damaged": 3}  # the image and the rest; a group of 3 rows


@pytest.mark.parametrize("name", CASES)
def test_a_bad_sample_stops_the_index_or_is_left_out_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = case.make(tmp_path / "data")
    if not case.skips:
        with pytest.raises(UsageError) as caught:
            index(source, tmp_path / "runs", case.settings)
        assert caught.value.exit_code == ExitCode.USAGE
        assert caught.match(f"{case.where}: .*{case.reason}")
        assert "on_bad: skip" in " ".join(caught.value.reason.remedies if caught.value.reason else ())
    settings = replace(case.settings, skips_bad=True)
    samples = open_images(index(source, tmp_path / "runs", settings))["train"]
    assert len(samples) == (6 if name == "group of rows that is damaged" else 2)
    for number in range(len(samples)):
        assert samples.read(number).label is not None
    document = json.loads((samples.folder / "dataset.json").read_text())
    places = [place["place"] for reason in document["bad"] for place in reason["places"]]
    assert any(place.endswith(case.where) for place in places)
    assert document["bad_samples"] == len(places) == LOST.get(name, 1)


UNUSABLE = {
    "no column": (table(), replace(CLASSES, image="photo"), "no column photo; it has image, label"),
    "no caption column": (table(), CAPTIONS, "no column caption, text or txt"),
    "column of numbers": (table(), replace(CLASSES, image="label"), "label must have the bytes of images"),
    "no parquet file": (
        lambda place: folder("x.jpg", b"")(place) and write_text(place / "a.parquet"),
        CLASSES,
        "cannot be read as a parquet file",
    ),
    "no tar file": (lambda place: write_text(place / "a.tar"), CLASSES, "a.tar: is not a tar file"),
    "targets of different sizes": (
        lambda place: write_shard(
            place / "a.tar", [("1.jpg", GOOD), ("1.cls", b"[1, 2]"), ("2.jpg", GOOD), ("2.cls", b"[1]")]
        ),
        NUMBERS,
        "a target of 1 numbers, where others have 2",
    ),
    "target that is no number": (
        lambda place: write_shard(place / "a.tar", [("1.jpg", GOOD), ("1.cls", b"[1, NaN]")]),
        NUMBERS,
        "must be a number or a list of numbers",
    ),
}


def write_text(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("no such file " * 100)
    return path


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_source_that_cannot_be_used_is_an_error(name: str, tmp_path: Path) -> None:
    make, settings, problem = UNUSABLE[name]
    with pytest.raises(UsageError, match=problem):
        index(make(tmp_path / "data"), tmp_path / "runs", settings)


def test_unusual_images_are_used(tmp_path: Path) -> None:
    noise = Image.open(io.BytesIO(GOOD))
    palette = noise.quantize(4)
    palette.info["transparency"] = 0
    deep = Image.fromarray(np.full((7, 9), 40_000, np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    images = {
        "cmyk.jpg": saved(noise.convert("CMYK"), "JPEG"),
        "gray.jpg": saved(noise.convert("L"), "JPEG"),
        "deep.png": saved(deep, "PNG"),
        "palette.png": saved(palette, "PNG"),
        "alpha.png": saved(noise.convert("RGBA"), "PNG"),
        "moving.gif": saved(noise, "GIF", save_all=True, append_images=[noise.rotate(90)]),
        "turned.jpg": saved(noise, "JPEG", exif=exif),
        "suffix.png": GOOD,
    }
    for name, content in images.items():
        (tmp_path / "data/ant").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data/ant" / name).write_bytes(content)
    settings = replace(CLASSES, skips_bad=True)
    samples = open_images(index(tmp_path / "data", tmp_path / "runs", settings))["train"]
    assert {samples.read(number).key for number in range(len(samples))} == {f"ant/{name}" for name in images}
    for sample in map(samples.read, range(len(samples))):
        size = (7, 9) if sample.key == "ant/turned.jpg" else (9, 7)
        assert decode(sample.image, sample.place, 3).size == size


@pytest.mark.parametrize("change", ["other bytes", "removed", "cut"])
@pytest.mark.parametrize("kind", ["folder", "shard", "table"])
def test_an_image_that_changed_after_indexing_is_named_when_it_is_read(kind: str, change: str, tmp_path: Path) -> None:
    make = {"folder": folder("bee/2.jpg", GOOD), "shard": shard(("2.jpg", GOOD), ("2.cls", b"1")), "table": table()}
    source = make[kind](tmp_path / "data")
    samples = open_images(index(source, tmp_path / "runs", CLASSES))["train"]
    file = source / "bee/2.jpg" if kind == "folder" else source
    if change == "removed":
        file.unlink()
    elif change == "cut":
        os.truncate(file, 100)
    elif kind == "folder":
        file.write_bytes(image_bytes(5))
    else:
        make[kind] = shard(("2.jpg", image_bytes(5)), ("2.cls", b"1")) if kind == "shard" else table(image_bytes(5))
        make[kind](tmp_path / "data")
    with pytest.raises(CorruptDataError) as caught:
        samples.read(1)
    assert caught.value.exit_code == ExitCode.DO_NOT_REQUEUE
    where = {"folder": "bee/2.jpg", "shard": "a.tar:2.jpg", "table": "a.parquet, row 2"}[kind]
    assert str(caught.value.evidence["file"]).endswith(where)
    assert caught.match(f"{where}: .*{'not the one that was indexed|cannot be read' if change == 'cut' else ''}")


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    dataset = index(shard(("2.jpg", GOOD), ("2.cls", b"1"))(tmp_path), tmp_path / "runs", CLASSES)
    content = bytearray((dataset / "train.samples.bin").read_bytes())
    content[50] ^= 1
    (dataset / "train.samples.bin").write_bytes(content)
    samples = open_images(dataset)["train"]
    with pytest.raises(CorruptDataError, match=r"train\.samples\.bin: chunk 0 .* has changed"):
        samples.read(1)
    description = (dataset / "dataset.json").read_text()
    (dataset / "dataset.json").write_text(description.replace('"train_samples": 3', '"train_samples": 4'))
    with pytest.raises(CorruptDataError, match=r"dataset\.json: it has changed"):
        open_images(dataset)


def test_names_of_classes_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("ant\nbee\n\n")
    assert class_names("classes.txt", tmp_path) == ("ant", "bee")
    for content, problem in (
        ("ant\n\nbee\n", "no name in line 2"),
        ("", "no name in line 1"),
        ("ant\nbee\nant\n", "the name ant a second time in line 3"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=problem):
            class_names(str(file))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        class_names("absent.txt", tmp_path)
