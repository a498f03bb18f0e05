"""Check the files that a run spec names: training data, tokenizer and weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from scaletrain_cli.errors import Problem, ScaletrainError, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.resource_checks.images import image_problems
from scaletrain_cli.launch.resource_checks.rows import problem_of_rows
from scaletrain_cli.plan.parameters import modules_with_adapter, stored_shapes
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.corpus_files import (
    EMBEDDED,
    EMBEDDED_SOURCES,
    FORMATS,
    ROW_FORMATS,
    NoCorpusError,
    find_files,
    kind_of,
    problems_of,
)
from scaletrain_cli.spec.evaluation import LmEvalTask, LossTask
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.hugging_face import read_config
from scaletrain_cli.spec.hugging_face_weights import config_mismatches
from scaletrain_cli.spec.image_files import IMAGE_SUFFIXES
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.preparation import C4Spec, ContaminationSpec
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.row_formats import IMAGE_MARK, TRAINED_IMAGE_TOKEN
from scaletrain_cli.spec.run import InitialWeights
from scaletrain_cli.spec.shared_paths import is_shared, parent_of_glob
from scaletrain_cli.spec.vision_model import ClipVisionSpec
from scaletrain_cli.spec.weight_files import (
    INDEX,
    SINGLE,
    DamagedHeaderError,
    Header,
    WeightDifferences,
    is_drawn,
    peft_differences,
    peft_shapes,
    read_headers,
    tower_names,
)

_MOST_SHOWN = 3  # differences of weights; a wrong number of layers would list hundreds


@dataclass(frozen=True)
class CheckResults:
    """The results. ``problems`` keep the run from starting; ``warnings`` name what could not be checked here."""

    problems: tuple[Problem, ...]
    warnings: tuple[Reason, ...]


@dataclass(frozen=True)
class View:
    """The machine and folder from which a spec is checked.

    ``folder``: the base of its relative paths. ``code``: the files kept of code.path, None if no snapshot was taken.
    ``begun``: a checkpoint was committed, so initial weights are not read. ``on_node``: checked on a node of the job.
    ``secrets``: names whose values are in the run directory. ``hub``: commits of references that the run has recorded.
    ``prepared``: names of the sources whose datasets the run has recorded: their files are not read again.
    """

    spec: RunSpec
    folder: Path
    environment: Mapping[str, str]
    code: Collection[str] | None = None
    begun: bool = False
    on_node: bool = False
    secrets: Collection[str] = ()
    hub: Mapping[str, str] = field(default_factory=dict)
    prepared: Collection[str] = ()

    def problem(self, key: str, reason: Reason, given: object) -> Problem:
        """Return the problem of a key of the spec, with the line of the key."""
        return Problem.because(self.spec.where(key), key, reason, given)

    def unseen(self, path: str) -> str:
        """Return where the ranks look for ``path`` if that is not visible from here; empty if it is."""
        return "" if self.on_node else backend_for(self.spec.cluster.scheduler).unseen_place(self, path)


def is_missing(path: str) -> bool:
    return not os.path.lexists(path) and is_shared(PurePosixPath(path))


def row_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``data.source`` if the built-in engine reads rows from it; for text see sources.py."""
    if view.spec.training.objective in LOSSES_OF:
        yield from image_problems(view)
        return
    source = view.spec.data.source
    if source is None or view.spec.code.own_program or source in EMBEDDED or is_reference(source) or view.prepared:
        return
    if view.spec.unit == "tokens" and view.spec.training.objective == "causal_lm":
        return
    if view.unseen(parent_of_glob(source)):
        return
    prepared = view.folder / expand_home(source)
    if (prepared / "dataset.json").is_file():
        if reason := prepared_problem(prepared, view):
            yield view.problem("data.source", reason, source)
        return
    rows = view.spec.training.objective != "causal_lm"
    try:
        found = find_files(source, view.folder, ROW_FORMATS if rows else FORMATS)
    except NoCorpusError as error:
        yield view.problem("data.source", Reason("checks.no-source", {"why": error.why}), source)
        return
    if rows:
        with_images = isinstance(view.spec.model, LlavaSpec)
        data, objective = view.spec.data, view.spec.training.objective
        if reason := problem_of_rows(found.files, data, objective, view.folder, images=with_images):
            yield view.problem("data.source", reason, source)
    else:
        for why in problems_of(found.files):
            yield view.problem("data.source", Reason("checks.source-file", {"why": why}), source)
    if _is_empty(found.files):
        yield view.problem("data.source", Reason("checks.no-text"), source)
    here = view.spec.cluster.traits.runs_here
    if here and any(kind_of(path) == "parquet" for path in found.files) and find_spec("pyarrow") is None:
        yield view.problem("data.source", Reason("checks.no-pyarrow"), source)


