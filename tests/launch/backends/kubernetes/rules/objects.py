"""Problems of the objects of a submission that no schema states, each with its path. Pure.

Schemas state fields and types. Enumerations, quantities, references between parts, and limits on generated names are
checked by webhooks, by controllers much later, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.kubernetes.workloads import child_jobs, child_jobset
from tests.launch.backends.kubernetes.rules.findings import RuleFinding, below, dns_subdomain, label_map
from tests.launch.backends.kubernetes.rules.jobs import job_findings, jobset_findings
from tests.launch.backends.kubernetes.rules.volcano import volcano_findings

Object = dict[str, Any]
_LARGEST_OBJECT_BYTES = 2**20
_LARGEST_ANNOTATIONS_BYTES = 256 * 1024


def problems(objects: Iterable[Object]) -> tuple[Problem, ...]:
    """Return all problems of the objects, of each and of their references."""
    known = list(objects)
    found: dict[Problem, None] = {}
    for one in known:
        where = f"{one.get('kind')}/{one.get('metadata', {}).get('name')}"
        for finding in (*_metadata_findings(one), *_kind_findings(one, known), *_reference_findings(one, known)):
            given = None if finding.given is None else str(finding.given)
            found[Problem(where, finding.path, finding.message, given)] = None
    return tuple(found)


def _metadata_findings(one: Object) -> Iterator[RuleFinding]:
    metadata = one.get("metadata", {})
    yield from dns_subdomain("metadata.name", metadata.get("name"))
    yield from dns_subdomain("metadata.namespace", metadata.get("namespace", "default"))
    yield from label_map("metadata.labels", metadata.get("labels"))
    annotations = metadata.get("annotations", {})
    yield from label_map("metadata.annotations", annotations, values=False)
    size = sum(len(f"{key}{value}".encode()) for key, value in annotations.items())
    if size > _LARGEST_ANNOTATIONS_BYTES:
        yield RuleFinding(
            "metadata.annotations", f"{size} bytes", f"must not exceed {_LARGEST_ANNOTATIONS_BYTES} bytes."
        )


def _kind_findings(one: Object, known: Sequence[Object]) -> Iterator[RuleFinding]:
    kind, core = one.get("kind"), "batch.volcano.sh" not in str(one.get("apiVersion"))
    if kind == "JobSet":
        yield from jobset_findings(one)
        yield from _job_set_children(one)
    elif kind == "Job" and core:
        yield from job_findings(one)
    elif kind == "Job":
        yield from volcano_findings(one)
    elif kind == "TrainJob":
        yield from _trainjob_findings(one, known)
    elif kind == "ConfigMap":
        yield from _config_map_findings(one)
    elif kind == "PodGroup":
        yield from _pod_group_findings(one, known)


def _job_set_children(jobset: Object) -> Iterator[RuleFinding]:
    for index, job in enumerate(child_jobs(jobset)):
        # The controller derives its name: a problem of it is one of the JobSet's name.
        for finding in job_findings(job):
            if finding.path == "metadata.name":
                yield finding._replace(given=jobset.get("metadata", {}).get("name"))
            else:
                yield next(below(f"spec.replicatedJobs[{index}].template", [finding]))


def _trainjob_findings(trainjob: Object, known: Sequence[Object]) -> Iterator[RuleFinding]:
    reference = trainjob.get("spec", {}).get("runtimeRef", {})
    runtime = _named(known, reference.get("kind"), reference.get("name"))
    if runtime is None:
        yield RuleFinding("spec.runtimeRef", reference.get("name"), "names no runtime that is sent with it.")
        return
    jobset = child_jobset(runtime, trainjob)
    yield from below("(its runtime)", [*jobset_findings(jobset), *_job_set_children(jobset)])
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    templates = [replicated.get("template", {}) for replicated in jobset["spec"].get("replicatedJobs", [])]
    if not any(one.get("metadata", {}).get("labels", {}).get(label) == "trainer" for one in templates):
        yield RuleFinding("(its runtime)", None, f"must have a replicated job with the label {label}: trainer.")


def _config_map_findings(config_map: Object) -> Iterator[RuleFinding]:
    data = config_map.get("data", {})
    for key in data:
        if not all(character.isalnum() or character in "-_." for character in key) or not key.isascii():
            yield RuleFinding(f"data.{key}", key, "must be letters, digits, dashes, dots and _.")
    size = sum(len(f"{key}{value}".encode()) for key, value in data.items())
    if size > _LARGEST_OBJECT_BYTES:
        yield RuleFinding("data", f"{size} bytes", f"must not exceed {_LARGEST_OBJECT_BYTES} bytes.")


def _pod_group_findings(group: Object, known: Sequence[Object]) -> Iterator[RuleFinding]:
    count = group.get("spec", {}).get("schedulingPolicy", {}).get("gang", {}).get("minCount")
    for template, nodes in _templates(known):
        if template.get("spec", {}).get("schedulingGroup", {}).get("podGroupName") == group["metadata"].get("name"):
            if count != nodes:
                yield RuleFinding(
                    "spec.schedulingPolicy.gang.minCount", count, f"must be the {nodes} pods of the gang."
                )
            return
    yield RuleFinding("metadata.name", group["metadata"].get("name"), "is the group of no pod that is sent with it.")


def _reference_findings(one: Object, known: Sequence[Object]) -> Iterator[RuleFinding]:
    """Yield the problems of references between the objects."""
    namespaces = {other.get("metadata", {}).get("namespace") for other in known}
    if len(namespaces) > 1:
        given = one.get("metadata", {}).get("namespace")
        yield RuleFinding("metadata.namespace", given, f"must be one for all objects, not {len(namespaces)}.")
    for template, _ in _templates([one]):
        pod = template.get("spec", {})
        for volume in pod.get("volumes", []):
            reference = volume.get("configMap")
            if not reference:
                continue
            config_map = _named(known, "ConfigMap", reference.get("name"))
            if config_map is None:
                yield RuleFinding(
                    f"volumes.{volume.get('name')}", reference.get("name"), "names no ConfigMap sent with it."
                )
                continue
            for item in reference.get("items", []):
                if item.get("key") not in {**config_map.get("data", {}), **config_map.get("binaryData", {})}:
                    yield RuleFinding(f"volumes.{volume.get('name')}", item.get("key"), "is no key of the ConfigMap.")
        group = pod.get("schedulingGroup", {}).get("podGroupName")
        if group is not None and _named(known, "PodGroup", group) is None:
            yield RuleFinding("schedulingGroup.podGroupName", group, "names no PodGroup that is sent with it.")


def _templates(objects: Iterable[Object]) -> Iterator[tuple[Object, int]]:
    """Yield every pod template in the objects, with the number of its pods."""
    for one in objects:
        spec = one.get("spec", {})
        inner = spec.get("template", {}).get("spec", {}) if one.get("kind") == "TrainingRuntime" else spec
        for replicated in inner.get("replicatedJobs", []):
            job = replicated.get("template", {}).get("spec", {})
            yield job.get("template", {}), job.get("parallelism", 1)
        for task in spec.get("tasks", []):
            yield task.get("template", {}), task.get("replicas", 1)
        if one.get("kind") == "Job" and "tasks" not in spec:
            yield spec.get("template", {}), spec.get("parallelism", 1)


def _named(objects: Iterable[Object], kind: Any, name: Any) -> Object | None:
    return next(
        (one for one in objects if one.get("kind") == kind and one.get("metadata", {}).get("name") == name), None
    )
