"""The spec of a run as keys and values, and what each revision has changed in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_spec_lines, revision_path, revisions

_HIDDEN = "(set)"  # the values of environment variables may be secrets
_LAYOUT = "plan.layout."


def spec_of(run: RunDir) -> dict[str, Any]:
    """Return ``keys``: of the latest revision, each with its value and its ``place``, the lines in the file first.

    ``revisions``: for each its number, time, overrides, and the keys of spec and layout that it ``changed``.
    """
    lines = read_spec_lines(run)
    before = _flat_document(read_document(run.record) or {})
    made = []
    for number in revisions(run):
        document = read_document(revision_path(run, number)) or {}
        after = _flat_document(document)
        made.append(
            {
                "revision": number,
                "created": document.get("created"),
                "overrides": [without_secrets(str(each)) for each in document.get("overrides", ())],
                "changed": differences(before, after),
            }
        )
        before = after
    keys = [
        {"key": key, "value": value, "place": lines.get(key, "")}
        for key, value in before.items()
        if not key.startswith(_LAYOUT)
    ]
    return {"keys": keys, "revisions": made}


def without_secrets(override: str) -> str:
    """Return ``KEY=VALUE`` without the values of environment variables."""
    key = override.partition("=")[0].strip()
    return f"{key}={_HIDDEN}" if key == "env" or key.startswith("env.") else override


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys with another value, each with both; None where a side lacks the key."""
    keys = dict.fromkeys([*before, *after])
    return [
        {"key": key, "before": before.get(key), "after": after.get(key)}
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _flat_document(document: Mapping[str, Any]) -> dict[str, Any]:
    spec, plan = document.get("spec"), document.get("plan")
    found = dict(_leaves("", spec)) if isinstance(spec, dict) else {}
    layout = plan.get("layout") if isinstance(plan, dict) else None
    return found | ({f"{_LAYOUT}{key}": value for key, value in layout.items()} if isinstance(layout, dict) else {})


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        if prefix == "env":
            return [(f"env.{name}", _HIDDEN) for name in value]
        return [
            leaf for name, each in value.items() for leaf in _leaves(f"{prefix}.{name}" if prefix else str(name), each)
        ]
    if isinstance(value, list | dict):
        return [(prefix, json.dumps(value))]
    return [(prefix, value)]