def evaluation_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of files and folders that ``evaluation.tasks`` name."""
    for number, task in enumerate(view.spec.evaluation.tasks):
        key = f"evaluation.tasks.{number}"
        if isinstance(task, LossTask) and task.source not in EMBEDDED and not view.unseen(parent_of_glob(task.source)):
            try:
                problems = problems_of(find_files(task.source, view.folder).files)
            except NoCorpusError as error:
                yield view.problem(f"{key}.source", Reason("checks.no-source", {"why": error.why}), task.source)
                continue
            for why in problems:
                yield view.problem(f"{key}.source", Reason("checks.source-file", {"why": why}), task.source)
        if not isinstance(task, LmEvalTask):
            continue
        folder = task.include_path
        if folder and not view.unseen(folder) and not (view.folder / expand_home(folder)).is_dir():
            yield view.problem(f"{key}.include_path", Reason("checks.no-folder", {"path": folder}), folder)
        path = view.spec.env.get("PATH", view.environment.get("PATH"))
        if view.spec.cluster.traits.runs_here and not shutil.which(task.command[0], path=path):
            params = {"program": task.command[0]}
            yield view.problem(f"{key}.command", Reason("checks.no-program", params), task.command[0])


def _is_empty(files: tuple[Path, ...]) -> bool:
    with contextlib.suppress(OSError):
        return not any(path.stat().st_size for path in files)
    return False


def tokenizer_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``data.tokenizer``: its file, or what the model does not fit in one that is trained."""
    path, size = view.spec.data.tokenizer.path, view.spec.data.tokenizer.vocab_size
    most = size if _of_networks(view.spec) else view.spec.language_model.vocab_size
    model, is_trained = view.spec.model, path is None and not view.spec.code.own_program
    if is_trained and size > most and _has_unprepared_source(view):
        why = Reason("checks.tokenizer-size", {"vocab_size": most})
        yield view.problem("data.tokenizer.vocab_size", why, size)
    token = model.image_token_index if isinstance(model, LlavaSpec) else TRAINED_IMAGE_TOKEN
    if is_trained and token != TRAINED_IMAGE_TOKEN and _has_unprepared_source(view):
        why = Reason("checks.trained-image-token", {"id": TRAINED_IMAGE_TOKEN, "mark": IMAGE_MARK})
        yield view.problem("model.image_token_index", why, token)
    if view.spec.code.own_program or path is None or is_reference(path) or view.unseen(path):
        return
    if reason := tokenizer_problem(view.folder / expand_home(path), view.spec):
        yield view.problem("data.tokenizer.path", reason, path)


