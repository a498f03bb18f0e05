"""Check the weights and adapters that a run spec names, by their files and headers."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.plan.parameters import modules_with_adapter, stored_shapes
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, open_to_read
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import peft_settings_that_differ, unsupported_peft_keys
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.run import InitialWeights
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


def weights_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``model.weights`` and of weights of parts; after the first checkpoint they are not read."""
    if view.spec.code.own_program or view.begun:
        return
    for weights in view.spec.initial_weights:
        if not is_reference(weights.path) and not view.unseen(weights.path):
            reasons = folder_problems(view.folder / expand_home(weights.path), weights)
            yield from (view.problem(weights.key, reason, weights.path) for reason in reasons)


def folder_problems(folder: Path, weights: InitialWeights) -> Iterator[Reason]:
    """Yield what is wrong with the files of a folder of weights, with its config, or with its tensors."""
    if reason := weights_problem(folder):
        yield reason
        return
    if differing := list(config_problems(folder, weights)):
        yield from differing
        return
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
    from scaletrain_cli.spec.hugging_face import read_config

    try:
        config = read_config(folder)
    except SourceError:
        config = {}
    expected = {name: shape for name, shape in stored_shapes(model).items() if not is_drawn(model, name)}
    headers = {name: header for name, header in headers.items() if not is_drawn(model, name)}
    if isinstance(model, ClipVisionSpec):
        headers = {name: headers[stored] for name, stored in tower_names(headers).items()}
    differences = WeightDifferences(
        expected,
        headers,
        experts=getattr(model, "num_experts", 0),
        config=config,
        folder=place,
        may_lack_tokens=weights.may_lack_tokens,
    )
    problems = list(differences.problems())
    if problems and not differences.known:
        yield Reason("checks.weights-other-model", {"tensors": len(headers)})
    elif problems:
        shown = [str(problem).removesuffix(".") for problem in problems[:_MOST_SHOWN]]
        yield Reason("checks.weights-differ", {"count": len(problems), "shown": shown})


def config_problems(folder: Path, weights: InitialWeights) -> Iterator[Reason]:
    """Yield the differences between the weights' config.json and the model, or why it is unusable."""
    from scaletrain_cli.spec.hugging_face_weights import config_mismatches

    try:
        mismatches = list(config_mismatches(folder, weights.model, weights.section))
    except UsageError as error:
        yield Reason("checks.weights-config-unusable", {"why": error.message.rstrip(".")})
        return
    for problem in mismatches:
        params = {"setting": problem.subject, "difference": problem.message.rstrip("."), "remedy": str(problem.hint)}
        yield Reason("checks.weights-config-differs", params)


def adapter_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``model.adapter.weights``; after the first checkpoint they are not read."""
    given = adapter_weights(view.spec)
    if view.spec.code.own_program or given is None or is_reference(given) or view.begun or view.unseen(given):
        return
    reasons = _adapter_folder_problems(view.folder / expand_home(given), view.spec)
    yield from (view.problem("model.adapter.weights", reason, given) for reason in reasons)


def _adapter_folder_problems(folder: Path, spec: RunSpec) -> Iterator[Reason]:
    if not os.path.lexists(folder):
        yield Reason("checks.adapter-missing", {"folder": str(folder)})
        return
    if differing := list(adapter_config_problems(folder, getattr(spec.model, "adapter", None))):
        yield from differing
        return
    path = folder / "adapter_model.safetensors"
    try:
        if reason := factor_problem(lambda: read_headers(path), spec, str(path)):
            yield reason
    except OSError as error:
        yield Reason("checks.adapter-unreadable", {"said": f"{error.filename}: {error.strerror or error}"})


def factor_problem(read: Callable[[], Mapping[str, Header]], spec: RunSpec, path: str) -> Reason | None:
    """Return how the factors in a PEFT adapter differ from those of the spec's; None if they are the same.

    ``read``: returns the headers of its file, or raises DamagedHeaderError.
    """
    try:
        stored = {name: header.shape for name, header in read().items()}
    except DamagedHeaderError as damage:
        return damage_of(damage)
    model = spec.transformer
    if model.adapter is None or model.family not in BUILT_IN_FAMILIES:
        return None
    problems = list(peft_differences(peft_shapes(model.adapter, modules_with_adapter(model)), stored, path))
    if not problems:
        return None
    shown = [str(problem).removesuffix(".") for problem in problems[:_MOST_SHOWN]]
    return Reason("checks.adapter-tensors-differ", {"count": len(problems), "shown": shown})


def adapter_config_problems(folder: Path, adapter: object, name: str = "") -> Iterator[Reason]:
    """Yield why the adapter_config.json of a PEFT adapter cannot be used, or where it differs from the spec's.

    ``name``: the adapter as PEFT is given it; "" for the folder.
    """
    try:
        with open_to_read(folder / "adapter_config.json") as file:
            config = json.loads(file.read())
    except OSError as error:
        yield Reason("checks.adapter-unreadable", {"said": f"{error.filename}: {error.strerror or error}"})
        return
    except ValueError:
        yield Reason("checks.weights-file", {"file": "adapter_config.json"})
        return
    if not isinstance(config, dict):
        yield Reason("checks.weights-file", {"file": "adapter_config.json"})
        return
    if unsupported := unsupported_peft_keys(config):
        keys = [f"{key} = {str(value)[:80]}" for key, value in unsupported.items()]
        yield Reason("checks.adapter-unsupported", {"keys": keys, "folder": shlex.quote(name or str(folder))})
        return
    for key, (theirs, trained) in peft_settings_that_differ(config, adapter).items():
        yield Reason("checks.adapter-differs", {"key": key, "theirs": theirs, "value": str(trained).lower()})


def adapter_weights(spec: RunSpec) -> str | None:
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
        return Reason("checks.weights-pointer" if error.is_pointer else "checks.weights-file", {"file": error.file})
    return Reason("checks.weights-file-size", {"file": error.file, "bytes": error.found, "expected": error.expected})
