"""From a YAML file and ``--set`` overrides to a RunSpec, or to one error that lists every problem with its line."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from scaletrain_cli.errors import Problem, SpecError
from scaletrain_cli.spec.architecture_source import SourceError, complete
from scaletrain_cli.spec.run import RunSpec

Key = tuple[str | int, ...]
_DEEPEST = 40  # nesting; no spec needs ten
# Dimensions in place of a preset that does not exist, so that one wrong name is reported once, not as ten missing keys.
_STAND_IN = {"preset": "gpt2"}


class _Source:
    """The raw mapping and where each key of it stands (``file:line`` or ``--set``)."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[Key, str] = {}

    def place(self, key: Key) -> str:
        """Where ``key`` stands, or the nearest enclosing key that does."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, f"{self.file}:1")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read, complete and validate a run spec. Raises SpecError with all problems at once."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(
            f"cannot read the run spec {path}: {reason}. Give the path of a YAML file; `scaletrain init` writes one."
        ) from error
    return parse_spec(text, file=str(path), base_dir=path.parent, overrides=overrides)


def parse_spec(text: str, *, file: str, base_dir: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The same for text at hand; ``file`` is the name that errors show. Raises SpecError."""
    source = _Source(file)
    raw = _parse_yaml(text, source)
    problems = [problem for override in overrides for problem in _apply_override(raw, override, source)]
    problems += _complete_model(raw, base_dir, source)
    spec, found = _validate(raw, source)
    problems += found
    if problems or spec is None:
        count = len(problems)
        raise SpecError(f"{file}: {count} problem{'s' if count != 1 else ''} in the run spec", tuple(problems))
    return spec