def _of_networks(spec: RunSpec) -> bool:
    """Return True if a run trains a network for images, whose data have no tokens of a language model."""
    return spec.training.objective in LOSSES_OF


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
    """Yield the problems of ``data.chat_template``."""
    path = view.spec.data.chat_template
    if view.spec.code.own_program or path is None or is_reference(path) or view.unseen(path):
        return
    try:
        with open_to_read(view.folder / expand_home(path)) as file:
            file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        reason = Reason("checks.template-unreadable", {"said": said})
        is_missing = not os.path.lexists(view.folder / expand_home(path))
        yield view.problem("data.chat_template", Reason("checks.template-missing") if is_missing else reason, path)


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
    from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT

    try:
        ids = token_ids_of(path, spec)
        largest = max(ids.values())
    except UsageError as error:
        return getattr(error, "problem", None)  # a library that is missing here may be there on the nodes
    except OSError as error:
        if not os.path.lexists(path):
            return Reason("checks.tokenizer-missing")
        return Reason("checks.tokenizer-unreadable", {"said": error.strerror or str(error)})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return Reason("checks.tokenizer-invalid")
    if not any(name in ids for name in ENDS_OF_TEXT):
        return Reason("checks.tokenizer-no-end", {"tokens": list(ENDS_OF_TEXT)})
    if _of_networks(spec):
        return None
    if isinstance(spec.model, LlavaSpec):
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
        from scaletrain_cli.data.tokenizers.given import token_ids  # loads the library

        return token_ids(given, spec.data.tokenizer)
    content = json.loads(given)
    added, words = content.get("added_tokens") or [], content["model"]["vocab"]
    pairs = words.items() if isinstance(words, dict) else ((word[0], i) for i, word in enumerate(words))
    return dict(pairs) | {str(token["content"]): int(token["id"]) for token in added}


def weights_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``model.weights`` and of weights of parts; after the first checkpoint they are not read."""
    if view.spec.code.own_program or view.begun:
        return
    for weights in view.spec.initial_weights:
        if not is_reference(weights.path) and not view.unseen(weights.path):
            yield from (view.problem(weights.key, reason, weights.path) for reason in _folder_problems(view, weights))


def _folder_problems(view: View, weights: InitialWeights) -> Iterator[Reason]:
    folder = view.folder / expand_home(weights.path)
    if reason := weights_problem(folder):
        yield reason
        return
    try:
        differing = list(config_problems(folder, weights))
    except UsageError as error:
        yield Reason("checks.weights-config-unusable", {"why": error.message.rstrip(".")})
        return
    yield from differing or tensor_problems(folder, weights)


def tensor_problems(folder: Path, weights: InitialWeights) -> Iterator[Reason]:
    """Yield how the tensors of a folder of complete files differ from those of the model, by the files' headers."""
    index = folder / INDEX
    names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {SINGLE}
    headers: dict[str, Header] = {}
    for name in sorted(map(str, names)):
        headers |= read_headers(folder / name)
    yield from header_problems(headers, folder, weights, str(folder))


def header_problems(
    headers: Mapping[str, Header], folder: Path, weights: InitialWeights, place: str
) -> Iterator[Reason]:
    """Yield how tensors differ from those of the model. ``folder``: has config.json; ``place``: for the message.

    Models of families that others have added are not compared: their names are their own.
    """
    model = weights.model
    if isinstance(model, ModelSpec) and model.family not in BUILT_IN_FAMILIES:
        return
    try:
        config = read_config(folder)
    except SourceError:
        config = {}
    expected = {name: shape for name, shape in stored_shapes(model).items() if not is_drawn(model, name)}
    headers = {name: header for name, header in headers.items() if not is_drawn(model, name)}
    if isinstance(model, ClipVisionSpec):
        headers = {name: headers[stored] for name, stored in tower_names(headers).items()}
    found = WeightDifferences(
        expected,
        headers,
        experts=getattr(model, "num_experts", 0),
        config=config,
        folder=place,
        may_lack_tokens=weights.may_lack_tokens,
    )
    problems = list(found.problems())
    if problems and not found.known:
        yield Reason("checks.weights-other-model", {"tensors": len(headers)})
    elif problems:
        shown = [str(problem).removesuffix(".") for problem in problems[:_MOST_SHOWN]]
        yield Reason("checks.weights-differ", {"count": len(problems), "shown": shown})


def config_problems(folder: Path, weights: InitialWeights) -> Iterator[Reason]:
    """Yield the differences between the weights' config.json and the model. Raises UsageError if it is unusable."""
    for problem in config_mismatches(folder, weights.model, weights.section):
        params = {"setting": problem.subject, "difference": problem.message.rstrip("."), "remedy": str(problem.hint)}
        yield Reason("checks.weights-config-differs", params)


