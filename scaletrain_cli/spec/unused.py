"""Keys of a spec that have no effect beside its other keys: one rule over what fields say of themselves (used_when)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from scaletrain_cli.errors import Problem
from scaletrain_cli.spec.run import RunSpec
from scaletrain_cli.spec.section import Condition, UsedWhen
from scaletrain_cli.spec.source import OPTION, Key, Source, shown


def unused_keys(spec: RunSpec, given: Mapping[str, Any], source: Source) -> Iterator[Problem]:
    """Yield a problem for each key in ``given``, which a person wrote, that changes nothing in ``spec``.

    A key that is given its default is none: a spec written out in full is as good as a short one. Neither is a key of
    the file that an override makes useless: ``--set evaluation.every=0`` switches it off for one run. Facts about
    a cluster (links, prices, names of resources) have no such condition: they hold whether a run uses them or not.
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
        rule = next((one for one in field.metadata if isinstance(one, UsedWhen) and not _is_met(spec, one)), above)
        if isinstance(value, BaseModel) and isinstance(given[alias], dict):
            yield from _unused(spec, value, given[alias], inner, rule, source)
        elif (
            rule is not None
            and value != field.get_default(call_default_factory=True)
            and not _is_switched_off(rule, inner, source)
        ):
            yield _problem(spec, rule, inner, value, source)


def _is_switched_off(rule: UsedWhen, key: Key, source: Source) -> bool:
    """Return whether the file holds the key, and an override is what makes it useless."""
    makes = (source.place(tuple(one.shown_key.split("."))) for one in rule.conditions)
    return source.place(key) != OPTION and OPTION in makes


def _is_met(spec: RunSpec, rule: UsedWhen) -> bool:
    return any(condition.holds(_value(spec, condition.key)) for condition in rule.conditions)


def _value(spec: RunSpec, key: str) -> Any:
    """Return the value at a dotted key, None where a section has no such key."""
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _problem(spec: RunSpec, rule: UsedWhen, key: Key, value: Any, source: Source) -> Problem:
    now = " and ".join(f"{one.shown_key} = {shown(_value(spec, one.key))}" for one in rule.conditions)
    hint = f"Remove it, or {' or '.join(map(_remedy, rule.conditions))}."
    return Problem(source.place(key), ".".join(map(str, key)), f"has no effect with {now}.", shown(value), hint)


def _remedy(condition: Condition) -> str:
    if condition.negated or condition.setting:
        return f"change {condition.shown_key}"
    words = [shown(value) for value in condition.values]
    return f"set {condition.shown_key} to {' or '.join([', '.join(words[:-1]), words[-1]] if words[1:] else words)}"
