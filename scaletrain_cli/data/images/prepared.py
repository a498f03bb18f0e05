"""The indexes of the sources of a spec of images or pairs: finding them, and building those that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.compatibility import (
    given_index,
    require_outputs,
    require_same_classes,
    require_settings,
    settings_of,
)
from scaletrain_cli.data.images.index import find_indexed, index_images
from scaletrain_cli.data.images.listing import list_source
from scaletrain_cli.data.pipeline.schedule import Progress
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.sources import SourceSpec


def is_of_images(spec: RunSpec) -> bool:
    """Return True if a run trains on images or pairs of image and text."""
    return spec.training.objective in LOSSES_OF


def find_image_datasets(
    spec: RunSpec, runs_root: Path, known: Mapping[str, Path], folder: Path = Path()
) -> dict[str, Path] | None:
    """Return the index of each source by its name; None if one is missing. Reads no image.

    ``known``: indexes that are used without a look at the source. Raises UsageError.
    """
    found = dict[str, Path]()
    for section in spec.data.all_sources:
        index = known.get(section.name) or _given(spec, section, folder)
        index = index or find_indexed(section.path, settings_of(spec, section, folder), runs_root, folder)
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
    """Return the index of each source by its name, after building those that are missing; see index_images().

    Raises UsageError, also for sources whose classes differ.
    """
    found = dict[str, Path]()
    classes = dict[str, Any]()
    for section, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        index = known.get(section.name) or _given(spec, section, folder)
        if index is None:
            settings = settings_of(spec, section, folder)
            index = index_images(path, settings, runs_root, workers, progress, folder, key=key, failure=failure)
        document = read_document(index / DATASET) or {}
        classes[section.name] = document.get("classes")
        require_same_classes(classes)
        require_outputs(spec, document, index)
        found[section.name] = index
    return found


def _given(spec: RunSpec, section: SourceSpec, folder: Path) -> Path | None:
    """Return the index that the path of a source names, if it names one. Raises UsageError for other settings."""
    index = given_index(section.path, folder)
    if index is not None:
        require_settings(spec, section, read_document(index / DATASET) or {}, index, folder)
    return index


def source_bytes(spec: RunSpec, known: Mapping[str, Path], folder: Path = Path()) -> int:
    """Return the bytes of the files of all sources that have no index yet, without those ``known`` by name."""
    return sum(
        list_source(path, settings_of(spec, section, folder), folder, key).bytes
        for section, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True)
        if section.name not in known and given_index(path, folder) is None
    )
