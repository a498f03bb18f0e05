"""Load a RunSpec from YAML and ``--set`` overrides; an error lists every problem with its line."""

import copy
import dataclasses
import errno
import json
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ValidationError

from scaletrain_cli.errors import Problem, ScaletrainError, SpecError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.sent_run import sent
from scaletrain_cli.spec.backend_traits import DEFAULT, backend_traits
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.clusters_file import Cluster, choose_cluster
from scaletrain_cli.spec.presets import (
    DERIVED_FROM,
    SourceError,
    derived_dimensions,
    hub_presets,
    merged,
    presets,
    vision_presets,
)
from scaletrain_cli.spec.problems import contradictions, field_problem, in_file, unused_keys
from scaletrain_cli.spec.run import MODELS, RunSpec, model_kind
from scaletrain_cli.spec.secrets import with_secrets
from scaletrain_cli.spec.source import Source, apply_override, parse_yaml, shown
from scaletrain_cli.spec.tracking import name_trackers
from scaletrain_cli.spec.vision_model import VISION
from scaletrain_cli.text import counted, did_you_mean

STDIN = "<stdin>"  # file name in errors for `-`
_PIPE_SECONDS = 10.0
_LARGEST_FILE_BYTES = 1_000_000  # a spec has about two thousand bytes; a larger file was named by mistake


def load_spec(path: str | PathLike[str], overrides: Sequence[str] = (), *, cluster: str | None = None) -> RunSpec:
    """Read, complete and validate a run spec; ``-`` is standard input. Raises SpecError with all problems.

    ``cluster`` names a cluster of clusters.yaml, which overrides the cluster section of the spec. Without it, the
    default cluster, if any, supplies keys that the spec leaves out.
    """
    path = Path(path)
    text = spec_text(path).decode("utf-8-sig")
    chosen = choose_cluster(cluster)
    return parse_spec(text, file=_shown_name(path), base_dir=path.parent, overrides=overrides, cluster=chosen)


def spec_text(path: Path) -> bytes:
    """Return the content of the file of a run spec, which is UTF-8; ``-`` is standard input. Raises SpecError."""
    name = _shown_name(path)
    try:
        data = _read_stdin(sys.stdin) if str(path) == "-" else _read_file(path)
        if len(data) > _LARGEST_FILE_BYTES:
            raise SpecError(f"{shown(name)} is larger than 1 MB and is not a run spec.")
        data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or shown(str(error))
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        hint = "Give the path of a YAML file; `scaletrain init` writes one."
        raise SpecError(f"cannot read the run spec {shown(name)}: {reason}.", remedy=hint, file=name) from error
    return data


def _shown_name(path: Path) -> str:
    """Return the name of a spec in errors: for one that another machine has sent, its path there."""
    return sent().spec or (STDIN if str(path) == "-" else str(path))


def _read_file(path: Path) -> bytes:
    """Read a file, or a pipe such as ``<(command)``. A FIFO to which nobody writes is an error, not a wait for ever."""
    data = b""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        while len(data) <= _LARGEST_FILE_BYTES:
            if not select.select([file], [], [], _PIPE_SECONDS)[0]:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing was written to it for {_PIPE_SECONDS:.0f} s")
            if not (block := file.read(_LARGEST_FILE_BYTES + 1 - len(data))):
                break
            data += block
    return data


@lru_cache(maxsize=1)
def _read_stdin(stream: TextIO) -> bytes:
    """Return the content of standard input, cached: it can be read once, and a comparison needs it several times."""
    buffer = getattr(stream, "buffer", None)
    return buffer.read(_LARGEST_FILE_BYTES + 1) if buffer else stream.read(_LARGEST_FILE_BYTES + 1).encode()


def load_cluster(name: str | None = None) -> ClusterSpec | None:
    """Return the section of the user's named or default cluster; None without one. Raises SpecError, UsageError."""
    if (chosen := choose_cluster(name)) is None:
        return None
    raw: dict[str, Any] = {}
    source = Source(chosen.source.file)
    dataclasses.replace(chosen, above=True).apply_to(raw, source)
    try:
        section = ClusterSpec.model_validate(raw["cluster"])
    except ValidationError as error:
        details = [{**detail, "loc": ("cluster", *detail["loc"])} for detail in error.errors(include_url=False)]
        problems = [field_problem(detail, source) for detail in details]
    else:
        problems = list(contradictions(section, ("cluster",), source))
    if problems:
        raise SpecError(f"cluster {chosen.name} is not a cluster section", tuple(problems))
    return section


