"""The rendered objects against published schemas: those of Kubernetes, Trainer's models, and the CRDs if given.

`SCALETRAIN_CRDS=FOLDER` names a folder with CustomResourceDefinitions of JobSet, Volcano and Trainer. test_rules.py has
the rules that no schema states.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from scaletrain_cli.launch.backends.kubernetes.workloads import children
from tests.launch.backends.kubernetes.rendering import BACKENDS, EVERY_OPTION, RECIPES, plan_of, rendered_recipe
from tests.launch.backends.kubernetes.rules.objects import problems

CRDS = os.environ.get("SCALETRAIN_CRDS")  # read before the tests clear the environment
SERVER = "1.36"
NEWEST, IN_NEWEST = "1.37", "scheduling.k8s.io/v1beta1"
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
CASES = [
    *((name, f"cluster.kubernetes.backend={backend}") for name in RECIPES for backend in BACKENDS),
    *(("llama-7b-h100", *EVERY_OPTION, f"cluster.kubernetes.backend={backend}") for backend in BACKENDS),
    ("llama-7b-h100", "cluster.kubernetes.native_gang=v1alpha2"),
    ("llama-7b-h100", "cluster.kubernetes.native_gang=auto"),
    (
        "llama-7b-h100",
        "cluster.kubernetes.topology={kind: exclusive, key: rack}",
        "cluster.kubernetes.active_deadline=9h",
    ),
]


def objects(case: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rendered objects and those that controllers create from them."""
    sent = rendered_recipe(*case, plan=plan_of(case[0])).objects
    return [*sent, *children(sent)]


def identity(case: tuple[str, ...]) -> str:
    return f"{case[0]}-{len(case) - 1}-{case[-1].rpartition('=')[2].strip('}')}"


def leaves(data: Any, path: str = "") -> Iterator[str]:
    """Return the paths of all values in an object; empty sections count as absent."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path


def as_core(one: dict[str, Any]) -> bool:
    """Return whether Kubernetes itself defines the kind."""
    group, slash, _ = one["apiVersion"].rpartition("/")
    return not slash or group == "batch" or (group.endswith(".k8s.io") and not group.startswith("jobset."))


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_core_objects_and_those_that_controllers_create_are_valid(case: tuple[str, ...]) -> None:
    kinds = []
    for one in objects(case):
        if as_core(one):
            kubernetes_validate.validate(one, NEWEST if one["apiVersion"] == IN_NEWEST else SERVER, strict=True)
            kinds.append(one["kind"])
    assert {"ConfigMap"} < set(kinds)
    assert {"Job", "Pod"} & set(kinds)


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_the_models_of_trainer_keep_every_rendered_field(case: tuple[str, ...]) -> None:
    known = [one for one in objects(case) if one["kind"] in MODELS]
    for one in known:
        read_back = MODELS[one["kind"]].from_dict(copy.deepcopy(one))
        assert read_back is not None
        assert set(leaves(one)) - set(leaves(read_back.to_dict())) == set()


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_the_rules_find_no_problem(case: tuple[str, ...]) -> None:
    sent = list(rendered_recipe(*case).objects)
    assert [str(problem) for problem in problems(sent)] == []


@pytest.mark.skipif(CRDS is None, reason="$SCALETRAIN_CRDS names no folder with CRDs")
@pytest.mark.parametrize("case", CASES, ids=identity)
def test_custom_resources_are_valid_by_the_released_crds(case: tuple[str, ...]) -> None:
    custom = [one for one in objects(case) if not as_core(one)]
    assert custom
    for one in custom:
        found = crds()[one["apiVersion"], one["kind"]].iter_errors(one)
        assert [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found] == []


def test_the_models_reject_an_unknown_field() -> None:
    jobset = copy.deepcopy(rendered_recipe("llama-7b-h100").workload_object)
    jobset["spec"]["failurePolicy"]["restartStragety"] = "BlockingRecreate"
    read_back = MODELS["JobSet"].from_dict(jobset)
    assert read_back is not None
    assert set(leaves(jobset)) - set(leaves(read_back.to_dict())) == {".spec.failurePolicy.restartStragety"}


@cache
def crds() -> dict[tuple[str, str], jsonschema.Draft7Validator]:
    """Return a strict validator of each custom kind below the folder."""
    assert CRDS is not None
    found = {}
    for path in sorted(Path(CRDS).rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if not any(group in text[:4000] for group in ("jobset.x-k8s.io", "batch.volcano.sh", "trainer.kubeflow.org")):
            continue
        for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]
                    schema["properties"] |= {"metadata": {"type": "object"}, "apiVersion": {}, "kind": {}}
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = jsonschema.Draft7Validator(strict(schema))
    return found


def strict(schema: Any) -> Any:
    """Return the JSON Schema of an OpenAPI schema of Kubernetes; an unknown field is an error."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {key: value for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "properties" in made:
        made["properties"] = {key: strict(value) for key, value in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = strict(made[key])
    return made
