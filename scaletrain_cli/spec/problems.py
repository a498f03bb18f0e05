"""Problems of a spec as shown to the user: location, given value, allowed values, nearest name and fix."""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Tag

from scaletrain_cli.errors import Problem
from scaletrain_cli.plugins import MODEL_FAMILIES, plugins
from scaletrain_cli.spec.model import ModelSpec
from scaletrain_cli.spec.model_consistency import model_inconsistencies
from scaletrain_cli.spec.run import FAMILIES, MODELS, RunSpec
from scaletrain_cli.spec.run_consistency import run_inconsistencies
from scaletrain_cli.spec.section import Condition, OpenSection, UsedWhen
from scaletrain_cli.spec.source import SET_OPTION, Key, Source, key_of, shown
from scaletrain_cli.text import did_you_mean


def unused_keys(spec: RunSpec, given: Mapping[str, Any], source: Source) -> Iterator[Problem]:
    """Yield a problem for each key in ``given``, written by the user, that has no effect in ``spec``.

    A key that is set to its default is not a problem, so that a spec can be written out in full. Neither is a key of
    the file that an override makes ineffective: ``--set evaluation.every=0`` turns evaluation off for one run. Keys
    that describe a cluster (links, prices, names of resources) have no such condition: a run need not use them.
    """
    yield from _unused(spec, spec, given, (), None, source)


def _unused(
    spec: RunSpec, section: BaseModel, given: Mapping[str, Any], key: Key, above: UsedWhen | None, source: Source
) -> Iterator[Problem]:
    for name, field in type(section).model_fields.items():
        alias = field.alias or name
        if alias not in given:
            continue
        inner, value = (*key, alias), getattr(section, name)
        rules = (_relative(one, key) for one in field.metadata if isinstance(one, UsedWhen))
        unmet = (one for one in rules if not any(clause.holds(_value(spec, clause.key)) for clause in one.conditions))
        rule = next(unmet, above)
        if isinstance(value, BaseModel) and isinstance(given[alias], dict):
            yield from _unused(spec, value, given[alias], inner, rule, source)
        elif rule is not None and value != field.get_default(call_default_factory=True):
            deciding = [source.place(tuple(one.shown_key.split("."))) for one in rule.conditions]
            if source.place(inner) != SET_OPTION and SET_OPTION in deciding:
                continue  # of the file, made ineffective by an override
            now = " and ".join(f"{one.shown_key} = {shown(_value(spec, one.key))}" for one in rule.conditions)
            hint = f"Remove it, or {' or '.join(map(_remedy, rule.conditions))}."
            dotted = ".".join(map(str, inner))
            yield Problem(source.place(inner), dotted, f"has no effect with {now}.", shown(value), hint)


def _relative(rule: UsedWhen, key: Key) -> UsedWhen:
    """Return a rule of the section at ``key``; those of a LLaVA's language model name its keys as keys of ``model``."""
    inner = "model.text_config."
    if ".".join(map(str, key)) + "." != inner:
        return rule

    def moved(name: str) -> str:
        return inner + name.removeprefix("model.") if name.startswith("model.") else name

    conditions = (
        replace(one, key=moved(one.key), setting=moved(one.setting) if one.setting else "") for one in rule.conditions
    )
    return UsedWhen(tuple(conditions))


def _value(spec: RunSpec, key: str) -> Any:
    """Return the value at a dotted key, None if a section does not have the key."""
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _remedy(condition: Condition) -> str:
    if condition.negated or condition.setting:
        return f"change {condition.shown_key}"
    words = [shown(value) for value in condition.values]
    return f"set {condition.shown_key} to {' or '.join([', '.join(words[:-1]), words[-1]] if words[1:] else words)}"


# pydantic's error types and their messages; {x} comes from the error's context.
_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text that can be written as UTF-8",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_long": "must have {max_length} items",
    "too_short": "must have {min_length} or more items",
    "greater_than": "must be above {gt:.15g}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than": "must be below {lt:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
    "literal_error": "must be {expected}",
    "model_type": "must be a section (a mapping of keys)",
    "model_attributes_type": "must be a section (a mapping of keys)",
    "dict_type": "must be a mapping of names to values",
}


def field_problem(detail: Any, source: Source) -> Problem:
    """Return pydantic's error as a problem."""
    key = in_file(detail["loc"])
    dotted, place, kind = ".".join(map(shown, key)), source.place(key), detail["type"]
    context, given = detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        known = known_keys(detail["loc"][:-1])
        near = did_you_mean(str(key[-1]), known)
        return Problem(place, dotted, "unknown key.", hint=f"{near}Known keys: {', '.join(known)}.")
    if kind == "missing":
        if isinstance(key[-1], int):
            return Problem(source.place(key[:-1]), ".".join(map(shown, key[:-1])), "has too few items.", shown(given))
        if dotted == "model.head_dim":  # the dimension would have been derived
            heads = f"hidden_size = {given['hidden_size']} is not a multiple of num_attention_heads"
            return Problem(
                place, dotted, f"cannot be derived: {heads} = {given['num_attention_heads']}.", hint="Set it."
            )
        return Problem(place, dotted, "is missing.", hint="Add it, or start from `scaletrain init`.")
    if dotted == "model.family" and kind != "plugin_broken":
        families = [*FAMILIES, *plugins(MODEL_FAMILIES, FAMILIES)]
        hint = did_you_mean(shown(given), families).strip() or None
        return Problem(place, dotted, f"must be one of {', '.join(families)}.", shown(given), hint)
    if kind == "string_pattern_mismatch":
        # Texts of our own spec that have a pattern have their own message (spec.quantities.matching), or only forbid
        # NUL. The options of a back end or a tracker of another package may have any pattern.
        if given == "":
            message = "must not be empty"
        elif "\0" in given:
            message = "must not contain a NUL character"
        else:
            message = f"must match the pattern {context['pattern']}"
    else:
        message = _WORDS[kind].format(**context) if kind in _WORDS else detail["msg"]
    return Problem(place, dotted, f"{message}.", shown(given), _hint(kind, given, context))


