"""The datasets of a run of text or images: those that it has recorded, and others as for a spec without a run."""

from collections.abc import Mapping
from pathlib import Path

from scaletrain_cli.data.images.prepared import find_image_datasets, is_of_images, prepare_image_datasets
from scaletrain_cli.data.pipeline.schedule import Progress
from scaletrain_cli.data.prepared import find_prepared, prepare_data
from scaletrain_cli.spec import DataSpec, RunSpec
from scaletrain_cli.spec.data import TokenizerSpec
from scaletrain_cli.spec.preparation import DuplicatesSpec


def find_run_datasets(
    spec: RunSpec, runs_root: Path, known: Mapping[str, Path], folder: Path = Path()
) -> dict[str, Path] | None:
    """Return the dataset of each source by its name; None if one is missing.

    ``known``: datasets that the run has recorded: only other sources are looked up. Raises UsageError.
    """
    if is_of_images(spec):
        return find_image_datasets(spec, runs_root, known, folder)
    data, excluded = _others(spec.data, known)
    if set(known) >= {section.name for section in spec.data.all_sources}:
        return {section.name: known[section.name] for section in spec.data.all_sources}
    found = find_prepared(data, runs_root, folder, excluded)
    return None if found is None else {**found, **known}


def prepare_run_datasets(
    spec: RunSpec,
    runs_root: Path,
    known: Mapping[str, Path],
    workers: int,
    progress: Progress,
    failure: Path | None = None,
) -> dict[str, Path]:
    """Return the dataset of each source by its name, after preparing those that are missing; see prepare_data()."""
    if is_of_images(spec):
        return prepare_image_datasets(spec, runs_root, known, workers, progress, failure)
    if (found := find_run_datasets(spec, runs_root, known)) is not None:
        return found
    data, excluded = _others(spec.data, known)
    return {**prepare_data(data, runs_root, workers, progress, failure=failure, known=excluded), **known}


def _others(data: DataSpec, known: Mapping[str, Path]) -> tuple[DataSpec, Mapping[str, Path]]:
    """Return the data with which missing sources are prepared, and the datasets that are used as they are.

    All sources have one tokenizer, which is that of the known datasets if it is trained. Duplicates are looked for in
    all sources; where a step does so for a missing source, the known ones are read, too.
    """
    if not known:
        return data, known
    tokenizer = next((path for each in known.values() if (path := each / "tokenizer.json").is_file()), None)
    if data.tokenizer.path is None and tokenizer is not None:
        data = data.model_copy(update={"tokenizer": TokenizerSpec(kind="file", path=str(tokenizer))})
    missing = {section.name for section in data.all_sources} - set(known)
    for step in data.prepare:
        if isinstance(step, DuplicatesSpec) and step.across_sources:
            chosen = {section.name for section in data.all_sources} if step.only is None else set(step.only)
            if chosen & missing and chosen & set(known):
                return data, {}
    return data, known
