"""Check the files that a run spec names: training data, tokenizer, templates and classes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import Problem, ScaletrainError, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.resource_checks.images import image_problems
from scaletrain_cli.launch.resource_checks.view import View, notes_on_files
from scaletrain_cli.launch.resource_checks.weights import adapter_weights
from scaletrain_cli.reasons import Reason, as_reason
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import DataSpec, LlavaSpec, RunSpec
from scaletrain_cli.spec.corpus_files import (
    EMBEDDED,
    EMBEDDED_SOURCES,
    IMAGE_SUFFIXES,
    ROW_FORMATS,
    NoCorpusError,
    find_files,
    kind_of,
    parquet_names,
    parquet_problem,
    sample_of,
    unreadable_among,
)
from scaletrain_cli.spec.data import FORMATS_OF, FORMATS_WITH_IMAGES
from scaletrain_cli.spec.evaluation import LmEvalTask, LossTask
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.row_examples import RowError, images_of, require_format_with_images
from scaletrain_cli.spec.row_formats import columns_of, format_of, parse_row
from scaletrain_cli.spec.shared_paths import parent_of_glob
from scaletrain_cli.spec.sources import SourceSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.tokenizers.chat_templates import TemplateFiles


def row_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of sources that the built-in engine reads rows from; for text see sources.py."""
    if view.spec.training.objective in LOSSES_OF:
        yield from image_problems(view)
        return
    if view.prepared or (view.spec.unit == "tokens" and view.spec.training.objective == "causal_lm"):
        return
    for section, (key, source) in zip(view.spec.data.all_sources, view.spec.data.paths(), strict=True):
        prepared = view.folder / expand_home(source)
        if not _is_seen(view, source) or not (prepared / "dataset.json").is_file():
            yield from _problems_of_rows(view, key, source, validation=False)
        elif reason := prepared_problem(prepared, view):
            yield view.problem(key, reason, source)
        elif section.validation_path is not None:
            yield view.problem(key, Reason("data.validation-rows-of-prepared"), source)
    for key, source in view.spec.data.validation_paths():
        yield from _problems_of_rows(view, key, source, validation=True)


def _is_seen(view: View, source: str) -> bool:
    """Return whether this machine has the files that the built-in engine reads at a path."""
    is_local = source not in EMBEDDED and not is_reference(source)
    return is_local and not view.spec.code.own_program and not view.unseen(parent_of_glob(source))


def _problems_of_rows(view: View, key: str, source: str, *, validation: bool) -> Iterator[Problem]:
    if not _is_seen(view, source):
        return
    try:
        corpus = find_files(source, view.folder, ROW_FORMATS, evaluation=validation)
    except NoCorpusError as error:
        yield view.problem(key, Reason("checks.no-source", {"why": error.why}), source)
        return
    with_images, templates = isinstance(view.spec.model, LlavaSpec), None
    with contextlib.suppress(UsageError):  # the check of the templates reports it
        templates = _templates(view)
    data, objective = view.spec.data, view.spec.training.objective
    if reason := problem_of_rows(corpus.files, data, objective, view.folder, templates, images=with_images):
        yield view.problem(key, reason, source)
    with contextlib.suppress(OSError):
        if not any(path.stat().st_size for path in corpus.files):
            yield view.problem(key, Reason("checks.no-text"), source)
    here = view.spec.cluster.traits.runs_here
    if here and any(kind_of(path) in ("parquet", "arrow") for path in corpus.files) and find_spec("pyarrow") is None:
        yield view.problem(key, Reason("checks.no-pyarrow"), source)


def _text_problem(source: str, view: View, key: str) -> Reason | None:
    """Return the first problem of files of text, by their beginnings; None where this machine does not have them."""
    from scaletrain_cli.data.sources.formats import first_fault
    from scaletrain_cli.data.sources.listing import source_files
    from scaletrain_cli.data.sources.records import Columns

    if source in EMBEDDED or view.unseen(parent_of_glob(source)):
        return None
    try:
        files = source_files(SourceSpec(name="evaluation", path=source), view.folder, key, evaluation=True)
        fault = first_fault(files, Columns(), skips_bad=False)
    except NoCorpusError as error:
        return Reason("checks.no-source", {"why": error.why})
    except (UsageError, OSError) as error:
        return getattr(error, "reason", None) or Reason("checks.source-file", {"why": str(error)})
    return fault and Reason("checks.source-file", {"why": f"{fault.place}: {fault.reason}"})