def adapter_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``model.adapter.weights``; after the first checkpoint they are not read."""
    given = _adapter_weights(view.spec)
    if view.spec.code.own_program or given is None or is_reference(given) or view.begun or view.unseen(given):
        return
    folder = view.folder / expand_home(given)
    if not os.path.lexists(folder):
        yield view.problem("model.adapter.weights", Reason("checks.adapter-missing", {"folder": str(folder)}), given)
        return
    differing = list(adapter_config_problems(folder, getattr(view.spec.model, "adapter", None)))
    for reason in differing:
        yield view.problem("model.adapter.weights", reason, given)
    if differing:
        return
    path = folder / "adapter_model.safetensors"
    try:
        stored = {name: header.shape for name, header in read_headers(path).items()}
    except DamagedHeaderError as damage:
        yield view.problem("model.adapter.weights", damage_of(damage), given)
        return
    except OSError as error:
        said = f"{error.filename}: {error.strerror or error}"
        yield view.problem("model.adapter.weights", Reason("checks.adapter-unreadable", {"said": said}), given)
        return
    different = factor_problem(stored, view.spec, str(path))
    if different is not None:
        yield view.problem("model.adapter.weights", different, given)


def factor_problem(stored: Mapping[str, tuple[int, ...]], spec: RunSpec, path: str) -> Reason | None:
    """Return how the factors in a PEFT adapter differ from those of the spec's; None if they are the same."""
    model = spec.transformer
    if model.adapter is None or model.family not in BUILT_IN_FAMILIES:
        return None
    problems = list(peft_differences(peft_shapes(model.adapter, modules_with_adapter(model)), stored, path))
    if not problems:
        return None
    shown = [str(problem).removesuffix(".") for problem in problems[:_MOST_SHOWN]]
    return Reason("checks.adapter-tensors-differ", {"count": len(problems), "shown": shown})


def adapter_config_problems(folder: Path, adapter: object) -> Iterator[Reason]:
    """Yield why the adapter_config.json of a PEFT adapter cannot be read, or where it differs from the spec's."""
    try:
        with open_to_read(folder / "adapter_config.json") as file:
            config = json.loads(file.read())
    except OSError as error:
        yield Reason("checks.adapter-unreadable", {"said": f"{error.filename}: {error.strerror or error}"})
        return
    except ValueError:
        yield Reason("checks.weights-file", {"file": "adapter_config.json"})
        return
    for key, theirs in (("rank", "r"), ("alpha", "lora_alpha"), ("rslora", "use_rslora"), ("dora", "use_dora")):
        trained = config.get(theirs) if isinstance(config, dict) else None
        if trained is not None and trained != getattr(adapter, key):
            yield Reason("checks.adapter-differs", {"key": key, "theirs": theirs, "value": str(trained).lower()})


def _adapter_weights(spec: RunSpec) -> str | None:
    adapter = getattr(spec.model, "adapter", None)
    return None if adapter is None else adapter.weights


def weights_problem(folder: Path) -> Reason | None:
    """Return the problem of a folder of weights; None if its files are complete."""
    if not folder.is_dir():
        return Reason("checks.weights-no-folder" if folder.exists() else "checks.weights-missing")
    try:
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if not index.exists() and not (folder / "model.safetensors").exists():
            return Reason("checks.weights-no-files")
        if index.is_file():
            named = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
            if missing := sorted(name for name in named if not (folder / name).is_file()):
                return Reason("checks.weights-incomplete", {"files": missing})
        return next((problem for path in files if (problem := _safetensors_problem(path))), None)
    except OSError as error:
        return Reason("checks.weights-unreadable", {"said": str(error)})
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reason("checks.weights-index")


def _safetensors_problem(path: Path) -> Reason | None:
    """Return the problem of a safetensors file; None for a valid one. Raises OSError."""
    try:
        read_headers(path)
    except DamagedHeaderError as error:
        return damage_of(error)
    return None