def parse_spec(
    text: str, *, file: str, base_dir: Path, overrides: Sequence[str] = (), cluster: Cluster | None = None
) -> RunSpec:
    """Parse and validate the text of a run spec; ``file`` is the name in errors. Raises SpecError.

    ``base_dir``: the folder of the file, to find out that a path was meant relative to it.
    """
    source = Source(file)
    # An empty top-level key counts as missing; so do empty sections further down (see Section).
    raw = {key: value for key, value in parse_yaml(text, source).items() if value is not None}
    name_trackers(raw, source)
    given = copy.deepcopy(raw)  # keys that the user wrote for this run
    _apply(given, overrides, Source(file))
    if cluster is not None:
        cluster.apply_to(raw, source)
    problems = _apply(raw, overrides, source)
    incomplete = _complete_model(raw, base_dir, source)
    spec, errors = _validate(raw, given, source, model_is_known=not incomplete)
    problems = with_secrets(problems + incomplete + errors, raw, source)
    if problems or spec is None:
        count = len(problems)
        raise SpecError(f"{file}: {counted(count, 'problem')} in the run spec", tuple(problems), file=file)
    spec.read_from(source)
    return spec


def override_spec(spec: RunSpec, overrides: Sequence[str], *, file: str) -> RunSpec:
    """Return a loaded spec with overrides; ``file`` is the name in errors. Raises SpecError.

    Keys that the overrides leave keep the lines of the file that the spec was read from.
    """
    source = Source(file)
    raw = spec.model_dump(mode="json", by_alias=True)
    source.places = {(section,): file for section in raw} | spec.places
    source.ignored_config_keys = spec.ignored_config_keys
    problems = _apply(raw, overrides, source)
    given: dict[str, Any] = {}
    _apply(given, overrides, Source(file))
    # An emptied override counts as missing, as in a file.
    raw = {key: value for key, value in raw.items() if value is not None}
    new, errors = _validate(raw, given, source, model_is_known=True)
    problems = with_secrets(problems + errors, raw, source)
    if problems or new is None:
        raise SpecError("the overrides do not give a valid run spec", tuple(problems))
    new.read_from(source)
    new.set_folder(spec.folder)
    return new


def set_steps(spec: RunSpec, steps: int, *, file: str) -> RunSpec:
    """Return a loaded spec with ``training.steps`` in place of ``training.epochs``; ``file`` is the name in errors.

    Raises SpecError where settings that refer to steps, such as a warm-up, do not fit.
    """
    new = count_in_steps(spec, steps)
    source = Source(file)
    source.places = dict(spec.places)
    problems = (*contradictions(new.training, ("training",), source), *contradictions(new, (), source))
    if problems:
        epochs = f"training.epochs = {spec.training.epochs:g} gives {counted(steps, 'step')}"
        raise SpecError(f"{file}: {epochs}, which other settings do not fit", problems, file=file)
    return new


def count_in_steps(spec: RunSpec, steps: int) -> RunSpec:
    """Return a copy with ``training.steps`` in place of ``training.epochs``, without a check of other settings.

    ``epochs`` of each of several sources, which are those in an epoch of the run, become those in the run.
    """
    counted = spec.with_changes("training", steps=steps, epochs=None)
    if not spec.data.mixes or spec.training.epochs is None:
        return counted
    epochs = Fraction(repr(spec.training.epochs))  # 0.1 as it is written, not the nearest float
    sources = tuple(
        source
        if source.epochs is None
        else source.model_copy(update={"epochs": float(Fraction(repr(source.epochs)) * epochs)})
        for source in spec.data.sources
    )
    return counted.with_changes("data", sources=sources)


def _apply(raw: dict[str, Any], overrides: Sequence[str], source: Source) -> list[Problem]:
    """Set each override in plain data; return the problems."""
    problems: list[Problem] = []
    for override in overrides:
        problems += apply_override(raw, override, source)
        name_trackers(raw, source)
    return problems


