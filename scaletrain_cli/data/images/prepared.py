"""The indexes of the sources of a spec of images or pairs: finding them, and building those that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.index import SCHEMA, find_indexed, index_images
from scaletrain_cli.data.images.listing import list_source
from scaletrain_cli.data.images.samples import ImageSettings, Targets, image_settings
from scaletrain_cli.data.pipeline.schedule import Progress
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF

_TARGETS: dict[str, Targets] = {"classification": "class", "regression": "numbers", "contrastive": "none"}


def is_of_images(spec: RunSpec) -> bool:
    """Return True if a run trains on images or pairs of image and text."""
    return spec.training.objective in LOSSES_OF


def settings_of(spec: RunSpec, folder: Path = Path()) -> ImageSettings:
    """Return how the sources of a spec are read: what its loss needs of a sample. Raises UsageError.

    ``folder``: the base of relative paths.
    """
    objective = spec.training.objective
    loss = spec.training.loss.of(objective)
    targets: Targets = "classes" if loss == "bce" else _TARGETS[objective]
    return image_settings(
        spec.data.images,
        targets,
        captions=objective == "contrastive" and loss != "nt_xent",  # which compares views of one image
        validation_share=spec.data.validation_split,
        skips_bad=spec.data.on_bad == "skip",
        format=spec.data.format,
        folder=folder,
    )


def find_image_datasets(
    spec: RunSpec, runs_root: Path, known: Mapping[str, Path], folder: Path = Path()
) -> dict[str, Path] | None:
    """Return the index of each source by its name; None if one is missing. Reads no image.

    ``known``: indexes that are used without a look at the source. Raises UsageError.
    """
    settings, found = settings_of(spec, folder), dict[str, Path]()
    for section, (_, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        index = known.get(section.name) or given_index(path, folder) or find_indexed(path, settings, runs_root, folder)
        if index is None:
            return None
        found[section.name] = index
    return found


def prepare_image_datasets(
    spec: RunSpec,
    runs_root: Path,
    known: Mapping[str, Path],
    workers: int,
    progress: Progress,
    failure: Path | None = None,
    folder: Path = Path(),
) -> dict[str, Path]:
    """Return the index of each source by its name, after building those that are missing; see index_images()."""
    settings, found = settings_of(spec, folder), dict[str, Path]()
    for section, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        found[section.name] = (
            known.get(section.name)
            or given_index(path, folder)
            or index_images(path, settings, runs_root, workers, progress, folder, key=key, failure=failure)
        )
        require_outputs(spec, read_document(found[section.name] / DATASET) or {}, found[section.name])
    return found


def source_bytes(spec: RunSpec, known: Mapping[str, Path], folder: Path = Path()) -> int:
    """Return the bytes of the files of all sources that have no index yet, without those ``known`` by name."""
    settings = settings_of(spec, folder)
    return sum(
        list_source(path, settings, folder, key).bytes
        for section, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True)
        if section.name not in known and given_index(path, folder) is None
    )


def given_index(path: str, folder: Path) -> Path | None:
    """Return the folder that a path names if it is an index itself."""
    place = folder / expand_home(path)
    document = read_document(place / DATASET)
    return place if document is not None and document.get("schema") == SCHEMA else None


def require_outputs(spec: RunSpec, document: Mapping[str, Any], index: Path) -> None:
    """Raise UsageError if the data have more classes than the model has outputs, or targets of another size.

    Targets of several classes per image have a number for each of them.
    """
    labels, classes = getattr(spec.model, "num_labels", None), document.get("num_classes")
    if labels is None:
        return
    several = (document.get("settings") or {}).get("targets") == "classes"
    if classes is not None and (classes > labels or (several and classes != labels)):
        params = {"folder": str(index), "classes": classes, "labels": labels}
        raise UsageError(Reason("images.more-classes-than-labels", params))
    size = document.get("target_size")
    if size is not None and size != labels:
        params = {"folder": str(index), "numbers": size, "labels": labels}
        raise UsageError(Reason("images.targets-differ-from-labels", params))
