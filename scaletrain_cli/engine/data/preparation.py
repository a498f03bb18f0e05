"""The preparation of a run's data by one process of a preparation job, or on the submitting machine.

Arguments: SPEC_JSON RUNS_ROOT, and options. ``--check`` only says whether the data are prepared, and their size.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from scaletrain_cli.data.commands import ProgressLines
from scaletrain_cli.data.estimate import preparation_seconds
from scaletrain_cli.data.images.prepared import is_of_images, source_bytes
from scaletrain_cli.data.pipeline.claims import read_failure, record_failure
from scaletrain_cli.data.prepared import is_dataset, prepare_run_datasets
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import (
    NAME,
    Entry,
    datasets_file,
    entries_of,
    read_entries,
    record_datasets,
    recorded_folders,
)
from scaletrain_cli.spec import DataSpec, LlavaSpec, RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED, ROW_FORMATS, find_files
from scaletrain_cli.unexpected import known_error

_ROW_BYTES_PER_SECOND = 1.5e6  # rendering and tokenizing rows
_IMAGE_BYTES_PER_SECOND = 4e7  # reading and decoding images
_ROWS_LOOKED_AT = 1000


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Prepare the data, or say whether they are. Raises ScaletrainError and OSError, recorded with ``--failure``."""
    parser = argparse.ArgumentParser(prog="prepare-job")
    parser.add_argument("spec", type=Path)
    parser.add_argument("runs_root", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", type=Path, help="the folder of a run, whose datasets are used as they are")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--failure", type=Path, help="the file in which the processes of a job record why it failed")
    parser.add_argument("--secrets", type=Path, help="a file with further environment variables")
    parser.add_argument("--done", type=Path, help="a file to write when the data are prepared, by the last process")
    parser.add_argument("--keep-secrets", action="store_true", help="keep that file when the data are prepared")
    options = parser.parse_args(arguments)
    spec = RunSpec.model_validate_json(options.spec.read_text(encoding="utf-8"))
    run = None if options.run is None else RunDir(options.run)
    if options.check:
        return _checked(spec, options.runs_root, _known(spec, options.runs_root, run))
    if options.secrets is not None:
        os.environ.update({name: str(value) for name, value in (read_document(options.secrets) or {}).items()})
    started = time.monotonic()
    try:
        if options.failure is not None and (failed := read_failure(options.failure)) is not None:
            raise failed
        folders = _prepared(spec, options.runs_root, options.workers, options.failure, run)
        entries = entries_of(spec, options.runs_root, folders)
        if options.failure is not None:
            record_datasets(options.failure.with_name(NAME), entries)
        if options.done is not None:
            write_document(options.done, {"folders": [str(folder) for folder in folders.values()]})
    except Exception as error:
        if options.failure is not None:
            record_failure(options.failure, known_error(error, "data prepare"), "preparation")
        if options.done is not None:
            _remove(options.secrets)  # nothing follows that needs them
        raise
    if options.done is not None and not options.keep_secrets:
        _remove(options.secrets)
    print(f"data prepared in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return {"prepared": True, "folders": [str(folder) for folder in folders.values()], "datasets": entries}


def _remove(secrets: Path | None) -> None:
    if secrets is not None:
        with contextlib.suppress(OSError):
            secrets.unlink(missing_ok=True)


def _known(spec: RunSpec, runs_root: Path, run: RunDir | None, failure: Path | None = None) -> dict[str, Path]:
    """Return the datasets that a run has recorded, by the names of its sources."""
    file = failure and failure.with_name(NAME) if run is None else datasets_file(run)
    return {} if file is None else recorded_folders(spec, runs_root, read_entries(file))[0]


def _prepared(
    spec: RunSpec, runs_root: Path, workers: int, failure: Path | None, run: RunDir | None
) -> dict[str, Path]:
    known = _known(spec, runs_root, run, failure)
    if spec.training.objective == "causal_lm" or is_of_images(spec):
        return prepare_run_datasets(spec, runs_root, known, workers, ProgressLines(), failure)
    from scaletrain_cli.engine.data.prepared import prepare_rows  # needs transformers

    return {name: known.get(name) or prepare_rows(alone, runs_root) for name, alone in spec.of_sources().items()}


def _checked(spec: RunSpec, runs_root: Path, known: Mapping[str, Path]) -> dict[str, Any]:
    """Return whether the data are prepared; else also the seconds of one worker.

    ``datasets``: those that are there, as a run records them.
    """
    from scaletrain_cli.engine.data.row_dataset import find_datasets

    datasets = find_datasets(spec, runs_root, known)
    entries: list[Entry] = entries_of(spec, runs_root, known if datasets is None else datasets)
    if datasets is not None:
        return {"prepared": True, "seconds": 0.0, "datasets": entries}
    if is_of_images(spec):
        seconds = source_bytes(spec, known) / _IMAGE_BYTES_PER_SECOND
        return {"prepared": False, "seconds": seconds, "datasets": entries}
    estimate = preparation_seconds(spec, runs_root, workers=1) if spec.training.objective == "causal_lm" else None
    seconds = sum(_bytes(spec, known)) / _ROW_BYTES_PER_SECOND if estimate is None else estimate
    if isinstance(spec.model, LlavaSpec):
        seconds += bytes_of_named_images(spec.data) / _IMAGE_BYTES_PER_SECOND
    return {"prepared": False, "seconds": seconds, "datasets": entries}


def bytes_of_named_images(data: DataSpec) -> int:
    """Return about how many bytes the images have that the rows of a source name, as if all were like the first rows.

    0 if these cannot be read. The bytes of images in parquet files are those of the files.
    """
    from scaletrain_cli.engine.data.row_source import rows_of

    try:
        rows = list(islice(rows_of(data, "sft", images=True)[1], _ROWS_LOOKED_AT))
        files = find_files(data.only_source, kinds=ROW_FORMATS).files
        paths = {image.path for row in rows for image in row.images if image.path is not None}
        image_bytes = sum(path.stat().st_size for path in paths)
        whole = sum(path.stat().st_size for path in files)
    except (ScaletrainError, OSError):
        return 0
    seen = sum(len(row.key) for row in rows)
    return round(image_bytes * max(1.0, whole / seen)) if len(rows) == _ROWS_LOOKED_AT else image_bytes


def _bytes(spec: RunSpec, known: Collection[str]) -> list[int]:
    """Return the sizes of the files of all sources that are not ``known`` by name."""
    sizes = []
    for section, (key, _) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        if section.name in known or section.path in EMBEDDED or is_dataset(section.path, key):
            continue
        try:
            sizes += [file.size for file in source_files(section, Path(), key)]
        except ScaletrainError:
            if spec.training.objective == "causal_lm":
                raise
    return sizes