def changed_keys(old: RunSpec, new: RunSpec) -> dict[str, tuple[str, str]]:
    """Return the dotted keys that differ, sorted, with both values as JSON (``null`` if missing).

    Sections in a list are compared by their numbers: ``data.sources.0.weight``. One that was added or removed, or that
    is of another kind, is one key: ``data.sources.2``.
    """
    before, after = (spec.model_dump(mode="json", by_alias=True) for spec in (old, new))
    return dict(_differences(before, after, ""))


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, tuple[str, str]]]:
    if old == new:
        return
    inner: dict[str, tuple[Any, Any]] | None = None
    if isinstance(old, dict | None) and isinstance(new, dict | None):
        was, given = old or {}, new or {}
        inner = {name: (was.get(name), given.get(name)) for name in sorted(was.keys() | given.keys())}
    elif _is_list_of_sections(old) and _is_list_of_sections(new):
        inner = {str(number): pair for number, pair in enumerate(zip_longest(old, new))}
    if inner is None:
        yield key, (json.dumps(old), json.dumps(new))
        return
    for name, (was, given) in inner.items():
        dotted = f"{key}.{name}" if key else name
        if isinstance(old, list) and not (was is not None and given is not None and was.keys() == given.keys()):
            yield dotted, (json.dumps(was), json.dumps(given))
        else:
            yield from _differences(was, given, dotted)


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _complete_model(raw: dict[str, Any], base_dir: Path, source: Source) -> list[Problem]:
    """Fill in the model section from its preset or config.json; return the problem of either."""
    given = raw.get("model")
    problems: list[Problem] = []
    while isinstance(given, dict):
        text = given.get("text_config")
        sections = (given, text) if isinstance(text, dict) else (given,)
        keys = ("weights" if has_dimensions_of_weights(section) else "hf_config" for section in sections)
        configs = [section.get(key) for section, key in zip(sections, keys, strict=True)]
        on_hub = any(isinstance(config, str) and is_reference(config) for config in configs)
        environment: Mapping[str, str] = hub_environment_of(raw) if on_hub else os.environ
        ignored: list[str] = []
        try:
            raw["model"] = complete(given, base_dir, environment, ignored)
            source.ignored_config_keys = tuple(ignored)
            if has_dimensions_of_weights(given):
                problems += _take_tokenizer(raw, given["weights"], source)
            return problems
        except SourceError as error:
            *outer, last = error.key.split(".")
            section = given[outer[0]] if outer else given
            value = shown(section.get(last))
            known = [*presets()] if outer else [*presets(), *vision_presets()]
            near = did_you_mean(value, [*known, *hub_presets()]) if last == "preset" else ""
            hint = f"{near}Known: {', '.join(known)}." if last == "preset" else error.hint
            place = source.place(("model", *outer, last))
            problems.append(Problem(place, f"model.{error.key}", f"{error}.", value, hint or None))
            rest = {key: value for key, value in section.items() if key != last}
            given = {**given, outer[0]: rest} if outer else rest
    return problems


def _take_tokenizer(raw: dict[str, Any], weights: str, source: Source) -> list[Problem]:
    """Set data.tokenizer to that of the weights where it is left out; return the problem of weights without one."""
    data = raw.get("data")
    if not isinstance(data, dict) or model_kind(raw["model"]) != "transformer":
        return []
    stated = data.get("tokenizer", {})
    if not isinstance(stated, dict) or stated.keys() - {"tokenizer_class"}:
        return []
    path = weights if is_reference(weights) else f"{weights.rstrip('/')}/tokenizer.json"
    raw["data"] = {**data, "tokenizer": {"kind": "file", "path": path, **stated}}
    if is_reference(weights) or expand_home(path).is_file():
        return []
    message = f"is required: {weights} has no tokenizer.json."
    return [Problem(source.place(("data",)), "data.tokenizer", message, None, "Give the tokenizer of these weights.")]


def _validate(
    raw: dict[str, Any], given: Mapping[str, Any], source: Source, *, model_is_known: bool
) -> tuple[RunSpec | None, list[Problem]]:
    """Return the field errors of every section, then contradictions within and between valid sections.

    Of a spec without field errors also keys in ``given`` that have no effect.
    """
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
        broken = {detail["loc"][0] for detail in details}
        reported = {in_file(detail["loc"]) for detail in details}
        wrong_values = {in_file(detail["loc"]) for detail in details if detail["type"] != "missing"}
        problems = [
            field_problem(d, source) for d in details if not _follows(d, reported, wrong_values, model_is_known)
        ]
        for name, field in RunSpec.model_fields.items():
            section = MODELS[model_kind(raw.get(name))] if name == "model" else field.annotation
            if name in raw and name not in broken and isinstance(section, type) and issubclass(section, BaseModel):
                problems += contradictions(section.model_validate(raw[name]), (name,), source)
        return None, list(dict.fromkeys(problems))
    problems = [p for name in RunSpec.model_fields for p in contradictions(getattr(spec, name), (name,), source)]
    return spec, [*problems, *contradictions(spec, (), source), *unused_keys(spec, given, source)]


def _follows(
    detail: Any, reported: set[tuple[Any, ...]], wrong_values: set[tuple[Any, ...]], model_is_known: bool
) -> bool:
    """Return True if a problem is caused by another one: a list whose items are wrong, or a dimension whose source,
    family or origin is."""
    section, *key = whole = in_file(detail["loc"])
    if detail["type"] == "too_short":
        return any(other[:-1] == whole for other in reported)
    if section == "model" and key != ["family"] and ("model", "family") in wrong_values:
        return detail["type"] in ("missing", "extra_forbidden")
    if detail["type"] != "missing" or section != "model" or not key:
        return False
    above = (section, *key[:-1])
    return not model_is_known or any((*above, other) in reported for other in DERIVED_FROM.get(str(key[-1]), ()))


