"""Check the sources of text and the files of data.prepare: every file is there, and the first documents of some decode.

The documents are read by the readers of the preparation, so that what is accepted here is accepted there.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import Problem, ScaletrainError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.resource_checks.files import description_problem, prepared_problem, token_ids_of
from scaletrain_cli.launch.resource_checks.view import LOOK_SECONDS, UNSEEN_REMOTE, CheckResults, View, notes_on_files
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED, NoCorpusError, find_text, unreadable_among
from scaletrain_cli.spec.preparation import C4Spec, ContaminationSpec, ScoreSpec
from scaletrain_cli.spec.shared_paths import parent_of_glob
from scaletrain_cli.spec.sources import SourceSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.formats import Fault
    from scaletrain_cli.data.sources.records import SourceFile

_REMOTE_FILES_READ = 2  # of each format of a source
_EVALUATION_FILES_READ = 8
_ITEMS_READ = 64  # of each evaluation file
_LARGEST_LIST_BYTES = 1 << 20  # of words, or of the beginning of an evaluation file
# Faults of the first documents that a wrong column of a step causes, a wrong field, or a wrong format.
_OF_COLUMN = ("sources.no-column", "document_steps.column-missing", "document_steps.column-not-number")
_OF_FIELD = ("sources.no-field", "sources.not-text")
_OF_FORMAT = (
    *("sources.not-json", "sources.not-an-object", "sources.not-utf-8", "sources.binary", "sources.table-damaged"),
    *("sources.megatron-not-an-index", "sources.npy-with-header", "sources.npy-without-header", "sources.npy-shape"),
)
# The library of a step, and the extra that installs it.
_LIBRARIES = {"language": ("py3langid", "data"), "duplicates": ("rensa", "data")}


def check_text(view: View) -> CheckResults:
    """Return the results for the sources of text, if the built-in engine reads them. Never raises."""
    if not reads_text(view.spec):
        return CheckResults()
    results, unseen = [], list[str]()
    for (key, path), section in zip(view.spec.data.paths(), view.spec.data.all_sources, strict=True):
        if section.name in view.prepared or path in EMBEDDED or is_reference(path):
            continue
        if not view.unseen(parent_of_glob(path)):
            results.append(_check_source(view, key, section, unseen))
    problems = [problem for checked in results for problem in checked.problems]
    notes = [note for checked in results for note in checked.warnings]
    if unseen:
        notes.append(Reason("checks.remote-not-checked", {"keys": unseen}))
    if not {section.name for section in view.spec.data.all_sources} <= set(view.prepared):
        problems += _step_problems(view)
    files = {name: listed for checked in results for name, listed in checked.files.items()}
    return CheckResults(tuple(problems), tuple(notes), files)


def text_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of the sources of text."""
    yield from check_text(view).problems


def cache_problems(view: View) -> Iterator[Problem]:
    """Yield the problem of the cache of remote prepared data, which is created on a node of the job."""
    if not reads_text(view.spec) or not (view.on_node or view.spec.cluster.traits.runs_here):
        return
    from scaletrain_cli.data.block_cache import block_cache

    path = view.spec.data.cache.path
    cache = block_cache(view.spec.data.cache)
    try:
        replace(cache, folder=view.folder / cache.folder).require_usable(create=view.on_node)
    except OSError as error:
        if any(_is_in_a_store(source.path) for source in view.spec.data.all_sources):
            params = {"path": str(error.filename or cache.folder), "error": error.strerror or str(error)}
            yield view.problem("data.cache.path", Reason("checks.cache-unusable", params), path)


def _is_in_a_store(path: str) -> bool:
    """Return True if a path has prepared data in a store that answers."""
    from scaletrain_cli.data.remote_datasets import find_description

    try:
        return find_description(path, LOOK_SECONDS) is not None
    except ScaletrainError:
        return False


def reads_text(spec: RunSpec) -> bool:
    """Return True if the built-in engine trains on text that it prepares."""
    return not spec.code.own_program and spec.unit == "tokens" and spec.training.objective == "causal_lm"