def evaluation_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of files and folders that ``evaluation.tasks`` name."""
    for number, task in enumerate(view.spec.evaluation.tasks):
        key = f"evaluation.tasks.{number}"
        if isinstance(task, LossTask) and (reason := _text_problem(task.source, view, f"{key}.source")):
            yield view.problem(f"{key}.source", reason, task.source)
        if not isinstance(task, LmEvalTask):
            continue
        folder = task.include_path
        if folder and not view.unseen(folder) and not (view.folder / expand_home(folder)).is_dir():
            yield view.problem(f"{key}.include_path", Reason("checks.no-folder", {"path": folder}), folder)
        path = view.spec.env.get("PATH", view.environment.get("PATH"))
        if view.spec.cluster.traits.runs_here and not shutil.which(task.command[0], path=path):
            params = {"program": task.command[0]}
            yield view.problem(f"{key}.command", Reason("checks.no-program", params), task.command[0])


def tokenizer_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``data.tokenizer``: its file, or what the model does not fit in one that is trained."""
    path, size = view.spec.data.tokenizer.path, view.spec.data.tokenizer.vocab_size
    most = size if view.spec.training.objective in LOSSES_OF else view.spec.language_model.vocab_size
    model, is_trained = view.spec.model, path is None and not view.spec.code.own_program
    if is_trained and size > most and _has_unprepared_source(view):
        why = Reason("checks.tokenizer-size", {"vocab_size": most})
        yield view.problem("data.tokenizer.vocab_size", why, size)
    if is_trained and isinstance(model, LlavaSpec) and _has_unprepared_source(view):
        from scaletrain_cli.spec.row_examples import IMAGE_MARK, TRAINED_IMAGE_TOKEN

        if model.image_token_index != TRAINED_IMAGE_TOKEN:
            why = Reason("checks.trained-image-token", {"id": TRAINED_IMAGE_TOKEN, "mark": IMAGE_MARK})
            yield view.problem("model.image_token_index", why, model.image_token_index)
    if view.spec.code.own_program or path is None or is_reference(path) or view.unseen(path):
        return
    if reason := tokenizer_problem(view.folder / expand_home(path), view.spec):
        yield view.problem("data.tokenizer.path", reason, path)


def _has_unprepared_source(view: View) -> bool:
    """Return True if a source that is visible here is no prepared dataset."""
    from scaletrain_cli.data.prepared import is_dataset

    for key, path in view.spec.data.paths():
        if view.unseen(parent_of_glob(path)):
            continue
        with contextlib.suppress(ScaletrainError):  # the checks of the sources report it
            if path in EMBEDDED or is_reference(path) or not is_dataset(path, key, view.folder):
                return True
    return False


