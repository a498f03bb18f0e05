"""Everything that is sent for one submission, as objects and as text. Pure: asks no cluster and touches no file.

`documents` are what the pods need of the run directory, by file name; they reach the pods in a ConfigMap.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.errors import Problem, SpecError, UsageError
from scaletrain_cli.launch.kubernetes.jobset import jobset
from scaletrain_cli.launch.kubernetes.names import DOCUMENTS_ANNOTATION, Workload, record_mark
from scaletrain_cli.launch.kubernetes.notes import notes
from scaletrain_cli.launch.kubernetes.pod import pod_template
from scaletrain_cli.launch.kubernetes.pod_group import pod_group
from scaletrain_cli.launch.kubernetes.rules import problems
from scaletrain_cli.launch.kubernetes.trainjob import training_runtime, trainjob
from scaletrain_cli.launch.kubernetes.volcano import volcano_job
from scaletrain_cli.project_files import project_file
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.kubernetes import KubernetesSpec

Object = dict[str, Any]
_LARGEST_DOCUMENTS_BYTES = 1_000_000  # an object may have 1 MiB in all


@dataclass(frozen=True)
class Manifest:
    """Objects in the order in which they are applied, the workload last, and what is worth telling about them.

    Those before the workload are to be owned by it, so that its end is theirs.
    """

    workload: Workload
    objects: tuple[Object, ...]
    notes: tuple[str, ...] = ()

    @property
    def workload_object(self) -> Object:
        return self.objects[-1]


def manifest(
    record: RunRecord, documents: Mapping[str, str | bytes], submission: int = 1, avoid: Sequence[str] = ()
) -> Manifest:
    """The objects of a submission; ``avoid`` are nodes to keep off. Raises SpecError for what cannot run."""
    spec = record.spec
    require_submittable(spec)
    backend = spec.cluster.kubernetes.backend
    workload = Workload(record.run_id, submission, record.revision, backend, record_mark(record))
    template = pod_template(spec, record.plan, workload, documents, avoid)
    objects = (_config_map(spec, workload, documents), *_workload_objects(spec, workload, template))
    if found := problems(objects):
        raise SpecError("this run would become objects that no cluster can run", found)
    return Manifest(workload, objects, tuple(notes(spec)))


def require_submittable(spec: RunSpec) -> None:
    """Raise SpecError that names everything a plan does without and a submission does not."""
    missing = tuple(
        Problem(spec.where(key), key, "is missing.", hint=hint) for key, hint in _missing(spec.cluster.kubernetes)
    )
    if missing:
        raise SpecError("this run can be planned, but not submitted to Kubernetes", missing)


def _workload_objects(spec: RunSpec, workload: Workload, template: Object) -> Iterator[Object]:
    if spec.cluster.kubernetes.native_gang != "none":
        yield pod_group(spec, workload)
    if workload.backend == "volcano":
        yield volcano_job(spec, workload, template)
    elif workload.backend == "trainjob":
        yield training_runtime(spec, workload, template)
        yield trainjob(spec, workload)
    else:
        yield jobset(spec, workload, template)


def _missing(kubernetes: KubernetesSpec) -> Iterator[tuple[str, str]]:
    if kubernetes.image is None:
        yield (
            "cluster.kubernetes.image",
            "Name the image of the pods by digest, as registry/scaletrain@sha256:...; "
            f"{project_file('k8s/README.md')} says how to build one.",
        )
    if kubernetes.runs.claim is None:
        yield (
            "cluster.kubernetes.runs.claim",
            "Name a PersistentVolumeClaim with access mode ReadWriteMany: the pods keep the run directory there.",
        )


def _config_map(spec: RunSpec, workload: Workload, documents: Mapping[str, str | bytes]) -> Object:
    texts = {name: text for name, text in documents.items() if isinstance(text, str)}
    files = {name: content for name, content in documents.items() if isinstance(content, bytes)}
    contents = {name: text.encode() for name, text in texts.items()} | files
    _require_room({name: len(content) for name, content in contents.items()})
    digest = hashlib.sha256(b"\0".join(name.encode() + b"\0" + contents[name] for name in sorted(contents))).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": workload.config_map,
            "namespace": spec.cluster.kubernetes.namespace,
            "labels": workload.labels,
            "annotations": workload.annotations | {DOCUMENTS_ANNOTATION: digest},
        },
        "immutable": True,
        "data": texts,
        **({"binaryData": {name: base64.b64encode(files[name]).decode() for name in files}} if files else {}),
    }


def _require_room(sizes: Mapping[str, int]) -> None:
    if sum(sizes.values()) <= _LARGEST_DOCUMENTS_BYTES:
        return
    packed = sum(size for name, size in sizes.items() if name.endswith(".tar.gz"))
    what, cure = f"the run's record takes {sum(sizes.values()):,} bytes", "Shorten env or data.skip."
    if packed:
        what = f"the run's record and code take {sum(sizes.values()):,} bytes, {packed:,} of them the packed code"
        cure = (
            "Name what the run does not need in .scaletrainignore, or bring the tree into the image or onto a volume "
            "and say where it is: code.on_nodes."
        )
    raise UsageError(f"{what}; a ConfigMap, by which pods get it, has room for {_LARGEST_DOCUMENTS_BYTES:,}. {cure}")