def _check_source(view: View, key: str, section: SourceSpec, unseen: list[str]) -> CheckResults:
    """Return the results for one source; what is not visible without credentials or network is added to ``unseen``."""
    from scaletrain_cli.data.sources.places import UnavailableError
    from scaletrain_cli.data.sources.stores import is_remote

    remote = is_remote(section.path)
    prepared = view.folder / expand_home(section.path)
    reason: Reason | None
    description: dict[str, Any] | None = None
    try:
        if remote:
            from scaletrain_cli.data.remote_datasets import remote_description  # loads numpy

            description = remote_description(section.path, LOOK_SECONDS)
        if not remote and (prepared / "dataset.json").is_file():
            reason = prepared_problem(prepared, view)
        elif description is not None:
            reason = description_problem(description, view.spec)
        else:
            left_out = Counter[str]()
            files = _listed(view, key, section, remote, left_out)
            problems = tuple(_problems(view, key, section, files, remote)) if files else ()
            notes = tuple(notes_on_files(key, section.path, left_out)) if files else ()
            return CheckResults(problems, notes, {} if problems else {section.name: files})
    except NoCorpusError as error:
        if error.other_formats:
            reason = Reason("checks.source-other-format", {"why": error.why})
            return CheckResults((view.problem(_beside(key, "format"), reason, section.format),))
        reason = Reason("checks.no-source", {"why": error.why})
    except (UsageError, UnavailableError) as error:
        reason = error.reason or Reason("checks.no-source", {"why": str(error)})
        if reason.code == "remote.of-key":  # the key is named already
            reason = reason.params["cause"]
        elif reason.code == "engine.data-source-unreadable":
            reason = Reason("checks.source-file", {"why": reason.params["problem"]})
        if reason.code == "remote.unavailable" and view.on_node:
            return CheckResults()  # the ranks ask again, for longer; an outage is no fault of the spec
        if reason.code in UNSEEN_REMOTE and not (view.spec.cluster.traits.runs_here or view.on_node):
            unseen.append(f"{key} = {section.path}: {reason}")
            return CheckResults()
    except OSError as error:
        said = f"{error.filename or section.path} cannot be read: {error.strerror or error}"
        reason = Reason("checks.source-file", {"why": said})
    return CheckResults(() if reason is None else (view.problem(key, reason, section.path),))


def _listed(view: View, key: str, section: SourceSpec, remote: bool, left_out: Counter[str]) -> tuple[SourceFile, ...]:
    """Return the files of a source. Raises UsageError, UnavailableError and OSError."""
    from scaletrain_cli.data.sources.listing import source_files

    if not remote:
        files = find_text(section.path, view.folder, section.format, key).files
        if unreadable := unreadable_among(files, view.folder / expand_home(section.path)):
            raise UsageError(Reason("checks.source-file", {"why": unreadable}))
    return source_files(section, view.folder, key, seconds=LOOK_SECONDS, left_out=left_out)


def _problems(
    view: View, key: str, section: SourceSpec, files: Sequence[SourceFile], remote: bool
) -> Iterator[Problem]:
    """Yield the first bad document of the beginnings of some files, and what else keeps them from being used.

    ``key``: of the path of the source. Raises UsageError and OSError.
    """
    from scaletrain_cli.data.sources.formats import FILES_READ, first_fault
    from scaletrain_cli.data.sources.records import columns_of
    from scaletrain_cli.data.steps.score import score_problem

    if not sum(file.size for file in files):
        yield view.problem(key, Reason("checks.no-text"), section.path)
        return
    columns = columns_of(section, view.spec.data.prepare)
    skips_bad, most = view.spec.data.on_bad == "skip", _REMOTE_FILES_READ if remote else FILES_READ
    problem_of = score_problem(section.name, view.spec.data.prepare)
    fault = first_fault(files, columns, skips_bad=skips_bad, most_files=most, problem_of=problem_of)
    if fault is not None:
        yield _fault_problem(view, key, section, fault)
    if reason := token_source_problem(view, section.name, files, reads_ids=fault is None):
        yield view.problem(key, reason, section.path)
    elif fault is None and not remote and (short := _too_short(files, view.spec)):
        yield view.problem(key, short, section.path)


def _fault_problem(view: View, key: str, section: SourceSpec, fault: Fault) -> Problem:
    """Return the problem of a bad document, at the key of the spec that is likely to be wrong."""
    params: dict[str, Any] = {"where": fault.place, "problem": fault.reason}
    code = fault.reason.code
    if code in _OF_COLUMN and fault.of_all:
        for number, step in enumerate(view.spec.data.prepare):
            if isinstance(step, ScoreSpec) and step.column == fault.reason.params["column"]:
                reason = Reason("checks.source-column", params)
                return view.problem(f"data.prepare.{number}.column", reason, step.column)
    if code in _OF_FIELD and fault.of_all:
        if key == "data.source":
            return view.problem(key, Reason("checks.only-source-field", {**params, "path": section.path}), section.path)
        return view.problem(_beside(key, "field"), Reason("checks.source-field", params), section.field)
    if code in _OF_FORMAT and fault.of_all and key != "data.source":
        if section.format != "auto":
            return view.problem(_beside(key, "format"), Reason("checks.source-format", params), section.format)
        return view.problem(key, Reason("checks.source-format-of-name", params), section.path)
    if view.spec.data.on_bad == "skip":
        return view.problem(key, Reason("checks.source-without-documents", params), section.path)
    damaged = fault.of_all and code != "sources.empty"
    return view.problem(
        key, Reason("checks.source-damaged" if damaged else "checks.source-document", params), section.path
    )


def _beside(key: str, name: str) -> str:
    """Return the key of another setting of the source whose path has ``key``; data.source has only its path."""
    return f"{key.removesuffix('path')}{name}" if key.endswith(".path") else key


