"""Published schemas of objects: those of Kubernetes, and CustomResourceDefinitions, if given.

`SCALETRAIN_CRDS=FOLDER` names a folder with the CustomResourceDefinitions of JobSet, Kueue, Volcano and Trainer.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    import jsonschema

CRDS = os.environ.get("SCALETRAIN_CRDS")  # read before the tests clear the environment
FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # not every build of PyYAML has libyaml
needs_crds = pytest.mark.skipif(CRDS is None, reason="$SCALETRAIN_CRDS names no folder with CRDs")
SERVER = "1.36"
NEWEST, IN_NEWEST = "1.37", "scheduling.k8s.io/v1beta1"


def as_core(one: dict[str, Any]) -> bool:
    """Return whether Kubernetes itself defines the kind."""
    group, slash, _ = one["apiVersion"].rpartition("/")
    return not slash or group == "batch" or (group.endswith(".k8s.io") and not group.endswith(".x-k8s.io"))


def require_valid(one: dict[str, Any]) -> None:
    """Raise ValidationError unless a kind of Kubernetes has these fields."""
    _kubernetes_validate().validate(one, NEWEST if one["apiVersion"] == IN_NEWEST else SERVER, strict=True)


@cache
def _kubernetes_validate() -> Any:
    from kubernetes_validate import utils

    utils.schema_contents = cache(utils.schema_contents)  # it would read megabytes for each object
    return utils


def crd_problems(one: dict[str, Any]) -> list[str]:
    """Return the problems of a custom resource, by the CustomResourceDefinition of its version."""
    found = _validator(one["apiVersion"], one["kind"]).iter_errors(one)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


@cache
def crd_schemas(group: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schema of each kind of a group, by its version, as in `jobset.x-k8s.io/v1`, and its name."""
    assert CRDS is not None
    found = {}
    for path in sorted(Path(CRDS).rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if f"group: {group}\n" not in text:
            continue
        for document in yaml.load_all(text, Loader=FastLoader):
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = version["schema"]["openAPIV3Schema"]
    return found


@cache
def _validator(version: str, kind: str) -> jsonschema.Draft7Validator:
    import jsonschema

    schema = crd_schemas(version.partition("/")[0])[version, kind]
    untyped = {"metadata": {"type": "object"}, "apiVersion": {}, "kind": {}}
    return jsonschema.Draft7Validator(_strict(schema | {"properties": schema["properties"] | untyped}))


def _strict(schema: Any) -> Any:
    """Return the JSON Schema of an OpenAPI schema of Kubernetes; an unknown field is an error."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {key: value for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "properties" in made:
        made["properties"] = {key: _strict(value) for key, value in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = _strict(made[key])
    return made
