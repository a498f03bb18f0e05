"""The index of a source of images: where each sample is, with its label and caption. The images stay where they are.

An index is a folder of the runs root, named by what the source contains and how it is read. It is built by any number
of processes, which share the work as those that prepare text do, and has the same bytes whatever their number. It
appears whole. Of each split it has:

- ``SPLIT.samples.bin``: a SAMPLE (index_units.py) for each sample, in the order of the source
- ``SPLIT.text.bin``: of each sample the path of its image within file or folder, and its caption, in UTF-8
- ``SPLIT.targets.bin``: for targets of several numbers: the numbers of all samples (float32), or the numbers of all
  classes of all samples (int32), and then ``SPLIT.ends.bin``: how many of them there are up to each sample (int64)

each with the hashes of its chunks beside it; ``files.json`` has the files of the source, ``dataset.json`` the counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaletrain_cli.data.chunk_hashes import HashedFile
from scaletrain_cli.data.drafts import draft_of, write_whole
from scaletrain_cli.data.images.compatibility import FILES, SCHEMA
from scaletrain_cli.data.images.index_units import (
    EMBEDDED_IMAGES,
    MOST_PLACES,
    SAMPLE,
    TARGET_TYPES,
    UNIT_INFO,
    index_unit,
    short_sides,
)
from scaletrain_cli.data.images.listing import Listing, list_source
from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.data.pipeline.claims import Claims, Timing
from scaletrain_cli.data.pipeline.decisions import chained
from scaletrain_cli.data.pipeline.schedule import Progress, Stage, Workers, run_stage
from scaletrain_cli.data.pipeline.shards import SPLITS, seal_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_document, undamaged_document
from scaletrain_cli.rundir.shared_datasets import (
    DATASET,
    is_readable,
    make_datasets_folder,
    open_to_readers,
    place_of,
    require_own_place,
    steps_folder,
)
from scaletrain_cli.safe_files import create_file, make_folder
from scaletrain_cli.spec.corpus_files import SKLEARN_DIGITS

# Raised with every change of the index of equal images.
_VERSION = "images/v1"
_NOTE, _INDEXED = "indexed.json", "index"


def find_indexed(
    path: str, settings: ImageSettings, runs_root: Path, folder: Path = Path(), key: str = "data.source"
) -> Path | None:
    """Return the index of a source in its present state; None if there is none. Reads no image.

    ``folder``: the base of a relative path. ``key``: of the path in the spec. Raises UsageError if the source has no
    files, UnavailableError and OSError.
    """
    return _found(list_source(path, settings, folder, key), settings, runs_root / "datasets")


def index_images(
    path: str,
    settings: ImageSettings,
    runs_root: Path,
    workers: int,
    progress: Progress,
    *,
    key: str = "data.source",
    failure: Path | None = None,
    timing: Timing | None = None,
) -> Path:
    """Return the index of a source, after building it if it is missing; all images are read once for it.

    Any number of processes on machines that share the runs root may do this at the same time. ``key``: of the path in
    the spec. ``failure``: a file that some of them have in common: they all end with the error of the first one that
    fails. Raises UsageError for input that cannot be used, other ScaletrainErrors, and OSError.
    """
    require("PIL.Image", "vision")
    listing = list_source(path, settings, Path(), key)
    if (index := _found(listing, settings, runs_root / "datasets")) is not None:
        return index
    datasets = make_datasets_folder(runs_root)
    try:
        return _build(_Job(listing, settings, datasets), workers, progress, failure, timing)
    except PermissionError as error:
        params = {"folder": str(datasets), "path": str(error.filename), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.dataset-unwritable", params)) from error


@dataclass(frozen=True)
class _Job:
    """The index to build. The folder ``work`` holds its parts, and after the build a note with the key of the index."""

    listing: Listing
    settings: ImageSettings
    datasets: Path

    @property
    def key(self) -> str:
        """A name of the source in this state with these settings."""
        return _state_key(self.listing, self.settings)

    @property
    def work(self) -> Path:
        return steps_folder(self.datasets) / f"images-{self.key}"


def _state_key(listing: Listing, settings: ImageSettings) -> str:
    return chained(_VERSION, listing.format, listing.location, listing.state, settings.key())


def _found(listing: Listing, settings: ImageSettings, datasets: Path) -> Path | None:
    """Return the index that this user, or another one, has built from a source in this state; None if there is none."""
    key = _state_key(listing, settings)
    for steps in (steps_folder(datasets), *sorted(datasets.glob(".steps*"))):
        if (note := undamaged_document(steps / f"images-{key}" / _NOTE)) is not None:
            dataset = place_of(datasets, str(note.get("dataset")), open_images)
            document = read_document(dataset / DATASET) or {}
            if document.get("schema") == SCHEMA and document.get("key") == note.get("dataset") and is_readable(dataset):
                return dataset
    return None


def _build(job: _Job, workers: int, progress: Progress, failure: Path | None, timing: Timing | None) -> Path:
    steps = steps_folder(job.datasets)
    require_own_place(steps)
    make_folder(job.work, parents=True)
    with Claims(steps / ".work", failure, timing) as claims:
        claims.remove_drafts(job.work)
        claims.raise_failure()
        if _found(job.listing, job.settings, job.datasets) is None:
            (job.work / _NOTE).unlink(missing_ok=True)  # of an index that was removed since
        units = job.listing.units()
        names, labels = job.listing.class_names(job.settings), job.listing.class_labels(job.settings)
        if job.settings.only_evaluation and not names:
            raise UsageError(Reason("images.zero-shot-without-names", {"folder": job.listing.location}))
        folder = job.work / "units"
        results = tuple(f"{number:06d}" for number in range(len(units)))
        built = partial(index_unit, folder, job.settings, labels)
        over = (job.work / _NOTE).exists
        with Workers(min(workers, len(units)), claims.owner) as pool:
            jobs = list(enumerate(units)).__getitem__
            key = f"{job.work.name}-units"
            name = f"index the images of {job.listing.location}"
            run_stage(Stage(name, key, folder, results, built, jobs, over), claims, pool, progress)
        with Workers(1, claims.owner) as alone:
            finish = partial(_finish, job, names, results)
            stage = Stage(f"finish the index of {job.listing.location}", job.work.name, job.work, (_NOTE,), finish)
            run_stage(stage, claims, alone, progress)
        claims.at_last_end(partial(shutil.rmtree, job.work / "units", ignore_errors=True))
    index = _found(job.listing, job.settings, job.datasets)
    assert index is not None
    return index


def _finish(job: _Job, names: tuple[str, ...], results: Sequence[str], _unit: int = 0) -> None:
    """Write the index from its units, and the note that names it. Raises UsageError for one without a sample."""
    units = [job.work / "units" / name for name in results]
    infos = [json.loads((unit / UNIT_INFO).read_text(encoding="utf-8")) for unit in units]
    size = _target_size(infos, job)
    draft = draft_of(job.work / _INDEXED)
    make_folder(draft, exist_ok=False)
    try:
        digest = hashlib.sha256()
        counts: dict[str, int] = {}
        largest = -1
        for split in SPLITS:
            counts[split], of_split = _join(draft, split, units, job.settings, digest)
            largest = max(largest, of_split)
        bad = _bad(infos)
        if not counts["train"]:
            raise UsageError(_nothing_left(job, counts, bad))
        embedded = b"".join(
            (unit / EMBEDDED_IMAGES).read_bytes() for unit in units if (unit / EMBEDDED_IMAGES).exists()
        )
        if embedded:
            create_file(draft / EMBEDDED_IMAGES, embedded)
        create_file(draft / FILES, json.dumps(_files(job.listing)))
        content = hashlib.sha256(json.dumps([digest.hexdigest(), names]).encode()).hexdigest()
        key = chained(_VERSION, job.listing.location, job.settings.key(), content)
        summed = [f"{split}_{what}" for what in ("image_bytes", "pixels") for split in SPLITS]
        document = {
            "schema": SCHEMA,
            "key": key,
            "source": job.listing.location,
            "format": job.listing.format,
            "settings": {name: value for name, value in asdict(job.settings).items() if name != "class_names"},
            "fingerprint": content,
            "files": len(job.listing.names) or len(job.listing.shards),
            "left_out": dict(job.listing.left_out or {}),
            **{f"{split}_samples": counts[split] for split in SPLITS},
            **{name: sum(info[name] for info in infos) for name in summed},
            **{f"{split}_short_sides": short_sides(infos, (split,)) for split in SPLITS},
            "classes": list(names) or None,
            "num_classes": (len(names) or largest + 1) if job.settings.targets in ("class", "classes") else None,
            "target_size": size,
            "bad_samples": sum(entry["samples"] for entry in bad),
            "bad": bad,
        }
        create_file(draft / DATASET, json.dumps(document | {"seal": seal_of(document)}, indent=1) + "\n")
        dataset = place_of(job.datasets, key, open_images)
        open_to_readers(draft)
        if not is_readable(dataset):
            shutil.rmtree(dataset, ignore_errors=True)  # without its files, as a crash of a machine leaves
            with contextlib.suppress(OSError):  # another process was faster, with the same bytes
                draft.rename(dataset)
        if not is_readable(dataset):
            raise UsageError(Reason("images.index-not-stored", {"folder": str(dataset)}))
        write_whole(job.work / _NOTE, json.dumps({"dataset": key}))
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _join(
    draft: Path, split: str, units: Sequence[Path], settings: ImageSettings, digest: hashlib._Hash
) -> tuple[int, int]:
    """Write the files of a split; return the number of its samples, and the largest class number."""
    samples = text = targets = 0
    largest = -1
    kind = TARGET_TYPES.get(settings.targets)
    with contextlib.ExitStack() as stack:
        names = ("samples", "text", *(("targets", "ends") if kind else ()))
        files = {name: stack.enter_context(HashedFile(draft / f"{split}.{name}.bin")) for name in names}
        for unit in units:
            samples_of_unit = np.fromfile(unit / f"{split}.samples.bin", SAMPLE)
            samples_of_unit["text"] += np.uint64(text)
            files["samples"].write(samples_of_unit.tobytes())
            content = (unit / f"{split}.text.bin").read_bytes()
            files["text"].write(content)
            samples, text = samples + len(samples_of_unit), text + len(content)
            if len(samples_of_unit):
                largest = max(largest, int(samples_of_unit["label"].max()))
            if kind:
                values = np.fromfile(unit / f"{split}.targets.bin", "<f8")
                files["targets"].write(values.astype(kind).tobytes())
                ends = np.fromfile(unit / f"{split}.ends.bin", "<i8")
                files["ends"].write((ends + targets).tobytes())
                targets += len(values)
                if settings.targets == "classes" and len(values):
                    largest = max(largest, int(values.max()))
        for file in files.values():
            digest.update(hashlib.sha256(file.finish()).digest())
    return samples, largest


def _target_size(infos: Sequence[Mapping[str, Any]], job: _Job) -> int | None:
    """Return how many numbers the target of each sample has; None for classes. Raises UsageError if they differ."""
    if job.settings.targets != "numbers":
        return None
    sizes = sorted({int(info["target_size"]) for info in infos} - {0})
    if len(sizes) > 1:
        problem = Reason("images.sizes-differ", {"sizes": sizes})
        raise UsageError(Reason("images.source-unusable", {"where": job.listing.location, "problem": problem}))
    return sizes[0] if sizes else None


def _bad(infos: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples that were left out, by reason, with the first places in the order of the source."""
    by_code: dict[str, dict[str, Any]] = {}
    for info in infos:
        for entry in info["bad"]:
            known = by_code.setdefault(entry["code"], {"code": entry["code"], "samples": 0, "places": []})
            known["samples"] += entry["samples"]
            known["places"] = (known["places"] + entry["places"])[:MOST_PLACES]
    return [by_code[code] for code in sorted(by_code)]


def _nothing_left(job: _Job, counts: Mapping[str, int], bad: Sequence[Mapping[str, Any]]) -> Reason:
    where = job.listing.location
    if bad:
        first = bad[0]["places"][0]
        params = {
            "bad": sum(entry["samples"] for entry in bad),
            "place": first["place"],
            "problem": reason_from(first["problem"]),
        }
        return Reason("images.source-unusable", {"where": where, "problem": Reason("images.none-usable", params)})
    problem = Reason("images.no-training-sample", {"validation": counts["validation"]})
    return Reason("images.source-unusable", {"where": where, "problem": problem})


def _files(listing: Listing) -> dict[str, Any]:
    """Return what files.json has: the folder of loose images, or [path, bytes, ETag] of each shard."""
    if listing.format == SKLEARN_DIGITS:
        return {"embedded": EMBEDDED_IMAGES}
    if listing.root:
        return {"root": listing.root}
    return {"shards": [[file.path, file.size, file.etag] for file, _ in listing.shards]}