def damage_of(error: DamagedHeaderError) -> Reason:
    """Return the reason of an invalid or incomplete file."""
    if error.found is None:
        return Reason("checks.weights-file", {"file": error.file})
    params = {"file": error.file, "bytes": error.found, "expected": error.expected}
    return Reason("checks.weights-file-size", params)


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
            found, expected = (folder / f"{split}.bin").stat().st_size // width, info[f"{split}_tokens"]
            if found != expected:
                params = {"file": f"{split}.bin", "tokens": found, "expected": expected}
                return Reason("checks.dataset-size", params)
        vocab_size, tokens = int(info["vocab_size"]), int(info["train_tokens"])
        objective, length = info.get("objective", "causal_lm"), info.get("seq_len")
        packed = info.get("packing") or "none"
    except OSError as error:
        return Reason("checks.dataset-incomplete", {"said": f"{error.filename}: {error.strerror or error}"})
    except (ValueError, KeyError, TypeError):
        return Reason("checks.dataset-unreadable")
    if _of_networks(spec):
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
    if _of_networks(spec):
        return None
    if vocab_size > spec.language_model.vocab_size:
        return Reason("checks.dataset-vocabulary", {"tokens": vocab_size, "vocab_size": spec.language_model.vocab_size})
    if spec.training.objective != "causal_lm":
        return Reason("checks.dataset-objective", {"found": "causal_lm", "objective": spec.training.objective})
    length = spec.language_model.seq_len
    if len(spec.data.all_sources) == 1 and tokens <= length:
        return Reason("checks.dataset-too-short", {"tokens": tokens, "seq_len": length})
    return None


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
        **{each.key: None if own or view.begun else each.path for each in spec.initial_weights},
        "model.adapter.weights": None if own or view.begun else _adapter_weights(spec),
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


def _paths_of_steps(spec: RunSpec) -> dict[str, str]:
    """Return the files that the steps of data.prepare read, by key."""
    found: dict[str, str] = {}
    for number, step in enumerate(spec.data.prepare):
        key = f"data.prepare.{number}"
        if isinstance(step, ContaminationSpec):
            found |= {f"{key}.files.{each}": path for each, path in enumerate(step.files)}
        elif isinstance(step, C4Spec) and step.bad_words is not None:
            found[f"{key}.bad_words"] = step.bad_words
    return found


def not_recorded(view: View) -> Iterator[Reason]:
    """Yield a note on settings of a new run that its prepared rows do not record, or that cannot be compared here."""
    source = view.spec.data.source
    own = view.spec.code.own_program or view.spec.training.objective not in ("sft", "dpo") or source in EMBEDDED
    if source is None or own or view.begun or is_reference(source) or view.unseen(parent_of_glob(source)):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        info = json.loads((view.folder / expand_home(source) / "dataset.json").read_bytes())
        found = view.spec.data.differences(info, view.folder)
        if named := [f"data.{key} = {value}" for key, value, recorded in found if not recorded]:
            yield Reason("checks.dataset-setting-unknown", {"source": source, "settings": named})


def not_read(view: View) -> Iterator[Reason]:
    """Yield a note on files of the data folder that the engine does not read."""
    source = view.spec.data.source
    if source is None or view.spec.code.own_program or source in EMBEDDED or is_reference(source) or view.prepared:
        return
    if view.unseen(parent_of_glob(source)) or (view.folder / expand_home(source) / "dataset.json").is_file():
        return
    if view.spec.training.objective not in ("sft", "dpo"):
        return
    with contextlib.suppress(UsageError):
        left_out = find_files(source, view.folder, ROW_FORMATS).not_read
        if isinstance(view.spec.model, LlavaSpec):  # images that rows name
            left_out = {suffix: n for suffix, n in left_out.items() if suffix.strip(".") not in IMAGE_SUFFIXES}
        if left_out:
            kinds = [f"{count} {suffix}" for suffix, count in sorted(left_out.items())]
            yield Reason("checks.files-not-read", {"key": "data.source", "source": source, "kinds": kinds})