def contradictions(section: Any, key: Key, source: Source) -> Iterator[Problem]:
    """Yield the contradictions of a section, with their locations."""
    match section:
        case RunSpec():
            problems = run_inconsistencies(section)
        case ModelSpec():
            problems = model_inconsistencies(section)
        case _:
            problems = section.inconsistencies() if hasattr(section, "inconsistencies") else iter(())
    for dotted, message in problems:
        inner = key_of(dotted)
        full, value = (*key, *inner), section
        for part in inner:
            if isinstance(part, int):
                value = value[part]
            else:
                value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        given = None if value is None or isinstance(value, BaseModel | dict | list | tuple) else shown(value)
        yield Problem(source.place(full), ".".join(map(str, full)), message, given)


def placed(spec: RunSpec, problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return the problems; those with only a key get the location of that key in the spec."""
    return tuple(
        replace(problem, where=spec.where(problem.key)) if problem.where == "run spec" else problem
        for problem in problems
    )


def known_keys(key: Key) -> list[str]:
    """Return the keys allowed at a location in pydantic's form; ``schema`` and ``async`` by their names in the file."""
    model: Any = RunSpec
    annotation: Any = None
    parts = iter(key)
    for part in parts:
        if part in MODELS and key[0] == "model":  # the kind of model, which is not a key
            model = MODELS[str(part)]
            continue
        if isinstance(part, int):  # an item of a list, whose section _options() has found already
            continue
        if (branch := _branch(annotation, part)) is not None:
            model, annotation = branch, None
            continue
        if part == "plugins" and issubclass(model, OpenSection):
            if (name := next(parts, None)) is None:
                break
            model = model.plugin_model(str(name))
            continue
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        if field is None:
            return []
        annotation = field.annotation
        if typing.get_origin(annotation) is dict:
            next(parts, None)  # a name chosen by the user
        model = next((option for option in _options(annotation) if hasattr(option, "model_fields")), None)
        if model is None:
            return []
    keys = [field.alias or name for name, field in model.model_fields.items() if not field.exclude]
    if issubclass(model, OpenSection):
        keys = [key for key in keys if key != "plugins"] + model.plugin_names()
    return [*keys, "hf_config"] if in_file(key) == ("model",) else keys


def spec_keys() -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a spec with the type of its value; sections are left out."""
    return _keys(RunSpec, "")


def _keys(section: type[BaseModel], before: str) -> Iterator[tuple[str, Any]]:
    if issubclass(section, OpenSection):
        for name in section.plugin_names():
            if (model := section.plugin_model(name)) is not None:
                yield from _keys(model, f"{before}{name}.")
    for name, field in section.model_fields.items():
        if field.exclude or (name == "plugins" and issubclass(section, OpenSection)):
            continue
        key = f"{before}{field.alias or name}"
        kinds = [*MODELS.values()] if key == "model" else [field.annotation]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for kind in inner:
            yield from _keys(kind, f"{key}.")
        if not inner:
            yield key, field.annotation


# Lists whose items are sections of several kinds, which pydantic names after the number of the item.
_LISTS_OF_KINDS = {("evaluation", "tasks"), ("data", "prepare")}


def in_file(location: Key) -> Key:
    """Return the error's key in the file: without ``[key]`` of a mapping, the branch of model, of cluster.gpu or of an
    item of a list, and the field that holds the sections of plug-ins."""
    key = tuple(part for part in location if part != "[key]")
    if key[1:2] == ("plugins",) and len(key) > 2:
        key = key[:1] + key[2:]
    if key[:1] == ("model",) and key[1:2] and key[1] in MODELS:
        return key[:1] + key[2:]
    if key[:2] in _LISTS_OF_KINDS and len(key) > 3:
        key = key[:3] + key[4:]
    return key[:2] + key[3:] if key[:2] == ("cluster", "gpu") and key[2:3] in (("table",), ("name",)) else key


def _hint(kind: str, given: Any, context: dict[str, Any]) -> str | None:
    if kind == "literal_error":
        allowed = [part.strip().strip("'") for part in context["expected"].replace(" or ", ", ").split(",")]
        return did_you_mean(shown(given), allowed).strip() or None
    if (
        kind in ("int_type", "int_from_float")
        and isinstance(given, float)
        and abs(given) < 1e15
        and given == int(given)
    ):
        return f"Use {int(given)}."
    if kind in ("int_type", "int_parsing", "float_type") and isinstance(given, str) and given[:1].isdigit():
        return "Remove quotes and units."
    if kind == "string_type" and isinstance(given, int | float):
        return f'Put it in quotes: "{shown(given)}".'
    return None


def _branch(annotation: Any, tag: object) -> Any:
    """Return the section with this tag among those of a list, None if there is none."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated and Tag(str(tag)) in arguments:
        return arguments[0] if hasattr(arguments[0], "model_fields") else None
    return next((section for argument in arguments if (section := _branch(argument, tag)) is not None), None)


def _options(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself, without Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _options(option)
    elif typing.get_origin(annotation) in (tuple, list, dict):
        yield from _options(typing.get_args(annotation)[-2 if typing.get_origin(annotation) is tuple else -1])
    else:
        yield annotation
