"""The indexes of the sources of a spec of images or pairs: finding them, and building those that are missing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.compatibility import (
    NamedSource,
    given_index,
    require_outputs,
    require_same_classes,
    require_settings,
    sources_of,
    zero_shot_classes,
)
from scaletrain_cli.data.images.index import find_indexed, index_images
from scaletrain_cli.data.images.listing import list_source
from scaletrain_cli.data.pipeline.schedule import Progress
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF


def is_of_images(spec: RunSpec) -> bool:
    """Return True if a run trains on images or pairs of image and text."""
    return spec.training.objective in LOSSES_OF


def find_image_datasets(
    spec: RunSpec, runs_root: Path, known: Mapping[str, Path], folder: Path = Path()
) -> dict[str, Path] | None:
    """Return the index of each source by its name, see ``sources_of``; None if one is missing. Reads no image.

    ``known``: indexes that are used without a look at the source. Raises UsageError.
    """
    indexes = dict[str, Path]()
    for source in sources_of(spec):
        index = known.get(source.name) or _given(spec, source, folder)
        index = index or find_indexed(source.path, source.settings(spec, folder), runs_root, folder, source.key)
        if index is None:
            return None
        indexes[source.name] = index
    return indexes


def prepare_image_datasets(
    spec: RunSpec,
    runs_root: Path,
    known: Mapping[str, Path],
    workers: int,
    progress: Progress,
    failure: Path | None = None,
) -> dict[str, Path]:
    """Return the index of each source by its name, after building those that are missing; see index_images().

    Raises UsageError, also for sources of training whose classes differ.
    """
    indexes = dict[str, Path]()
    classes = dict[str, Any]()
    for source in sources_of(spec):
        index = known.get(source.name) or _given(spec, source, Path())
        if index is None:
            settings, key = source.settings(spec), source.key
            index = index_images(source.path, settings, runs_root, workers, progress, key=key, failure=failure)
        document = read_document(index / DATASET) or {}
        if source.section is None:
            zero_shot_classes(spec, document, index)
        else:
            classes[source.name] = document.get("classes")
            require_same_classes(classes)
            require_outputs(spec, document, index)
        indexes[source.name] = index
    return indexes


def _given(spec: RunSpec, source: NamedSource, folder: Path) -> Path | None:
    """Return the index that the path of a source names, if it names one. Raises UsageError for other settings."""
    if (index := given_index(source.path, folder)) is not None:
        document = read_document(index / DATASET) or {}
        if source.section is None:
            zero_shot_classes(spec, document, index, folder)
        else:
            require_settings(spec, source.section, document, index, folder)
    return index


def source_bytes(spec: RunSpec, known: Mapping[str, Path]) -> int:
    """Return the bytes of the files of all sources that have no index yet, without those ``known`` by name."""
    return sum(
        list_source(source.path, source.settings(spec), key=source.key).bytes
        for source in sources_of(spec)
        if source.name not in known and given_index(source.path, Path()) is None
    )
