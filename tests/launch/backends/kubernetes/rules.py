"""Rules for rendered objects that no schema states and that values of a spec could violate.

Webhooks apply some of them. Others are applied by controllers that create pods, long after the workload was accepted,
or by none: a volume that no container mounts is never reported. What no spec changes is held by the golden manifests.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.quota import parse_quantity
from scaletrain_cli.launch.backends.kubernetes.workloads import children

Object = dict[str, Any]
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_OWN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_LARGEST_OBJECT_BYTES, _LARGEST_ANNOTATIONS_BYTES = 2**20, 256 * 1024


def problems(objects: Iterable[Object]) -> list[str]:
    """Return the problems of the objects, of those that controllers create from them, and of their references."""
    sent = list(objects)
    every = [*sent, *children(sent)]
    return [f"{one['kind']}: {problem}" for one in every for problem in _problems_of(one, every)]


def _problems_of(one: Object, every: Sequence[Object]) -> Iterator[str]:
    metadata, spec = one["metadata"], one.get("spec", {})
    yield from _names("metadata", metadata, "name", "namespace")
    if metadata.get("namespace") != every[0]["metadata"].get("namespace"):
        yield f"metadata.namespace is {metadata.get('namespace')}, and another object has another one"
    yield from _labels("metadata", metadata)
    match one["apiVersion"], one["kind"]:
        case _, "Pod":
            yield from _pod_problems(spec, every)
        case "batch/v1", "Job":
            yield from _labels("spec.template.metadata", spec["template"].get("metadata", {}))
            yield from _pod_problems(spec["template"]["spec"], every)
            if spec.get("parallelism", 1) != spec.get("completions", 1):
                yield "spec.parallelism must equal completions: a gang runs all of its pods at once"
        case "batch.volcano.sh/v1alpha1", "Job":
            pods = sum(task["replicas"] for task in spec["tasks"])
            if spec["minAvailable"] != pods:
                yield f"spec.minAvailable must be the {pods} pods of the gang"
            if spec["maxRetry"] < 1:
                yield "spec.maxRetry must be above 0, which means Volcano's default of 3"
        case _, "ConfigMap":
            size = sum(len(f"{key}{value}".encode()) for key, value in one.get("data", {}).items())
            if size > _LARGEST_OBJECT_BYTES:
                yield f"data has {size} bytes, and must not exceed {_LARGEST_OBJECT_BYTES}"
            yield from (
                f"data.{key} is no valid key" for key in one["data"] if not re.fullmatch(r"[-A-Za-z0-9_.]+", key)
            )
        case _, "PodGroup":
            gangs = {job["spec"]["completions"] for job in every if job["kind"] == "Job"}
            if {spec["schedulingPolicy"]["gang"]["minCount"]} != gangs:
                yield f"spec.schedulingPolicy.gang.minCount must be the pods of the gang: {gangs}"


def _names(path: str, part: Object, *keys: str) -> Iterator[str]:
    for key in keys:
        if key in part and not _SUBDOMAIN.fullmatch(str(part[key])):
            yield f"{path}.{key} = {part[key]} must be a name of lower-case letters, digits, dashes and dots"


def _labels(path: str, metadata: Object) -> Iterator[str]:
    for part in ("labels", "annotations", "nodeSelector"):
        for key, value in metadata.get(part, {}).items():
            prefix, slash, name = key.rpartition("/")
            if not _QUALIFIED.fullmatch(name) or (slash and not _SUBDOMAIN.fullmatch(prefix)):
                yield f"{path}.{part}.{key} is no valid key"
            if not isinstance(value, str):
                yield f"{path}.{part}.{key} = {value} must be text"
            elif part != "annotations" and value and not _QUALIFIED.fullmatch(value):
                yield f"{path}.{part}.{key} = {value} must be at most 63 letters, digits, dashes, dots and _"
    size = sum(len(f"{key}{value}".encode()) for key, value in metadata.get("annotations", {}).items())
    if size > _LARGEST_ANNOTATIONS_BYTES:
        yield f"{path}.annotations have {size} bytes, and must not exceed {_LARGEST_ANNOTATIONS_BYTES}"


def _twice(path: str, values: Iterable[Any]) -> Iterator[str]:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            yield f"{path} has {value} twice"
        seen.add(value)


def _pod_problems(pod: Object, every: Sequence[Object]) -> Iterator[str]:
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    names = [volume["name"] for volume in pod["volumes"]]
    yield from _twice("volumes", names)
    yield from _twice("containers", (container["name"] for container in containers))
    for container in containers:
        yield from _container_problems(container, names)
    mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
    yield from (f"volume {name} is mounted by no container" for name in names if name not in mounted)
    for volume in pod["volumes"]:
        yield from _volume_problems(volume, every)
    for toleration in pod.get("tolerations", []):
        yield from _toleration_problems(toleration)
    yield from _labels("spec", {"nodeSelector": pod.get("nodeSelector", {})})
    yield from _names("spec", pod, "serviceAccountName", "priorityClassName")
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
        yield "securityContext.runAsUser must not be root beside runAsNonRoot"
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield "dnsPolicy must be ClusterFirstWithHostNet on the host's network"
    if pod.get("terminationGracePeriodSeconds", 30) < 1:
        yield "terminationGracePeriodSeconds must be above 0"
    group = pod.get("schedulingGroup", {}).get("podGroupName")
    if group and group not in {one["metadata"]["name"] for one in every if one["kind"] == "PodGroup"}:
        yield f"schedulingGroup.podGroupName = {group} names no PodGroup that is sent with it"


def _container_problems(container: Object, volumes: Sequence[str]) -> Iterator[str]:
    if not container["image"]:
        yield "image must not be empty"
    yield from _resource_problems(container.get("resources", {}))
    yield from _twice("env", (variable["name"] for variable in container.get("env", [])))
    for variable in container.get("env", []):
        if not _VARIABLE.fullmatch(variable["name"]):
            yield f"env: {variable['name']} is no name of a variable"
        secret = variable.get("valueFrom", {}).get("secretKeyRef", {})
        yield from _names("secretKeyRef", secret, "name")
        if secret and not secret.get("key"):
            yield "secretKeyRef must name a key of the Secret"
    mounts = container.get("volumeMounts", [])
    yield from _twice("volumeMounts", (mount["mountPath"] for mount in mounts))
    for mount in mounts:
        path, inner = mount["mountPath"], mount.get("subPath", "")
        if mount["name"] not in volumes:
            yield f"volumeMounts: {mount['name']} names no volume"
        if not path.startswith("/") or ":" in path:
            yield f"volumeMounts: {path} must be absolute, without colons"
        if ".." in inner.split("/") or inner.startswith("/"):
            yield f"volumeMounts: {inner} must be a relative path without `..`"


def _amounts(quantities: Mapping[str, Any]) -> Iterator[tuple[str, Fraction | None]]:
    """Yield each amount by its name; None is no quantity."""
    for name, quantity in quantities.items():
        try:
            amount = parse_quantity(quantity)
        except ValueError:
            yield name, None
        else:
            yield name, None if amount < 0 or " " in str(quantity) else amount


def _resource_problems(resources: Object) -> Iterator[str]:
    requests, limits = (dict(_amounts(resources.get(part, {}))) for part in ("requests", "limits"))
    for name in {**requests, **limits}:
        is_device = "/" in name
        if not is_device and name not in _OWN_RESOURCES and not name.startswith("hugepages-"):
            yield f"{name} is no resource; those of device plugins have a domain"
        request, limit = (
            requests.get(name, limits.get(name)),
            limits.get(name, None if is_device else requests.get(name)),
        )
        if request is None or limit is None:
            yield f"{name} must be a quantity that is not negative, such as 64Gi, and have a limit if it is a device"
        elif is_device and (request != limit or request.denominator != 1):
            yield f"{name} must be whole and equal the limit, as devices are not shared out"
        elif request > limit:
            yield f"requests.{name} must not exceed the limit"


def _volume_problems(volume: Object, every: Sequence[Object]) -> Iterator[str]:
    if len(volume) != 2:
        yield f"volume {volume['name']} must have one source"
    yield from _names("persistentVolumeClaim", volume.get("persistentVolumeClaim", {}), "claimName")
    size = (volume.get("emptyDir") or {}).get("sizeLimit", "0")
    if dict(_amounts({"sizeLimit": size}))["sizeLimit"] is None:
        yield f"emptyDir.sizeLimit = {size} must be a quantity"
    if reference := volume.get("configMap"):
        maps = {one["metadata"]["name"]: one for one in every if one["kind"] == "ConfigMap"}
        if reference["name"] not in maps:
            yield f"volume {volume['name']}: {reference['name']} names no ConfigMap that is sent with it"
            return
        there = maps[reference["name"]].get("data", {}).keys() | maps[reference["name"]].get("binaryData", {}).keys()
        for item in reference["items"]:
            if item["key"] not in there:
                yield f"volume {volume['name']}: {item['key']} is no key of the ConfigMap"


def _toleration_problems(toleration: Object) -> Iterator[str]:
    operator, effect = toleration.get("operator", "Equal"), toleration.get("effect")
    if operator not in ("Exists", "Equal") or effect not in (None, "NoSchedule", "PreferNoSchedule", "NoExecute"):
        yield f"tolerations: there is no operator {operator} or no effect {effect}"
    if operator == "Exists" and toleration.get("value"):
        yield "tolerations: a value must be left out with operator Exists"
    if not toleration.get("key") and operator != "Exists":
        yield "tolerations: the operator must be Exists without a key"
    if "tolerationSeconds" in toleration and effect != "NoExecute":
        yield "tolerations: tolerationSeconds is for effect NoExecute alone"