def _parse_yaml(text: str, source: _Source) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="rt", pure=True)
    try:
        tree = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source.file}:{mark.line + 1}" if mark else source.file
        what = " ".join(str(error.problem or error.context or "").split())
        raise SpecError(f"{source.file} is not valid YAML", (Problem(where, "", what),)) from error
    except (YAMLError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        # ruamel lets some malformed scalars (impossible dates, bad tags) escape as plain Python errors.
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise SpecError(f"{source.file} is not valid YAML", (Problem(f"{source.file}:1", "", what),)) from error
    plain = _plain(tree, (), source)
    if not isinstance(plain, dict):
        hint = "Start with `schema: scaletrain/v1`; `scaletrain init` writes a complete example."
        raise SpecError(f"{source.file}: a run spec is a mapping of sections. {hint}")
    return plain


def _plain(node: Any, key: Key, source: _Source) -> Any:
    """Plain Python data from ruamel's tree, recording the line of every key on the way."""
    if len(key) > _DEEPEST:
        place = source.place(key)
        raise SpecError(f"{source.file} is not a run spec", (Problem(place, "", "is nested too deeply."),))
    if isinstance(node, dict):
        result = {}
        for name, value in node.items():
            inner = (*key, str(name))
            if hasattr(node, "lc") and name in (node.lc.data or {}):
                source.places[inner] = f"{source.file}:{node.lc.data[name][0] + 1}"
            result[str(name)] = _plain(value, inner, source)
        return result
    if isinstance(node, list | tuple | set):
        return [_plain(value, (*key, index), source) for index, value in enumerate(node)]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node if node is None else str(node)


def _apply_override(raw: dict[str, Any], override: str, source: _Source) -> Iterator[Problem]:
    """Set one ``a.b=c``; the value is read as YAML. Yields a problem instead of raising."""
    name, equals, text = override.partition("=")
    where, parts = f"--set {override}", name.strip().split(".")
    if not equals or not all(parts):
        yield Problem(where, "", "must look like section.key=value, for example training.steps=100.")
        return
    try:
        value = _parse_yaml(f"value: {text}", _Source(where)).get("value")
    except SpecError as error:
        yield Problem(where, name, error.problems[0].message if error.problems else error.message)
        return
    target = raw
    for depth, part in enumerate(parts[:-1], start=1):
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            yield Problem(where, ".".join(parts[:depth]), "is a value, not a section.")
            return
        target = inner
    target[parts[-1]] = value
    source.places[tuple(parts)] = where


def _complete_model(raw: dict[str, Any], base_dir: Path, source: _Source) -> Iterator[Problem]:
    model = raw.get("model")
    if not isinstance(model, dict):
        return
    try:
        raw["model"] = complete(model, base_dir)
    except SourceError as error:
        raw["model"] = complete({**_STAND_IN, **{k: v for k, v in model.items() if k != error.key}}, base_dir)
        given = str(model.get(error.key))
        near = difflib.get_close_matches(given, _preset_names(), n=1) if error.key == "preset" else []
        hint = f"Did you mean {near[0]}?" if near else None
        yield Problem(source.place(("model", error.key)), f"model.{error.key}", f"{error}.", given, hint)


def _preset_names() -> list[str]:
    from scaletrain_cli.spec.architecture_source import presets

    return list(presets())


def _validate(raw: dict[str, Any], source: _Source) -> tuple[RunSpec | None, list[Problem]]:
    """Field errors of every section; then contradictions within the sections, and between them, that are sound."""
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as error:
        problems = [_problem(detail, raw, source) for detail in error.errors(include_url=False)]
        broken = {problem.key.split(".")[0] for problem in problems}
        for name, field in RunSpec.model_fields.items():
            section = field.annotation
            if name in raw and name not in broken and isinstance(section, type) and issubclass(section, BaseModel):
                problems += _contradictions(section.model_validate(raw[name]), (name,), source)
        return None, list(dict.fromkeys(problems))
    problems = [p for name in RunSpec.model_fields for p in _contradictions(getattr(spec, name), (name,), source)]
    return spec, problems + list(_contradictions(spec, (), source))


def _contradictions(section: Any, key: Key, source: _Source) -> Iterator[Problem]:
    if not hasattr(section, "inconsistencies"):
        return
    for dotted, message in section.inconsistencies():
        full = (*key, *dotted.split("."))
        value = section
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        given = None if value is None or isinstance(value, BaseModel | dict | list) else _shown(value)
        yield Problem(source.place(full), ".".join(map(str, full)), message, given)


def _problem(detail: Any, raw: dict[str, Any], source: _Source) -> Problem:
    """One pydantic error in our words: where, given, allowed, nearest name."""
    # pydantic adds a part that is not in the file: "[key]" of a mapping, and the branch taken by cluster.gpu.
    key = tuple(part for part in detail["loc"] if part not in ("[key]", "table"))
    dotted, place = ".".join(map(str, key)), source.place(key)
    kind, context = detail["type"], detail.get("ctx", {})
    given = _shown(detail["input"])
    if kind == "extra_forbidden":
        known = _known_keys(key[:-1])
        near = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}? " if near else ""
        return Problem(place, dotted, "unknown key.", hint=f"{hint}Known here: {', '.join(known)}.")
    if kind == "missing":
        return Problem(place, dotted, "is missing.", hint="Add it, or start from `scaletrain init`.")
    if kind == "literal_error":
        allowed = [part.strip().strip("'") for part in context["expected"].replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(given, allowed, n=1)
        hint = f"Did you mean {near[0]}?" if near else None
        return Problem(place, dotted, f"must be {context['expected']}.", given, hint)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(place, dotted, "must be a section (a mapping of keys).", given)
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    message = message if message.startswith(("must", "String")) else f"must be {message}"
    return Problem(place, dotted, message.replace("String should", "must") + ".", given)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else text[:77] + "..."


def _known_keys(key: Key) -> list[str]:
    """Keys allowed at a place in the spec, with ``schema`` and ``async`` under the names the file uses."""
    model: Any = RunSpec
    for part in key:
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        if field is None:
            return []
        model = next((option for option in _options(field.annotation) if hasattr(option, "model_fields")), None)
        if model is None:
            return []
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return [*keys, "hf_config"] if key == ("model",) else keys


def _options(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the annotation itself; Annotated is looked through."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _options(option)
    else:
        yield annotation