def _too_short(files: Sequence[SourceFile], spec: RunSpec) -> Reason | None:
    """Return a problem if the only source is too short for one sequence.

    A token of a trained tokenizer has at least one byte, and each document adds one token.
    """
    size, length = sum(file.size for file in files), spec.transformer.seq_len
    plain = all(file.kind in ("txt", "md", "code", "jsonl") and not file.compression for file in files)
    if not plain or len(spec.data.all_sources) > 1 or spec.data.tokenizer.kind != "bpe" or size + len(files) > length:
        return None
    return Reason("checks.too-little-text", {"bytes": size, "seq_len": length})


def _step_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of files and libraries that the steps of data.prepare need."""
    for number, step in enumerate(view.spec.data.prepare):
        key = f"data.prepare.{number}"
        if isinstance(step, ContaminationSpec):
            for pattern in step.files:
                if not view.unseen(parent_of_glob(pattern)) and (reason := _evaluation_problem(view, pattern, step)):
                    yield view.problem(f"{key}.files", reason, pattern)
        words = step.bad_words if isinstance(step, C4Spec) else None
        if words is not None and not view.unseen(words) and (why := _list_problem(view.folder / expand_home(words))):
            yield view.problem(f"{key}.bad_words", why, words)
        name = step.step
        module, extra = _LIBRARIES.get(name, ("", ""))
        if module and view.spec.cluster.traits.runs_here and find_spec(module) is None:
            params = {"module": module, "command": install_command(extra)}
            yield view.problem(f"{key}.step", Reason("sources.library-missing", params), name)


def _evaluation_problem(view: View, pattern: str, step: ContaminationSpec) -> Reason | None:
    """Return the problem of evaluation files: none matches, or the first items of one cannot be read."""
    from scaletrain_cli.data.steps.evaluation_files import evaluation_items

    names = glob.glob(str(view.folder / expand_home(pattern)), recursive=True)
    files = [path for path in sorted(map(Path, names)) if path.is_file()]
    if not files:
        return Reason("document_steps.files-missing", {"pattern": pattern})
    for path in files[:: -(-len(files) // _EVALUATION_FILES_READ)]:
        try:
            for _ in islice(evaluation_items([glob.escape(str(path))], step.fields), _ITEMS_READ):
                pass
        except ScaletrainError as error:
            return error.reason or Reason("checks.source-file", {"why": str(error)})
    return None


def _list_problem(path: Path) -> Reason | None:
    """Return the problem of a list of words: it cannot be read, or is empty."""
    try:
        with open_to_read(path) as file:
            content = file.read(_LARGEST_LIST_BYTES)
        content[: content.rfind(b"\n") + 1 or len(content)].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        return Reason("document_steps.file-unreadable", {"file": str(path), "error": said})
    return None if content.strip() else Reason("document_steps.no-bad-words", {"file": str(path)})


# Check sources that are already tokenized: no step reads their text, and their ids are those of the tokenizer.


_FILES_READ = 2


def token_source_problem(
    view: View, name: str, files: Sequence[SourceFile], *, reads_ids: bool = True
) -> Reason | None:
    """Return why the files of a source cannot be used with the settings, if they hold tokens.

    ``reads_ids``: compare their first ids with the tokenizer. Raises UsageError if only some of them hold tokens.
    """
    from scaletrain_cli.data.pipeline.chain import applies
    from scaletrain_cli.data.pipeline.tasks import Source

    source = Source(name, tuple(files), "")
    if not source.is_tokenized:
        return None
    if view.spec.data.tokenizer.kind == "bpe":
        return Reason("data.tokens-without-tokenizer", {"source": name})
    try:
        for step in view.spec.data.prepare:
            applies(step, source)
    except UsageError as error:
        return error.reason
    return _id_problem(view, files) if reads_ids else None


def _id_problem(view: View, files: Sequence[SourceFile]) -> Reason | None:
    """Return the problem of the first id that the tokenizer does not have, among the beginnings of some files."""
    from scaletrain_cli.data.sources.formats import read_beginning
    from scaletrain_cli.data.sources.records import Columns, TokenRecord

    if (size := _size_of_vocabulary(view)) is None:
        return None
    for file in files[:: -(-len(files) // _FILES_READ)]:
        for record in read_beginning(file, Columns()).documents:
            if isinstance(record, TokenRecord) and len(record.tokens) and (largest := int(record.tokens.max())) >= size:
                return Reason("sources.id-outside-vocabulary", {"id": largest, "size": size})
    return None


def _size_of_vocabulary(view: View) -> int | None:
    """Return the number of ids of the tokenizer; None if it cannot be read here, which is another problem."""
    path = view.spec.data.tokenizer.path
    if path is None or is_reference(path) or view.unseen(path):
        return None
    try:
        return max(token_ids_of(view.folder / expand_home(path), view.spec).values()) + 1
    except (OSError, UsageError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
