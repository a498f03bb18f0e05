"""Small images, and sources of them: folders, tar shards and parquet files."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scaletrain_cli.data.images.index import index_images
from scaletrain_cli.data.images.samples import ImageSettings
from tests.data.texts import ignore


def image_bytes(seed: int, format: str = "JPEG", size: tuple[int, int] = (9, 7)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def write_folder(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Write an image for each relative path, and return their contents by path."""
    contents = {}
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        contents[name] = image_bytes(seed, "PNG" if name.lower().endswith("png") else "JPEG")
        (folder / name).write_bytes(contents[name])
    return contents


def write_shard(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, shards: int, samples: int, pattern: str = "part-{:04d}.tar") -> Path:
    """Write shards whose samples have an image, a class from 0 to 4, a caption and JSON; return the folder."""
    for shard in range(shards):
        members: list[tuple[str, bytes]] = []
        for number in range(samples):
            seed = shard * samples + number
            about = {"caption": f"a JSON caption {seed}", "classes": [seed % 3, 3], "numbers": [seed / 4, -1.0]}
            members += [
                (f"{shard:04d}{number:05d}.jpg", image_bytes(seed)),
                (f"{shard:04d}{number:05d}.cls", str(seed % 5).encode()),
                (f"{shard:04d}{number:05d}.txt", f" caption {seed} \u00e9\n".encode()),
                (f"{shard:04d}{number:05d}.json", json.dumps(about).encode()),
            ]
        write_shard(folder / pattern.format(shard), members)
    return folder


def write_table(path: Path, columns: Mapping[str, Any], rows_per_group: int = 3) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path, row_group_size=rows_per_group)
    return path


def index(path: Path | str, root: Path, settings: ImageSettings | None = None, workers: int = 1) -> Path:
    """Build the index of a source in a runs root, without a validation split unless ``settings`` has one."""
    return index_images(str(path), settings or ImageSettings(validation_share=0.0), root, workers, ignore)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
