"""Rules for a pod template that its schema does not state. Pure.

The controller of a workload violates them when it creates the pods, long after the workload was accepted. A misspelled
capability or an unmounted volume is never reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.quota import parse_quantity
from tests.launch.backends.kubernetes.rules.findings import (
    RuleFinding,
    below,
    dns_label,
    dns_subdomain,
    label_map,
    one_of,
    twice,
)

Object = dict[str, Any]
# capabilities(7), without the prefix CAP_, as Kubernetes names them.
CAPABILITIES = frozenset(
    "ALL AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN DAC_OVERRIDE DAC_READ_SEARCH "
    "FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN "
    "NET_BIND_SERVICE NET_BROADCAST NET_RAW PERFMON SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT "
    "SYS_MODULE SYS_NICE SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM".split()
)
_OWN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_FIELD = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs)"
)


def pod_findings(template: Object) -> Iterator[RuleFinding]:
    """Yield the problems of ``metadata`` and ``spec`` of a pod template."""
    metadata, pod = template.get("metadata", {}), template.get("spec", {})
    yield from label_map("metadata.labels", metadata.get("labels"))
    yield from label_map("metadata.annotations", metadata.get("annotations"), values=False)
    containers, volumes = pod.get("containers", []), pod.get("volumes", [])
    if not containers:
        yield RuleFinding("spec.containers", None, "must hold a container.")
    names = [volume.get("name") for volume in volumes]
    yield from twice("spec.volumes", names, "name")
    yield from twice("spec.containers", [container.get("name") for container in containers], "name")
    for index, container in enumerate(containers):
        yield from below(f"spec.containers[{index}]", _container_findings(container, names))
    mounted = {mount.get("name") for container in containers for mount in container.get("volumeMounts", [])}
    for index, volume in enumerate(volumes):
        yield from below(f"spec.volumes[{index}]", _volume_findings(volume, mounted))
    for index, toleration in enumerate(pod.get("tolerations", [])):
        yield from below(f"spec.tolerations[{index}]", _toleration_findings(toleration))
    yield from below("spec", _pod_security_findings(pod.get("securityContext", {}), containers))
    yield from label_map("spec.nodeSelector", pod.get("nodeSelector"))
    yield from one_of("spec.restartPolicy", pod.get("restartPolicy"), ("Always", "OnFailure", "Never"))
    yield from one_of(
        "spec.dnsPolicy", pod.get("dnsPolicy"), ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
    )
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield RuleFinding(
            "spec.dnsPolicy", pod.get("dnsPolicy"), "must be ClusterFirstWithHostNet on the host's network."
        )
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if not isinstance(grace, int) or grace < 1:
        yield RuleFinding("spec.terminationGracePeriodSeconds", grace, "must be whole seconds above 0.")
    for key in ("serviceAccountName", "priorityClassName"):
        if key in pod:
            yield from dns_subdomain(f"spec.{key}", pod[key])


def _container_findings(container: Object, volumes: list[Any]) -> Iterator[RuleFinding]:
    yield from dns_label("name", container.get("name"))
    if not container.get("image"):
        yield RuleFinding("image", container.get("image"), "must name an image.")
    yield from one_of("imagePullPolicy", container.get("imagePullPolicy"), ("Always", "IfNotPresent", "Never"))
    yield from one_of(
        "terminationMessagePolicy", container.get("terminationMessagePolicy"), ("File", "FallbackToLogsOnError")
    )
    yield from below("resources", _resource_findings(container.get("resources", {})))
    yield from twice("env", [variable.get("name") for variable in container.get("env", [])], "name")
    for index, variable in enumerate(container.get("env", [])):
        yield from below(f"env[{index}]", _variable_findings(variable))
    mounts = container.get("volumeMounts", [])
    yield from twice("volumeMounts", [mount.get("mountPath") for mount in mounts], "mountPath")
    for index, mount in enumerate(mounts):
        if mount.get("name") not in volumes:
            yield RuleFinding(f"volumeMounts[{index}].name", mount.get("name"), "names no volume of the pod.")
        if not str(mount.get("mountPath", "")).startswith("/") or ":" in mount["mountPath"]:
            yield RuleFinding(
                f"volumeMounts[{index}].mountPath", mount.get("mountPath"), "must be absolute, without colons."
            )
        if ".." in str(mount.get("subPath", "")).split("/") or str(mount.get("subPath", "")).startswith("/"):
            yield RuleFinding(
                f"volumeMounts[{index}].subPath", mount["subPath"], "must be a relative path without `..`."
            )
    capabilities = container.get("securityContext", {}).get("capabilities", {})
    for part in ("add", "drop"):
        for name in capabilities.get(part, []):
            if str(name).removeprefix("CAP_") not in CAPABILITIES:
                yield RuleFinding(f"securityContext.capabilities.{part}", name, "is no capability of Linux.")


def _resource_findings(resources: Object) -> Iterator[RuleFinding]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    amounts: dict[tuple[str, str], Fraction] = {}
    for part, quantities in (("requests", requests), ("limits", limits)):
        for name, quantity in quantities.items():
            try:
                amount = parse_quantity(quantity)
            except ValueError:
                yield RuleFinding(f"{part}.{name}", quantity, "must be a quantity, such as 8, 500m or 64Gi.")
                continue
            if amount < 0 or " " in str(quantity):
                yield RuleFinding(
                    f"{part}.{name}", quantity, "must be a quantity that is not negative, without blanks."
                )
            amounts[part, name] = amount
            if "/" not in name and name not in _OWN_RESOURCES and not name.startswith("hugepages-"):
                yield RuleFinding(f"{part}.{name}", name, "is no resource; those of device plugins have a domain.")
    for part, name in amounts:
        request, limit = amounts.get(("requests", name)), amounts.get(("limits", name))
        if "/" in name and request is not None and request != limit:
            given = f"{requests[name]}, limit {limits.get(name)}"
            yield RuleFinding(f"requests.{name}", given, "must equal the limit, as devices are not shared out.")
        elif "/" in name and amounts[part, name].denominator != 1:
            yield RuleFinding(f"{part}.{name}", resources[part][name], "must be whole.")
        elif part == "requests" and request is not None and limit is not None and request > limit:
            yield RuleFinding(f"requests.{name}", requests[name], f"must not exceed the limit {limits[name]}.")


def _variable_findings(variable: Object) -> Iterator[RuleFinding]:
    name, source = variable.get("name"), variable.get("valueFrom")
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        yield RuleFinding("name", name, "must be the name of an environment variable.")
    if "value" in variable and not isinstance(variable["value"], str):
        yield RuleFinding("value", variable["value"], "must be text.")
    if source is None:
        return
    if variable.get("value"):
        yield RuleFinding("value", variable["value"], "must be left out beside valueFrom.")
    if len(source) != 1:
        yield RuleFinding("valueFrom", sorted(source), "must have one source.")
    if "fieldRef" in source and not _FIELD.fullmatch(str(source["fieldRef"].get("fieldPath"))):
        yield RuleFinding("valueFrom.fieldRef.fieldPath", source["fieldRef"].get("fieldPath"), "is no field of a pod.")
    if "secretKeyRef" in source:
        yield from dns_subdomain("valueFrom.secretKeyRef.name", source["secretKeyRef"].get("name"))
        if not source["secretKeyRef"].get("key"):
            yield RuleFinding("valueFrom.secretKeyRef.key", None, "must name a key of the Secret.")


def _volume_findings(volume: Object, mounted: set[Any]) -> Iterator[RuleFinding]:
    yield from dns_label("name", volume.get("name"))
    sources = [key for key in volume if key != "name"]
    if len(sources) != 1:
        yield RuleFinding("", ", ".join(sources) or None, "must have one source.")
    if volume.get("name") not in mounted:
        yield RuleFinding("name", volume.get("name"), "is mounted by no container.")
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"].get("claimName")
        yield from dns_subdomain("persistentVolumeClaim.claimName", claim)
    empty = volume.get("emptyDir") or {}
    if empty.get("medium") and empty["medium"] not in ("Memory", "HugePages"):
        yield RuleFinding("emptyDir.medium", empty["medium"], "must be Memory, HugePages or empty.")
    if "sizeLimit" in empty:
        try:
            parse_quantity(empty["sizeLimit"])
        except ValueError:
            yield RuleFinding("emptyDir.sizeLimit", empty["sizeLimit"], "must be a quantity, such as 16Gi.")


def _toleration_findings(toleration: Object) -> Iterator[RuleFinding]:
    operator, effect = toleration.get("operator", "Equal"), toleration.get("effect")
    yield from one_of("operator", operator, ("Exists", "Equal"))
    yield from one_of("effect", effect, ("NoSchedule", "PreferNoSchedule", "NoExecute"))
    if operator == "Exists" and toleration.get("value"):
        yield RuleFinding("value", toleration["value"], "must be left out with operator Exists.")
    if not toleration.get("key") and operator != "Exists":
        yield RuleFinding("operator", operator, "must be Exists without a key.")
    if "tolerationSeconds" in toleration and effect != "NoExecute":
        yield RuleFinding("tolerationSeconds", toleration["tolerationSeconds"], "is for effect NoExecute alone.")


def _pod_security_findings(security: Object, containers: list[Object]) -> Iterator[RuleFinding]:
    for where, context in (
        ("securityContext", security),
        *(
            (f"containers[{index}].securityContext", one.get("securityContext", {}))
            for index, one in enumerate(containers)
        ),
    ):
        non_root = context.get("runAsNonRoot", security.get("runAsNonRoot"))
        if non_root and context.get("runAsUser", security.get("runAsUser")) == 0:
            yield RuleFinding(f"{where}.runAsUser", 0, "must not be root beside runAsNonRoot.")
        profile = context.get("seccompProfile", {})
        yield from one_of(
            f"{where}.seccompProfile.type", profile.get("type"), ("RuntimeDefault", "Localhost", "Unconfined")
        )
    policy = security.get("fsGroupChangePolicy")
    yield from one_of("securityContext.fsGroupChangePolicy", policy, ("OnRootMismatch", "Always"))
