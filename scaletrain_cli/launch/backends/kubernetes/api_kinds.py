"""The kinds of Kubernetes objects that the back end uses, and their paths on the API server. Pure."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]  # as the API server writes it


@dataclass(frozen=True)
class Kind:
    """A resource type. ``install`` is how to install it on a cluster.

    ``older``: versions that a cluster may serve instead, the newest first. What the launcher writes is valid in each of
    them, and as_newest() converts what it reads.
    """

    name: str
    group: str  # "" for the core group
    version: str
    plural: str
    namespaced: bool = True
    install: str = ""
    older: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def object(self, metadata: Object, spec: Object) -> Object:
        return {"apiVersion": self.api_version, "kind": self.name, "metadata": metadata, "spec": spec}

    @property
    def root(self) -> str:
        """Return the path of the API group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """Return the path of one object, or of all (in all namespaces for ``""``); ``part`` is a subresource."""
        middle = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        end = f"/{quote(name, safe='')}" if name else ""
        return f"{self.root}{middle}/{self.plural}{end}" + (f"/{part}" if part else "")


_SIGS = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/{}/releases/latest/download/manifests.yaml"
_JOBSET, _KUEUE = _SIGS.format("jobset"), _SIGS.format("kueue")
_VOLCANO = (
    "helm repo add volcano-sh https://volcano-sh.github.io/helm-charts && "
    "helm install volcano volcano-sh/volcano -n volcano-system --create-namespace"
)
_TRAINER = "Kubeflow Trainer 2, as https://www.kubeflow.org/docs/components/trainer describes"

CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
POD = Kind("Pod", "", "v1", "pods")
EVENT = Kind("Event", "", "v1", "events")
NAMESPACE = Kind("Namespace", "", "v1", "namespaces", namespaced=False)
NODE = Kind("Node", "", "v1", "nodes", namespaced=False)
CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
PERSISTENT_VOLUME = Kind("PersistentVolume", "", "v1", "persistentvolumes", namespaced=False)
CSI_DRIVER = Kind("CSIDriver", "storage.k8s.io", "v1", "csidrivers", namespaced=False)
SECRET = Kind("Secret", "", "v1", "secrets")
RESOURCE_QUOTA = Kind("ResourceQuota", "", "v1", "resourcequotas")
LIMIT_RANGE = Kind("LimitRange", "", "v1", "limitranges")
SERVICE_ACCOUNT = Kind("ServiceAccount", "", "v1", "serviceaccounts")
JOB = Kind("Job", "batch", "v1", "jobs")
PRIORITY_CLASS = Kind("PriorityClass", "scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)

JOB_SET = Kind("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", install=_JOBSET)
VOLCANO_JOB = Kind("Job", "batch.volcano.sh", "v1alpha1", "jobs", install=_VOLCANO)
POD_GROUP = Kind("PodGroup", "scheduling.volcano.sh", "v1beta1", "podgroups", install=_VOLCANO)
VOLCANO_QUEUE = Kind("Queue", "scheduling.volcano.sh", "v1beta1", "queues", namespaced=False, install=_VOLCANO)
TRAIN_JOB = Kind("TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", install=_TRAINER)
# Kubernetes 1.36 serves v1alpha2, 1.37 v1alpha3 and v1beta1; the gang of a PodGroup is the same in all of them.
NATIVE_POD_GROUP = Kind("PodGroup", "scheduling.k8s.io", "v1beta1", "podgroups", older=("v1alpha3", "v1alpha2"))
RUNTIME = Kind("TrainingRuntime", "trainer.kubeflow.org", "v1alpha1", "trainingruntimes", install=_TRAINER)

# Kueue serves v1beta2 since 0.15 and v1beta1 until 0.19; Cohort and Topology were v1alpha1 at first.
_KUEUE_GROUP = ("kueue.x-k8s.io", "v1beta2")
_KUEUE_OLDER, _KUEUE_OLDEST = ("v1beta1",), ("v1beta1", "v1alpha1")
WORKLOAD = Kind("Workload", *_KUEUE_GROUP, "workloads", install=_KUEUE, older=_KUEUE_OLDER)
LOCAL_QUEUE = Kind("LocalQueue", *_KUEUE_GROUP, "localqueues", install=_KUEUE, older=_KUEUE_OLDER)
CLUSTER_QUEUE = Kind("ClusterQueue", *_KUEUE_GROUP, "clusterqueues", False, _KUEUE, _KUEUE_OLDER)
FLAVOR = Kind("ResourceFlavor", *_KUEUE_GROUP, "resourceflavors", False, _KUEUE, _KUEUE_OLDER)
COHORT = Kind("Cohort", *_KUEUE_GROUP, "cohorts", False, _KUEUE, _KUEUE_OLDEST)
ADMISSION_CHECK = Kind("AdmissionCheck", *_KUEUE_GROUP, "admissionchecks", False, _KUEUE, _KUEUE_OLDER)
TOPOLOGY = Kind("Topology", *_KUEUE_GROUP, "topologies", False, _KUEUE, _KUEUE_OLDEST)
WORKLOAD_PRIORITY = Kind("WorkloadPriorityClass", *_KUEUE_GROUP, "workloadpriorityclasses", False, _KUEUE, _KUEUE_OLDER)
# Renamed fields of Kueue's older versions: old name, new name.
_RENAMED = {"cohort": "cohortName", "parent": "parentName"}

# The workload kind for each value of cluster.kubernetes.backend, which is also the first part of the job id.
BACKENDS = {"jobset": JOB_SET, "volcano": VOLCANO_JOB, "trainjob": TRAIN_JOB}
_APPLIED = (CONFIG_MAP, POD, JOB, JOB_SET, VOLCANO_JOB, TRAIN_JOB, RUNTIME, NATIVE_POD_GROUP)


def as_newest(kind: Kind, item: Object) -> Object:
    """Return an object of one of the ``older`` versions with the field names of the newest."""
    spec = item.get("spec")
    if not kind.older or not isinstance(spec, dict) or not _RENAMED.keys() & spec.keys():
        return item
    return {**item, "spec": {_RENAMED.get(key, key): value for key, value in spec.items()}}


def kind_of(body: Object) -> Kind:
    """Return the kind of an object that the back end creates."""
    group, _, version = str(body["apiVersion"]).rpartition("/")
    given = (group, body["kind"])
    kinds = [kind for kind in _APPLIED if (kind.group, kind.name) == given and version in (kind.version, *kind.older)]
    assert kinds, f"{body['apiVersion']} {body['kind']} is not a kind that this launcher creates"
    return kinds[0]


# Choose the version in which a cluster serves a kind. The API server is asked once for each group (``/apis/GROUP``).
#
# A group may serve several versions, and a kind only in some of them: early versions of Kueue served Cohorts as
# v1alpha1 and ClusterQueues as v1beta1.


class ServedVersions:
    """The versions that one API server serves, as far as they are known.

    ``ask`` returns the APIGroup object of a group: None if it is not served, ``{}`` if the user may not read it.
    """

    def __init__(self, ask: Callable[[str], Object | None]) -> None:
        self._ask = ask
        self._groups: dict[str, tuple[str, ...] | None] = {}
        self._used: dict[Kind, Kind] = {}

    def of_group(self, group: str) -> tuple[str, ...] | None:
        """Return the versions of a group, the server's preferred one first; None if they are not known."""
        if group not in self._groups:
            answer = self._ask(group)
            versions = [str(version.get("version", "")) for version in (answer or {}).get("versions", ())]
            self._groups[group] = None if answer == {} else tuple(versions)
        return self._groups[group]

    def candidates(self, kind: Kind) -> list[Kind]:
        """Return the kind in each version in which the launcher knows it and the group is served, the newest first.

        The version in which it was found before is first. A kind that is known in one version only is not asked for.
        """
        known = [kind, *(dataclasses.replace(kind, version=version) for version in kind.older)]
        served = self.of_group(kind.group) if kind.older else None
        kinds = known if served is None else [one for one in known if one.version in served]
        return sorted(kinds, key=lambda one: one != self._used.get(kind))

    def found(self, kind: Kind, served: Kind) -> None:
        """Remember in which version the server has the kind."""
        self._used[kind] = served

    def forget(self, group: str) -> bool:
        """Ask again for a group, whose controller may have been upgraded; return whether its versions are others."""
        before = self._groups.pop(group, None)
        return before is not None and self.of_group(group) != before