def template_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``data.chat_template``, or of the chat templates of the tokenizer that rows may need."""
    path = view.spec.data.chat_template
    if view.spec.code.own_program or path is None or is_reference(path) or view.unseen(path):
        key, given = "data.tokenizer.path", view.spec.data.tokenizer.path
    elif not (view.folder / expand_home(path)).is_file():
        yield view.problem("data.chat_template", Reason("checks.template-missing"), path)
        return
    else:
        key, given = "data.chat_template", path
    try:
        if (files := _templates(view)) is not None and find_spec("jinja2") is not None:
            from scaletrain_cli.data.tokenizers.template_environment import template_environment

            for source in files.templates.values():
                template_environment(view.spec.data.chat_template_date).limited(source)
    except UsageError as error:
        yield view.problem(key, as_reason(error.reason or error.message), given)


def _templates(view: View) -> TemplateFiles | None:
    """Return the chat templates of a run on rows; None where it needs none, or they are not here. Raises UsageError."""
    data = view.spec.data
    paths = [path for path in (data.chat_template, data.tokenizer.path) if path is not None]
    if view.spec.training.objective not in ("sft", "dpo") or view.spec.code.own_program or view.prepared:
        return None
    if not _has_unprepared_source(view) or any(is_reference(path) or view.unseen(path) for path in paths):
        return None
    from scaletrain_cli.data.tokenizers.chat_templates import template_files

    return template_files(view.spec, view.folder)


def class_file_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``data.images.classes``."""
    path, key = view.spec.data.images.classes, "data.images.classes"
    if view.spec.code.own_program or path is None or view.prepared or view.unseen(path):
        return
    try:
        with open_to_read(view.folder / expand_home(path)) as file:
            names = [line for line in file.read().decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        yield view.problem(key, Reason("checks.classes-unreadable", {"said": said}), path)
        return
    labels = getattr(view.spec.model, "num_labels", None)
    if len(names) != labels:
        yield view.problem(key, Reason("checks.classes-differ", {"names": len(names), "labels": labels}), path)


def image_folder_problems(view: View) -> Iterator[Problem]:
    """Yield the problem of ``data.images.folder``, if there is no such folder."""
    path = view.spec.data.images.folder
    if view.spec.code.own_program or path is None or view.prepared or view.unseen(path):
        return
    if not (view.folder / expand_home(path)).is_dir():
        yield view.problem("data.images.folder", Reason("checks.no-folder", {"path": path}), path)


def tokenizer_problem(path: Path, spec: RunSpec) -> Reason | None:
    """Return the problem of a tokenizer.json, or of a tokenizer file of another library; None for a valid one."""
    from scaletrain_cli.data.tokenizers.files import require_stated_ends, special_tokens
    from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT, LFS_POINTER

    ends = set(ENDS_OF_TEXT)
    try:
        ids = token_ids_of(path, spec)
        largest = max(ids.values())
        if spec.data.tokenizer.kind == "file" and spec.training.objective == "causal_lm":
            require_stated_ends(str(path), spec.data.tokenizer.tokenizer_class)
        elif spec.data.tokenizer.kind == "file":  # rows end with the eos_token that is stated
            ends.add(special_tokens(path.parent).get("eos_token", ""))
    except UsageError as error:
        return getattr(error, "problem", None)  # a library that is missing here may be there on the nodes
    except OSError as error:
        if not os.path.lexists(path):
            return Reason("checks.tokenizer-missing")
        return Reason("checks.tokenizer-unreadable", {"said": error.strerror or str(error)})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        is_pointer = path.read_bytes().startswith(LFS_POINTER.encode())
        return Reason("data.git-lfs-pointer" if is_pointer else "checks.tokenizer-invalid")
    if ends.isdisjoint(ids):
        return Reason("checks.tokenizer-no-end", {"tokens": list(ENDS_OF_TEXT)})
    if spec.training.objective in LOSSES_OF:
        return None
    if isinstance(spec.model, LlavaSpec):
        from scaletrain_cli.spec.row_examples import IMAGE_MARK

        own = spec.model.image_token_index
        if own not in ids.values():
            params = {"id": own, "mark": IMAGE_MARK, "usual": ids.get(IMAGE_MARK)}
            return Reason("data.no-image-token", params)
        largest = max(number for number in ids.values() if number != own)
    if largest >= spec.language_model.vocab_size:
        params = {"largest": largest, "vocab_size": spec.language_model.vocab_size}
        return Reason("checks.tokenizer-vocabulary", params)
    return None


def token_ids_of(path: Path, spec: RunSpec) -> dict[str, int]:
    """Return ids by token, the largest and those of special tokens at least.

    Raises OSError, UsageError, and the errors of a tokenizer.json that is none: ValueError, KeyError and others.
    """
    with open_to_read(path) as file:
        given = file.read()
    if spec.data.tokenizer.kind in ("sentencepiece", "tiktoken"):
        from scaletrain_cli.data.tokenizers.load import token_ids  # loads the library

        return token_ids(given, spec.data.tokenizer.model_copy(update={"path": str(path)}))
    from scaletrain_cli.data.tokenizers.files import with_files_beside

    content = json.loads(with_files_beside(given, path, spec.data.tokenizer.tokenizer_class))
    added, words = content.get("added_tokens") or [], content["model"]["vocab"]
    pairs = words.items() if isinstance(words, dict) else ((word[0], i) for i, word in enumerate(words))
    return dict(pairs) | {str(token["content"]): int(token["id"]) for token in added}


def not_checked(view: View) -> Iterator[Reason]:
    """Yield a note for each location that is not visible here, with the keys that refer to it."""
    spec = view.spec
    own = spec.code.own_program
    paths = {
        **{key: None if own or path in EMBEDDED_SOURCES else path for key, path in spec.data_paths()},
        "evaluation.zero_shot.classes": None if own else getattr(spec.evaluation.zero_shot, "classes", None),
        "data.tokenizer.path": None if own else spec.data.tokenizer.path,
        "data.chat_template": None if own else spec.data.chat_template,
        "data.images.classes": None if own or view.prepared else spec.data.images.classes,
        "data.images.folder": None if own or view.prepared else spec.data.images.folder,
        **{weights.key: None if own or view.begun else weights.path for weights in spec.initial_weights},
        "model.adapter.weights": None if own or view.begun else adapter_weights(spec),
        "checkpoint.dir": None if spec.checkpoint.dir == "auto" else spec.checkpoint.dir,
    }
    places: dict[str, list[str]] = {}
    for key, path in paths.items():
        if path is None or is_reference(path) or "://" in path:
            continue
        if place := view.unseen(parent_of_glob(path)):
            places.setdefault(place, []).append(f"{key} = {path}")
    for place, named in places.items():
        yield Reason("checks.not-checked", {"keys": named, "place": place})


def not_recorded(view: View) -> Iterator[Reason]:
    """Yield a note on settings of a new run that its prepared rows do not record, or that cannot be compared here."""
    if view.spec.training.objective not in ("sft", "dpo") or view.begun:
        return
    for _, source in view.spec.data.paths():
        if not _is_seen(view, source):
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            info = json.loads((view.folder / expand_home(source) / "dataset.json").read_bytes())
            differences = view.spec.data.differences(info, view.folder)
            if named := [f"data.{key} = {value}" for key, value, recorded in differences if not recorded]:
                yield Reason("checks.dataset-setting-unknown", {"source": source, "settings": named})


def not_read(view: View) -> Iterator[Reason]:
    """Yield a note on files of the data folder that the engine does not read."""
    if view.spec.training.objective not in ("sft", "dpo") or view.prepared:
        return
    for key, source in view.spec.data.paths():
        if not _is_seen(view, source) or (view.folder / expand_home(source) / "dataset.json").is_file():
            continue
        with contextlib.suppress(UsageError):
            left_out = find_files(source, view.folder, ROW_FORMATS).not_read
            if isinstance(view.spec.model, LlavaSpec):  # images that rows name
                left_out = {suffix: n for suffix, n in left_out.items() if suffix.strip(".") not in IMAGE_SUFFIXES}
            yield from notes_on_files(key, source, left_out)


def prepared_problem(folder: Path, view: View) -> Reason | None:
    """Return the problem of a folder of prepared data, of any version; None if the run can use it."""
    from scaletrain_cli.data.images.compatibility import rows_problem

    spec = view.spec
    try:
        info = json.loads((folder / "dataset.json").read_bytes())
        if "shards" in info:
            return _shards_problem(folder, view)
        width = {"uint16": 2, "uint32": 4}[info["dtype"]]
        for split in ("train", "validation"):
            stored, expected = (folder / f"{split}.bin").stat().st_size // width, info[f"{split}_tokens"]
            if stored != expected:
                return Reason("checks.dataset-size", {"file": f"{split}.bin", "tokens": stored, "expected": expected})
        vocab_size, tokens = int(info["vocab_size"]), int(info["train_tokens"])
        objective, length = info.get("objective", "causal_lm"), info.get("seq_len")
        packed = info.get("packing") or "none"
    except OSError as error:
        return Reason("checks.dataset-incomplete", {"said": f"{error.filename}: {error.strerror or error}"})
    except (ValueError, KeyError, TypeError):
        return Reason("checks.dataset-unreadable")
    if spec.training.objective in LOSSES_OF:
        return None
    model = spec.language_model
    if vocab_size > model.vocab_size:
        return Reason("checks.dataset-vocabulary", {"tokens": vocab_size, "vocab_size": model.vocab_size})
    if objective != spec.training.objective:
        return Reason("checks.dataset-objective", {"found": objective, "objective": spec.training.objective})
    if length is not None:  # rows for fine-tuning, which have any number of tokens
        if length != model.seq_len:
            return Reason("checks.dataset-length", {"found": length, "seq_len": model.seq_len})
        if problem := rows_problem(spec, info, folder):
            return problem
        packing = {"found": packed, "packing": spec.data.packing}
        if packed != spec.data.packing:
            return Reason("checks.dataset-packing", packing)
        for key, value, recorded in () if view.begun else spec.data.differences(info, view.folder):
            if recorded:
                return Reason("checks.dataset-setting", {"key": key, "value": value, "found": recorded})
        return None
    if tokens <= model.seq_len:
        return Reason("checks.dataset-too-short", {"tokens": tokens, "seq_len": model.seq_len})
    return None


def _shards_problem(folder: Path, view: View) -> Reason | None:
    """Return the problem of prepared text in shards: the sizes and hashes of its files, and its token ids."""
    from scaletrain_cli.data.chunk_hashes import CorruptDataError
    from scaletrain_cli.data.token_files import open_source

    try:
        info, _ = open_source(folder)
    except ScaletrainError as error:
        if isinstance(error, CorruptDataError) and view.on_node and view.begun:
            return None  # the engine ends the run: another node has the same data
        return error.reason or Reason("checks.dataset-incomplete", {"said": str(error)})
    except OSError as error:
        return Reason("checks.dataset-incomplete", {"said": f"{error.filename}: {error.strerror or error}"})
    return description_problem(info, view.spec)


def description_problem(info: Mapping[str, Any], spec: RunSpec) -> Reason | None:
    """Return why a run cannot use prepared text in shards with this dataset.json; None if it can."""
    try:
        vocab_size, tokens = int(info["tokenizer"]["vocab_size"]), int(info["train_tokens"])
    except (KeyError, TypeError, ValueError):
        return Reason("checks.dataset-unreadable")
    if spec.training.objective in LOSSES_OF:
        return None
    if vocab_size > spec.language_model.vocab_size:
        return Reason("checks.dataset-vocabulary", {"tokens": vocab_size, "vocab_size": spec.language_model.vocab_size})
    if spec.training.objective != "causal_lm":
        return Reason("checks.dataset-objective", {"found": "causal_lm", "objective": spec.training.objective})
    length = spec.language_model.seq_len
    if len(spec.data.all_sources) == 1 and tokens <= length:
        return Reason("checks.dataset-too-short", {"tokens": tokens, "seq_len": length})
    return None


_ROWS_PER_FILE = 8


def problem_of_rows(
    files: tuple[Path, ...],
    data: DataSpec,
    objective: str,
    folder: Path,
    templates: TemplateFiles | None = None,
    *,
    images: bool = False,
) -> Reason | None:
    """Return the first problem of the files, or of the first rows of a sample of them; None if there is none.

    ``images``: rows may have images, whose files must exist. ``folder``: the base of a relative data.images.folder.
    ``templates``: one must be there for rows with messages; None if that is not known.
    """
    if unreadable := unreadable_among(files):
        return Reason("checks.source-file", {"why": unreadable})
    for path in sample_of(files):
        try:
            if kind_of(path) == "parquet":
                if why := parquet_problem(path):
                    return Reason("checks.source-file", {"why": f"{path}: {why}"})
                problem = _parquet_problem(path, data, objective, templates, images=images)
            elif kind_of(path) != "arrow" or find_spec("pyarrow") is not None:
                beside = path.parent if data.images.folder is None else folder / expand_home(data.images.folder)
                problem = _problem_of_first_rows(path, data, objective, templates, beside if images else None)
            if problem:
                return problem
        except UsageError as error:
            return error.reason
        except OSError as error:
            return Reason("checks.source-file", {"why": f"{path}: cannot be read: {error.strerror or error}"})
    return None


def _problem_of_first_rows(
    path: Path, data: DataSpec, objective: str, templates: TemplateFiles | None, images: Path | None
) -> Reason | None:
    """``images``: the folder of the images of the rows; None: rows have none."""
    from scaletrain_cli.data.sources.rows import Tally, rows_in  # which imports numpy

    row_format: str = data.format
    for where, row, _ in islice(rows_in(path, Tally()), _ROWS_PER_FILE):
        try:
            if row_format == "auto":
                row_format = format_of(row, objective, data.fields)
            if images is not None:
                require_format_with_images(row_format)
            example = parse_row(row, row_format, data.fields, images=images is not None).example
        except RowError as error:
            if data.on_bad == "stop":
                return error.at(where)
            continue
        try:
            if templates is not None:  # else each row would be a bad one
                templates.require_template(example, data.tokenizer.path or "bpe")
        except RowError as error:
            return error.at(where)
        if images is None:
            continue
        for name, content in images_of(row, data.fields):
            if content is None and not (images / expand_home(name)).is_file():
                return Reason("checks.row-without-image", {"where": where, "path": str(images / expand_home(name))})
    return None


def _parquet_problem(
    path: Path, data: DataSpec, objective: str, templates: TemplateFiles | None, *, images: bool
) -> Reason | None:
    """Return the problem of a parquet file by the names in its footer: reading it requires pyarrow."""
    of_objective = FORMATS_WITH_IMAGES if images else FORMATS_OF[objective]
    needed = []
    for row_format in of_objective if data.format == "auto" else (data.format,):
        (columns,) = columns_of(row_format, objective, data.fields)
        needed.append(" and ".join(columns))
        if parquet_names(path, columns) != columns:
            continue
        if row_format in ("messages", "sharegpt", "alpaca") and templates is not None:
            try:
                templates.template_for(None, data.tokenizer.path or "bpe")
            except RowError as error:
                return error.at(str(path))
        return None
    return RowError("parquet-columns", needed=needed).at(str(path))
