"""The rendered objects against published schemas: those of Kubernetes, Trainer's models, and the CRDs if given.

test_rules.py has the rules that no schema states.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from scaletrain_cli.launch.backends.kubernetes.workloads import children
from tests.launch.backends.kubernetes.rendering import BACKENDS, EVERY_OPTION, RECIPES, plan_of, rendered_recipe
from tests.launch.backends.kubernetes.rules import problems
from tests.launch.backends.kubernetes.schemas import as_core, crd_problems, needs_crds, require_valid

OPTIONS = (
    *((*EVERY_OPTION, f"cluster.kubernetes.backend={backend}") for backend in BACKENDS),
    ("cluster.kubernetes.native_gang=v1alpha2",),
    ("cluster.kubernetes.native_gang=auto",),
    ("cluster.kubernetes.topology={kind: exclusive, key: rack}", "cluster.kubernetes.active_deadline=9h"),
)
# Each recipe for one back end, in turn; `make test-long` has the others.
CASES = [
    *(pytest.param(("llama-7b-h100", *more), id=f"{len(more)}-{more[-1].rpartition('=')[2]}") for more in OPTIONS),
    *(
        pytest.param(
            (name, f"cluster.kubernetes.backend={backend}"),
            id=f"{name}-{backend}",
            marks=() if number % len(BACKENDS) == place else pytest.mark.long,
        )
        for number, name in enumerate(RECIPES)
        for place, backend in enumerate(BACKENDS)
    ),
]
# Rendered with plans of their own, from which the memory of pods is computed: one for each back end. Those of all
# recipes would cost ten times as much.
PLANNED = ("llama-7b-h100", "lora-tiny-cpu", "clip-pairs-cpu")


@cache
def sent_objects(case: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    return rendered_recipe(*case, plan=plan_of(case[0]) if case[0] in PLANNED else None).objects


@cache
def objects(case: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rendered objects and those that controllers create from them."""
    return [*sent_objects(case), *children(sent_objects(case))]


@cache
def models() -> dict[str, Any]:
    """Return Trainer's model of each kind."""
    from kubeflow_trainer_api import models

    return {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }


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


def lost_fields(one: dict[str, Any]) -> set[str]:
    """Return the fields that Trainer's model of the kind does not have."""
    read_back = models()[one["kind"]].from_dict(copy.deepcopy(one))
    return set(leaves(one)) - set(leaves(read_back.to_dict()))


@pytest.mark.parametrize("case", CASES)
def test_all_objects_are_valid_by_schemas_models_and_rules(case: tuple[str, ...]) -> None:
    core = [one for one in objects(case) if as_core(one)]
    for one in core:
        require_valid(one)
    kinds = {one["kind"] for one in core}
    assert {"ConfigMap"} < kinds
    assert {"Job", "Pod"} & kinds
    assert [field for one in objects(case) if one["kind"] in models() for field in lost_fields(one)] == []
    assert problems(sent_objects(case)) == []


@needs_crds
@pytest.mark.parametrize("case", CASES)
def test_custom_resources_are_valid_by_the_released_crds(case: tuple[str, ...]) -> None:
    custom = [one for one in objects(case) if not as_core(one)]
    assert custom
    assert [problem for one in custom for problem in crd_problems(one)] == []


def test_the_models_reject_an_unknown_field() -> None:
    jobset = copy.deepcopy(rendered_recipe("llama-7b-h100").workload_object)
    jobset["spec"]["failurePolicy"]["restartStragety"] = "BlockingRecreate"
    assert lost_fields(jobset) == {".spec.failurePolicy.restartStragety"}
