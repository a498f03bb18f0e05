"""Merge cluster.kubernetes.pod_overrides into a pod template, and compare their fields with those of Kubernetes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.reasons import Reason
from scaletrain_cli.text import nearest_name

# The field by which items of a list are the same one (patchMergeKey in k8s.io/api/core/v1/types.go). Items of other
# lists are added, also where kubectl would replace them: the launcher's tolerations stay.
_SAME_ITEM = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "resourceClaims"), "name"),
    **{"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort", "hostAliases": "ip"},
    "topologySpreadConstraints": "topologyKey",
}
_QUANTITIES = re.compile(r"\.(requests|limits|overhead)\.|\.(sizeLimit|storage)$")  # also given as numbers
_OF_CONTAINERS = ("containers", "initContainers", "volumes", "resourceClaims")


def merged(template: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod template, or a part of one, with what the overrides set; null removes a field."""
    return dict(_merged(template, overrides, ""))


def _merged(base: Any, override: Any, field: str) -> Any:
    if isinstance(override, Mapping):
        result = dict(base or {})
        for name, value in override.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = _merged(result.get(name), value, name)
        return result
    if not isinstance(override, list | tuple):
        return override
    items, same = list(base or ()), _SAME_ITEM.get(field)
    for item in override:
        places = [index for index, other in enumerate(items) if same and other.get(same) == item.get(same)]
        if places:
            items[places[0]] = _merged(items[places[0]], item, "")
        elif item not in items:
            items.append(_merged(None, item, ""))
    return items


def without_resources(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides without what the container of the agent requests in a pod of the run."""
    pod = dict(overrides.get("spec") or {})
    if "containers" in pod:
        pod["containers"] = [
            {name: value for name, value in container.items() if name != "resources"} for container in pod["containers"]
        ]
    return {**overrides, "spec": pod}


def without_containers(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides without containers, volumes and devices, for a pod that only reads the run."""
    pod = overrides.get("spec") or {}
    return {**overrides, "spec": {name: value for name, value in pod.items() if name not in _OF_CONTAINERS}}


def unknown_fields(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Reason]]:
    """Yield the key of each part that is no field of a pod template, or has another type, by the kubernetes package.

    Yields nothing where the package is not installed: the API server then compares them.
    """
    try:
        from kubernetes.client import models
    except ImportError:
        return
    yield from _misfits(models, dict(overrides), "V1PodTemplateSpec", "")


def _misfits(models: Any, value: Any, kind: str, key: str) -> Iterator[tuple[str, Reason]]:
    """Yield what does not fit a type as the package writes it, such as ``List[V1Volume]`` or ``Dict[str, str]``."""
    if value is None or kind == "object":
        return
    inner = re.fullmatch(r"List\[(.+)\]|Dict\[str, (.+)\]", kind)
    model = getattr(models, kind, None)
    expected = {"str": str, "int": int, "bool": bool}.get(kind, list | tuple if inner and inner[1] else dict)
    is_quantity = kind == "str" and type(value) in (int, float) and _QUANTITIES.search(key)
    if not is_quantity and (not isinstance(value, expected) or (kind == "int" and isinstance(value, bool))):
        yield key, reason("override-type", type=re.sub(r"\bV1", "", kind))
    elif inner and inner[1]:
        for index, item in enumerate(value):
            yield from _misfits(models, item, inner[1], f"{key}.{index}")
    elif inner:
        for name, item in value.items():
            yield from _misfits(models, item, inner[2], f"{key}.{name}")
    elif model is not None:
        fields = {field: model.openapi_types[name] for name, field in model.attribute_map.items()}
        for name, item in value.items():
            if name in fields:
                yield from _misfits(models, item, fields[name], f"{key}.{name}".lstrip("."))
            else:
                near = nearest_name(name, fields)
                code = "override-field" if near is None else "override-field-misspelled"
                yield f"{key}.{name}".lstrip("."), reason(code, type=kind.removeprefix("V1"), near=near)
