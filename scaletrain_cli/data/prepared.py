"""The prepared data of a spec or a run: which datasets there are, and preparing those that are missing."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scaletrain_cli.available_memory import available_bytes
from scaletrain_cli.data.content import ReadHashes, combined_content, embedded_content, known_hashes, read_hashes
from scaletrain_cli.data.duplicates.corpus import DEFAULT_MEMORY_BYTES
from scaletrain_cli.data.images.prepared import find_image_datasets, is_of_images, prepare_image_datasets
from scaletrain_cli.data.pipeline.chain import forget_steps
from scaletrain_cli.data.pipeline.contents import shared_reading
from scaletrain_cli.data.pipeline.prepare import Preparation, prepare, prepared
from scaletrain_cli.data.pipeline.report import NAME as REPORT
from scaletrain_cli.data.pipeline.schedule import Progress
from scaletrain_cli.data.pipeline.tasks import Source
from scaletrain_cli.data.remote_datasets import attach_dataset, find_description, is_attached
from scaletrain_cli.data.sources.formats import first_fault
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.data.sources.places import RemoteFile, naming_key
from scaletrain_cli.data.sources.records import SourceFile, columns_of
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.data.steps.score import score_problem
from scaletrain_cli.data.tokenizers.load import tokenizer_content
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET, make_datasets_folder, steps_folder
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import DataSpec, RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED
from scaletrain_cli.spec.data import TokenizerSpec
from scaletrain_cli.spec.preparation import C4Spec, ContaminationSpec, DuplicatesSpec, PreparationStep
from scaletrain_cli.spec.sources import SourceSpec

_LEAST_MEMORY_BYTES = 1 << 26


@dataclass(frozen=True)
class _Found:
    """A source as it is on disk: a ``dataset`` that is used as it is, or files with the hashes of their content."""

    section: SourceSpec
    dataset: Path | None = None
    files: tuple[SourceFile, ...] = ()
    hashes: Mapping[str, str] | None = None

    @property
    def content(self) -> str:
        """A hash of what the source contains."""
        if self.section.path in EMBEDDED:
            return embedded_content(self.section.path)
        return combined_content(self.files, self.hashes or {})


def find_prepared(
    data: DataSpec, runs_root: Path, folder: Path = Path(), known: Mapping[str, Path] | None = None
) -> dict[str, Path] | None:
    """Return the dataset of each source of text by its name, in the order of the spec; None if one is missing.

    Never reads a corpus: a source whose content is not remembered counts as not prepared. ``folder``: the base of
    relative paths. ``known``: datasets of sources by name, which are used without a look at the source. Raises
    UsageError.
    """
    sources = _sources(data, runs_root, folder, None, known)
    return None if sources is None else _datasets(data, sources, runs_root, folder)


def prepare_data(
    data: DataSpec,
    runs_root: Path,
    workers: int,
    progress: Progress,
    folder: Path = Path(),
    failure: Path | None = None,
    known: Mapping[str, Path] | None = None,
) -> dict[str, Path]:
    """Return the dataset of each source of text by its name, after preparing those that are missing.

    ``folder``: the base of relative paths. ``failure``: a file that the processes of a job have in common: they all end
    with the error of the first one that fails. ``known``: as for find_prepared(). Raises UsageError for input that
    cannot be used, other ScaletrainErrors, and OSError.
    """
    forget_steps()
    if (prepared := find_prepared(data, runs_root, folder, known)) is not None:
        return prepared
    _require_readable(data, folder, known or {})
    with _reading(runs_root, workers, progress, failure) as read:
        sources = _sources(data, runs_root, folder, read, known)
    assert sources is not None
    if (prepared := _datasets(data, sources, runs_root, folder)) is not None:
        return prepared
    datasets = make_datasets_folder(runs_root)
    try:
        preparation = _preparation(data, sources, runs_root, folder, workers)
        made = prepare(preparation, datasets, workers, progress, failure=failure)
    except PermissionError as error:
        params = {"folder": str(datasets), "path": str(error.filename), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.dataset-unwritable", params)) from error
    return _in_order(data, sources, made)


@contextlib.contextmanager
def _reading(runs_root: Path, workers: int, progress: Progress, failure: Path | None) -> Iterator[ReadHashes]:
    """Yield what hashes files: with other processes, or alone where this user cannot write to the runs root."""
    try:
        datasets = make_datasets_folder(runs_root)
    except (ScaletrainError, OSError):  # reported where it matters, when something must be written
        yield partial(read_hashes, workers=workers)
        return
    with shared_reading(datasets, workers, progress, failure) as read:
        yield read


def _require_readable(data: DataSpec, folder: Path, known: Mapping[str, Path]) -> None:
    """Read the first documents of some files, before all files are read. Raises UsageError for a bad one.

    If bad documents are skipped, it is raised if none of them can be used.
    """
    skips_bad = data.on_bad == "skip"
    for section, (key, path) in zip(data.all_sources, data.paths(), strict=True):
        if section.name in known or path in EMBEDDED or is_remote(path) or is_dataset(path, key, folder):
            continue
        fault = first_fault(
            source_files(section, folder, key),
            columns_of(section, data.prepare),
            skips_bad=skips_bad,
            problem_of=score_problem(section.name, data.prepare),
        )
        if fault is not None and skips_bad:
            params = {"source": section.name, "where": fault[0], "problem": fault[1]}
            raise UsageError(Reason("data.no-usable-document", params))
        if fault is not None:
            raise UsageError(Reason("data.bad-document", {"where": fault[0], "problem": fault[1]}))


def _sources(
    data: DataSpec, runs_root: Path, folder: Path, read: ReadHashes | None, known: Mapping[str, Path] | None = None
) -> list[_Found] | None:
    """Return the sources of a spec; None if the content of one is not known, and ``read`` is None."""
    sources = []
    for section, (key, _) in zip(data.all_sources, data.paths(), strict=True):
        if known and section.name in known:
            sources.append(_Found(section, known[section.name]))
            continue
        dataset = folder / expand_home(section.path)
        if (dataset / DATASET).is_file():
            sources.append(_Found(section, dataset))
            continue
        if (description := _description(section.path, key)) is not None:
            datasets = runs_root / "datasets"
            if read is None and not is_attached(description, datasets):
                return None
            sources.append(_Found(section, attach_dataset(description, datasets)))
            continue
        # What is remembered was readable, and has not changed its mode since.
        files = source_files(section, folder, key, checked=read is not None)
        hashes: dict[str, str] | None = {}
        if section.path not in EMBEDDED:
            hashes = known_hashes(str(folder / section.path), files, runs_root, read)
        if hashes is None:
            return None
        sources.append(_Found(section, None, files, hashes))
    return sources


def is_dataset(path: str, key: str, folder: Path = Path()) -> bool:
    """Return True if the path of a source is a prepared dataset, here or in a store. Raises ScaletrainError."""
    return (folder / expand_home(path) / DATASET).is_file() or _description(path, key) is not None


def _description(path: str, key: str) -> RemoteFile | None:
    """Return dataset.json of a remote path; None if it has text, or is local. Raises ScaletrainError with the key."""
    with naming_key(key):
        return find_description(path)


def _datasets(data: DataSpec, sources: Sequence[_Found], runs_root: Path, folder: Path) -> dict[str, Path] | None:
    """Return the datasets of all sources; None if one is missing. Raises UsageError."""
    made: dict[str, Path] | None = {}
    if any(source.dataset is None for source in sources):
        made = prepared(_preparation(data, sources, runs_root, folder), runs_root / "datasets")
    return None if made is None else _in_order(data, sources, made)


def _in_order(data: DataSpec, sources: Sequence[_Found], made: Mapping[str, Path]) -> dict[str, Path]:
    """Return all datasets in the order of the spec. Raises UsageError if bad documents are missing in one."""
    in_order = {source.section.name: source.dataset or made[source.section.name] for source in sources}
    if data.on_bad == "stop":
        for dataset in made.values():
            # Bad documents may have been left out when the dataset was prepared, as another spec had asked for.
            report = read_document(dataset / REPORT) or {}
            bad = [reason for step in report.get("steps", ()) for reason in step.get("bad", ())]
            if bad:
                places = [place for reason in bad for place in reason["places"]]
                first = min(places, key=lambda place: place.get("order", []))  # in the order of the source
                params = {"place": first["place"], "problem": first["problem"]}
                raise UsageError(
                    Reason("data.bad-documents", params | {"documents": sum(reason["documents"] for reason in bad)})
                )
    return in_order


def _preparation(
    data: DataSpec, sources: Sequence[_Found], runs_root: Path, folder: Path, workers: int = 1
) -> Preparation:
    sections = tuple(_with_paths(section, folder) for section in data.prepare)
    tokenizer = ""  # one is to be trained
    if data.tokenizer.path is not None:
        tokenizer = tokenizer_content(data.tokenizer, folder, steps_folder(runs_root / "datasets"))
    # For the processes that deduplicate, half of what is free.
    free = available_bytes() or 2 * DEFAULT_MEMORY_BYTES
    return Preparation(
        sources=tuple(
            Source(source.section.name, source.files, source.content, columns_of(source.section, sections))
            for source in sources
            if source.dataset is None
        ),
        sections=sections,
        tokenizer=tokenizer,
        validation_share=data.validation_split,
        skips_bad=data.on_bad == "skip",
        vocab_size=data.tokenizer.vocab_size,
        memory_bytes=max(_LEAST_MEMORY_BYTES, min(DEFAULT_MEMORY_BYTES, free // 2 // max(1, workers))),
    )


def _with_paths(section: PreparationStep, folder: Path) -> PreparationStep:
    """Return a step with the paths of its files below ``folder``."""
    if isinstance(section, ContaminationSpec):
        return section.model_copy(update={"files": tuple(str(folder / expand_home(name)) for name in section.files)})
    if isinstance(section, C4Spec) and section.bad_words is not None:
        return section.model_copy(update={"bad_words": str(folder / expand_home(section.bad_words))})
    return section


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
    prepared = find_prepared(data, runs_root, folder, excluded)
    return None if prepared is None else {**prepared, **known}


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
    if (datasets := find_run_datasets(spec, runs_root, known)) is not None:
        return datasets
    data, excluded = _others(spec.data, known)
    return {**prepare_data(data, runs_root, workers, progress, failure=failure, known=excluded), **known}


def _others(data: DataSpec, known: Mapping[str, Path]) -> tuple[DataSpec, Mapping[str, Path]]:
    """Return the data with which missing sources are prepared, and the datasets that are used as they are.

    All sources have one tokenizer, which is that of the known datasets if it is trained. Duplicates are looked for in
    all sources; where a step does so for a missing source, the known ones are read, too.
    """
    if not known:
        return data, known
    tokenizer = next((path for dataset in known.values() if (path := dataset / "tokenizer.json").is_file()), None)
    if data.tokenizer.path is None and tokenizer is not None:
        data = data.model_copy(update={"tokenizer": TokenizerSpec(kind="file", path=str(tokenizer))})
    missing = {section.name for section in data.all_sources} - set(known)
    for step in data.prepare:
        if isinstance(step, DuplicatesSpec) and step.across_sources:
            chosen = {section.name for section in data.all_sources} if step.only is None else set(step.only)
            if chosen & missing and chosen & set(known):
                return data, {}
    return data, known