def hub_environment_of(raw: dict[str, Any]) -> dict[str, str]:
    """Return the environment in which a config.json of the hub is read, from a spec that is not validated yet."""
    env, cluster = raw.get("env"), raw.get("cluster")
    scheduler = cluster.get("scheduler", DEFAULT) if isinstance(cluster, dict) else DEFAULT
    try:
        runs_here = isinstance(scheduler, str) and backend_traits(scheduler).runs_here
    except (KeyError, TypeError, ValueError, ScaletrainError):  # reported by validation
        runs_here = False
    secrets = raw.get("secret_env")
    names = [name for name in secrets if isinstance(name, str)] if isinstance(secrets, list) else []
    from scaletrain_cli.spec.hub_files import hub_environment  # most specs have no config.json

    return hub_environment(env if isinstance(env, dict) else {}, names, os.environ, runs_here=runs_here)


def complete(
    model: dict[str, Any], base_dir: Path, environment: Mapping[str, str], ignored: list[str] | None = None
) -> dict[str, Any]:
    """Return the model section merged over its preset or config.json, with derived dimensions added.

    ``environment``: the variables with which a config.json of the hub is read. ``ignored``: gets the keys of
    config.json that do not change the model. Raises SourceError. Unknown keys and values are left to validation.
    """
    ignored = [] if ignored is None else ignored
    given = {key: value for key, value in model.items() if key != "hf_config"}
    if has_dimensions_of_weights(model):
        weights = model["weights"]
        try:
            is_on_hub = is_reference(weights)
            path = _config_path(weights, Path(), environment) if is_on_hub else expand_home(weights) / "config.json"
            given = merged(_of_config(path, ignored), given)
        except SourceError as error:
            raise SourceError(
                f"has no dimensions of the model: its config.json {error}", _NO_DIMENSIONS, "weights"
            ) from error
    if "hf_config" in model:
        if not isinstance(model["hf_config"], str) or "\0" in model["hf_config"]:
            raise SourceError("must be the path of a Hugging Face config.json, or hf://org/name@revision")
        given = merged(_of_config(_config_path(model["hf_config"], base_dir, environment), ignored), given)
    if (preset := model.get("preset")) is not None:
        known = presets() | vision_presets()
        name = hub_presets().get(preset, preset) if isinstance(preset, str) else None
        if name not in known:
            raise SourceError("is not a known preset", key="preset")
        given = merged(known[name], given)
    family = given.get("family")
    if family == "llava" and isinstance(text := given.get("text_config"), dict):
        try:
            inner: list[str] = []
            given["text_config"] = complete(text, base_dir, environment, inner)
            ignored += [f"text_config.{key}" for key in inner]
        except SourceError as error:
            raise SourceError(str(error), error.hint, f"text_config.{error.key}") from error
    return given if isinstance(family, str) and family in VISION else derived_dimensions(given)


def _of_config(path: Path, ignored: list[str]) -> dict[str, Any]:
    from scaletrain_cli.spec.hugging_face import from_config, read_config  # most specs have no config.json

    return from_config(read_config(path), ignored)


_NO_DIMENSIONS = "Set model.hf_config, model.preset or the dimensions, or give a folder that has it."


def has_dimensions_of_weights(model: Mapping[str, Any]) -> bool:
    """Return True if a model section takes its dimensions from the config.json of its weights: it has no others."""
    others = {"hf_config", "preset", "family", "hidden_size", "num_hidden_layers"}
    return isinstance(model.get("weights"), str) and others.isdisjoint(model)


def _config_path(given: str, base_dir: Path, environment: Mapping[str, str]) -> Path:
    """Return the path of the config.json, fetched to the cache if it is on the hub. Raises SourceError."""
    if not is_reference(given):
        beside = base_dir / given
        if sent().spec:  # by another machine, with the files that it names beside it
            return beside
        if not os.path.exists(expand_home(given)) and os.path.exists(beside):
            message = f"is not in the current folder, to which every path of a spec is relative, but at {beside}"
            raise SourceError(message, f"Write {beside}, or run the command in {base_dir}.")
        return expand_home(given)
    from scaletrain_cli.hub.cache import HubSettings
    from scaletrain_cli.spec.hub_files import read_hub_config

    try:
        return read_hub_config(given, HubSettings.from_environment(environment))
    except (ScaletrainError, ValueError, OSError) as error:
        stated = error if isinstance(error, ScaletrainError) else None
        said = str(error) if stated is None else stated.message
        raise SourceError(said.rstrip("."), None if stated is None else stated.remedy) from error
