"""The objects of one submission, as data and as YAML. Pure apart from documents_for(), which reads the run directory.

`documents` are the files of the run directory that the pods need, by name; they reach the pods in a ConfigMap.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from scaletrain_cli.errors import Problem, SpecError, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.backends.kubernetes import names
from scaletrain_cli.launch.backends.kubernetes.api_kinds import NATIVE_POD_GROUP, Object
from scaletrain_cli.launch.backends.kubernetes.messages import problem, reason
from scaletrain_cli.launch.backends.kubernetes.pod import pod_template
from scaletrain_cli.launch.backends.kubernetes.pod_overrides import unknown_fields
from scaletrain_cli.launch.backends.kubernetes.workloads import (
    config_map,
    jobset,
    metadata_of,
    training_runtime,
    trainjob,
    volcano_job,
)
from scaletrain_cli.launch.code import take_snapshot
from scaletrain_cli.launch.hub_fetch import ONLY
from scaletrain_cli.project_files import project_file
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, code_file, documents_of
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.corpus_files import EMBEDDED_SOURCES
from scaletrain_cli.spec.pod_overrides import OWN_VARIABLES, items_of


def documents_for(run: RunDir, record: RunRecord) -> dict[str, str | bytes]:
    """Return the contents of the run's ConfigMap by file name: the record, and the code unless it is on the nodes.

    The archive of the code is left out if it is too large and the spec has a code_store, from which pods fetch it.
    Raises UsageError if the code no longer exists.
    """
    documents: dict[str, str | bytes] = {**documents_of(run, record)}
    code = record.code
    if code is None:
        return documents
    suffixes = ("sha256", "tar.gz") if record.spec.code.on_nodes is None else ("sha256",)
    files = {suffix: code_file(run, code, suffix) for suffix in suffixes}
    if all(path.is_file() for path in files.values()):
        return _that_fit(record, documents | {path.name: path.read_bytes() for path in files.values()})
    snapshot = take_snapshot(record.spec, record.working_folder, run.path.parent)
    if snapshot is None or snapshot.record.sha256 != code.sha256:
        raise UsageError(reason("code-missing", folder=str(run.path / "code"), run=record.run_id, version=code.name))
    return _that_fit(record, documents | {files[suffix].name: snapshot.files[suffix] for suffix in suffixes})


def _that_fit(record: RunRecord, documents: dict[str, str | bytes]) -> dict[str, str | bytes]:
    """Return the documents without the archive of the code, if object storage has to bring it."""
    size = sum(len(text.encode()) if isinstance(text, str) else len(text) for text in documents.values())
    if size <= _LARGEST_DOCUMENTS_BYTES or record.spec.cluster.kubernetes.code_store is None:
        return documents
    return {name: content for name, content in documents.items() if not name.endswith(_ARCHIVE)}


def has_archive(documents: Mapping[str, str | bytes]) -> bool:
    """Return whether the documents have the archive of the code."""
    return any(name.endswith(_ARCHIVE) for name in documents)


# Strings that YAML 1.1, which kubectl reads, and YAML 1.2 both read as strings without quotes. Others, such as `on`,
# `1_0` and `12:30`, are quoted.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@=-]*(:[A-Za-z0-9_./@=-]+)*( [A-Za-z0-9_./@=-]+)*")
_NOT_STRINGS = frozenset("y n yes no on off true false null none nan inf infinity".split())


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return one YAML document for each object, separated by ``---``."""
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):
        """Writes no anchors, and quotes every string that could be parsed as another type."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_text(self, text: str) -> Any:
            is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_STRINGS
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')

    Representer.add_representer(str, Representer.represent_text)
    writer = YAML(typ="safe", pure=True)
    writer.Representer = Representer
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # None, by its annotation
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.width = _LONGEST_LINE
    stream = io.StringIO()
    writer.dump_all(list(objects), stream)
    return stream.getvalue()


_FIRST_POD_GROUP = "scheduling.k8s.io/v1alpha2"


# A spot node on GKE has 30 s, of which the kubelet grants non-system pods about half.
_GKE_SPOT_SECONDS = 15


def notes(spec: RunSpec) -> Iterator[Reason]:
    """Yield notes for the user; the text of each begins with the key that it is about."""
    kubernetes = spec.cluster.kubernetes
    if kubernetes.image is not None and not kubernetes.image_is_pinned:
        yield reason("note-image-tag", image=kubernetes.image)
    if kubernetes.rdma_resource is not None:
        yield reason("note-ipc-lock" if kubernetes.ipc_lock else "note-rdma")
    if kubernetes.host_network:
        yield reason("note-host-network")
    yield from _about_files(spec)
    yield from _about_gangs(spec)
    yield from _about_preemption(spec)
    if ignored := sorted(OWN_VARIABLES & spec.env.keys()):
        yield reason("note-own-variables", names=ignored)


def _about_files(spec: RunSpec) -> Iterator[Reason]:
    """Yield notes on paths that differ or do not exist in a pod."""
    kubernetes = spec.cluster.kubernetes
    mounted = [kubernetes.runs.path, *(volume.path for volume in kubernetes.volumes)]
    mounted += items_of(kubernetes.pod_overrides, "volumeMounts")
    paths = {
        **{key: None if path in EMBEDDED_SOURCES else path for key, path in spec.data_paths()},
        "data.images.classes": spec.data.images.classes,
        "evaluation.zero_shot.classes": getattr(spec.evaluation.zero_shot, "classes", None),
        "data.tokenizer.path": spec.data.tokenizer.path,
        "data.chat_template": spec.data.chat_template,
        **{weights.key: weights.path for weights in spec.initial_weights},
        "model.adapter.weights": getattr(getattr(spec.model, "adapter", None), "weights", None),
        "checkpoint.dir": None if spec.checkpoint.dir == "auto" else spec.checkpoint.dir,
    }
    for key, path in paths.items():
        if path is None or is_reference(path):
            continue
        if not PurePosixPath(path).is_absolute():
            yield reason("note-relative-path", key=key, path=path, mounted=mounted)
        elif not any(PurePosixPath(path).is_relative_to(folder) for folder in mounted):
            yield reason("note-unmounted-path", key=key, path=path, mounted=mounted)


def _about_gangs(spec: RunSpec) -> Iterator[Reason]:
    kubernetes, nodes = spec.cluster.kubernetes, spec.cluster.nodes
    if kubernetes.native_gang != "none":
        yield reason("note-native-gang")
    elif kubernetes.backend != "volcano" and kubernetes.queue is None and nodes > 1:
        yield reason("note-no-gang", pods=nodes)
    if kubernetes.backend == "trainjob" and kubernetes.ttl_seconds_after_finished is not None:
        yield reason("note-trainjob-ttl")


def _about_preemption(spec: RunSpec) -> Iterator[Reason]:
    cluster, kubernetes = spec.cluster, spec.cluster.kubernetes
    on_gke = kubernetes.spot_taint in ("auto", "gke")
    if cluster.spot and on_gke and cluster.grace_seconds > _GKE_SPOT_SECONDS:
        yield reason("note-gke-spot", grace=cluster.grace_seconds, given=_GKE_SPOT_SECONDS)
    if kubernetes.backend == "volcano":
        unlimited = spec.restarts.preemption == "unlimited"
        yield reason("note-volcano-unlimited" if unlimited else "note-volcano-retries")


_LONGEST_LINE = 2**31  # longer strings are never folded
_ARCHIVE = ".tar.gz"
_LARGEST_DOCUMENTS_BYTES = 1_000_000  # an object is limited to 1 MiB


@dataclass(frozen=True)
class Manifest:
    """Objects in the order in which they are applied, the workload last, and notes for the user about them.

    The workload becomes the owner of the others, so that they are deleted with it.
    """

    workload: names.Workload
    objects: tuple[Object, ...]
    notes: tuple[Reason, ...] = ()

    @property
    def workload_object(self) -> Object:
        return self.objects[-1]


def manifest(
    record: RunRecord, documents: Mapping[str, str | bytes], submission: int = 1, avoid: Sequence[str] = ()
) -> Manifest:
    """Return the objects of a submission; no pod runs on nodes in ``avoid``. Raises SpecError."""
    spec = record.spec
    require_submittable(spec)
    backend = spec.cluster.kubernetes.backend
    workload = names.Workload(record.run_id, submission, record.revision, backend, names.record_mark(record))
    template = pod_template(spec, record.plan, workload, documents, avoid)
    objects = (_config_map(spec, workload, documents), *_workload_objects(spec, workload, template))
    return Manifest(workload, objects, tuple(notes(spec)))


def require_submittable(spec: RunSpec) -> None:
    """Raise SpecError with every setting that is missing for a submission, or that no object can hold."""
    problems = (*_missing(spec), *_unrenderable(spec))
    if problems:
        raise SpecError(reason("not-submittable"), problems)


def _unrenderable(spec: RunSpec) -> Iterator[Problem]:
    """Yield settings that are valid by themselves, but not in the rendered object."""
    kubernetes = spec.cluster.kubernetes
    if kubernetes.kueue and kubernetes.priority is not None and len(kubernetes.priority) > names.LONGEST_LABEL_VALUE:
        yield problem(
            spec, "priority", reason("priority-too-long", most=names.LONGEST_LABEL_VALUE), kubernetes.priority
        )
    for name in sorted(OWN_VARIABLES & kubernetes.secrets.keys()):
        yield problem(spec, f"secrets.{name}", reason("secret-name-taken"))
    for section, overrides in kubernetes.all_overrides.items():
        for inner, why in unknown_fields(overrides) if overrides else ():
            yield problem(spec, f"{section}.{inner}", why)


def _workload_objects(spec: RunSpec, workload: names.Workload, template: Object) -> Iterator[Object]:
    if spec.cluster.kubernetes.native_gang != "none":
        gang = {"schedulingPolicy": {"gang": {"minCount": spec.cluster.nodes}}}
        group = NATIVE_POD_GROUP.object(metadata_of(spec, workload), gang)
        yield group if spec.cluster.kubernetes.native_gang == "auto" else {**group, "apiVersion": _FIRST_POD_GROUP}
    if workload.backend == "volcano":
        yield volcano_job(spec, workload, template)
    elif workload.backend == "trainjob":
        yield training_runtime(spec, workload, template)
        yield trainjob(spec, workload)
    else:
        yield jobset(spec, workload, template)


def _missing(spec: RunSpec) -> Iterator[Problem]:
    """Yield required settings that the spec does not have."""
    kubernetes = spec.cluster.kubernetes
    if kubernetes.image is None:
        yield problem(spec, "image", reason("image-missing", guide=str(project_file("k8s/README.md"))))
    if kubernetes.runs.per_pod:
        only = spec.env.get(ONLY)
        if spec.cluster.nodes > 1 and (only == "rehearsal" or spec.code.own_program):
            yield problem(spec, "runs.per_pod", reason("per-pod-shared", nodes=spec.cluster.nodes), "true")
        elif spec.cluster.nodes > 1 and only is None and not spec.keeps_run_in_mirror:
            yield problem(spec, "runs.per_pod", reason("per-pod-gang", nodes=spec.cluster.nodes), "true")
        dotted, folder = "checkpoint.dir", PurePosixPath(spec.checkpoint.dir)
        volumes = [volume.path for volume in spec.cluster.kubernetes.volumes if not volume.read_only]
        is_kept = folder.is_absolute() and any(map(folder.is_relative_to, volumes))
        if only is None and not is_kept and not spec.keeps_run_in_mirror:
            lost = reason("checkpoints-lost", volumes=volumes) if volumes else reason("checkpoints-lost-no-volume")
            yield Problem.because(spec.where(dotted), dotted, lost, spec.checkpoint.dir)
    elif kubernetes.runs.claim is None:
        yield problem(spec, "runs.claim", reason("runs-claim-missing"))


def _config_map(spec: RunSpec, workload: names.Workload, documents: Mapping[str, str | bytes]) -> Object:
    texts = {name: text for name, text in documents.items() if isinstance(text, str)}
    files = {name: content for name, content in documents.items() if isinstance(content, bytes)}
    contents = {name: text.encode() for name, text in texts.items()} | files
    size = sum(map(len, contents.values()))
    if size > _LARGEST_DOCUMENTS_BYTES:
        packed = sum(len(content) for name, content in contents.items() if name.endswith(_ARCHIVE))
        most = {"bytes": size, "most_bytes": _LARGEST_DOCUMENTS_BYTES}
        with_code = reason("code-too-large", code_bytes=packed, **most)
        raise UsageError(with_code if packed else reason("record-too-large", **most))
    digest = hashlib.sha256(b"\0".join(name.encode() + b"\0" + contents[name] for name in sorted(contents))).hexdigest()
    metadata = metadata_of(spec, workload, annotations={names.DOCUMENTS_ANNOTATION: digest})
    return config_map({**metadata, "name": workload.config_map}, texts, files)
