"""The Helm chart k8s/chart has the same objects as the Kustomize overlays, and its values are checked by its schema.

Helm's own template engine renders the chart if the Python package helm-python-sdk is installed (Helm 4.2, 244 MB; it is
no dependency of this project). The renderings are kept in tests/golden/chart, with the digest of the chart's files, and
are compared with the overlays in every environment: a chart that was changed and not rendered again is a failure.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from tests.launch.backends.kubernetes.schemas import crd_problems, needs_crds
from tests.test_k8s import Objects, by_name, objects

CHART = Path(__file__).parent.parent / "k8s" / "chart"
RECORDED = Path(__file__).parent / "golden" / "chart"
VALUES: dict[str, dict[str, Any]] = {
    "kueue": {},
    "no-queue": {"kueue": {"enabled": False}, "resourceQuota": {"enabled": True}},
}
KEPT = {"helm.sh/resource-policy": "keep"}  # Helm's own: an uninstalled release leaves the volume


def digest() -> str:
    """Return the digest of every file of the chart."""
    found = hashlib.sha256()
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(CHART)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def recorded(name: str) -> tuple[str, Objects]:
    """Return the digest of the chart that was rendered, and its objects."""
    text = (RECORDED / f"{name}.yaml").read_text(encoding="utf-8")
    return text.partition("\n")[0].rpartition(" ")[2], by_name(list(YAML(typ="safe").load_all(text)))


def rendered(values: dict[str, Any]) -> str:
    """Return what Helm makes of the chart with these values."""
    helm = pytest.importorskip("helm_python", reason="needs the Python package helm-python-sdk, 244 MB")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="scaletrain", namespace="ml")
    texts = [text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml") and text.strip()]
    return "\n---\n".join(text.removeprefix("---").strip() for text in texts)


def for_an_older_kueue(newer: Objects) -> Objects:
    """Return the objects as v1beta1 of Kueue has them, which calls one field by another name."""
    older = copy.deepcopy(newer)
    for (kind, _), one in older.items():
        if "kueue" in one["apiVersion"]:
            one["apiVersion"] = "kueue.x-k8s.io/v1beta1"
        if kind == "ClusterQueue":
            one["spec"]["cohort"] = one["spec"].pop("cohortName")
    return older


@pytest.mark.parametrize("name", VALUES)
def test_helm_renders_what_is_recorded(name: str, golden: Callable[[str, str], None]) -> None:
    text = f"# rendered by Helm; sha256 of the chart: {digest()}\n{rendered(VALUES[name])}\n"
    golden(f"chart/{name}.yaml", text)


def test_helm_renders_the_same_queues_for_an_older_kueue_in_its_own_version() -> None:
    text = rendered({"kueue": {"apiVersion": "kueue.x-k8s.io/v1beta1"}})
    assert by_name(list(YAML(typ="safe").load_all(text))) == for_an_older_kueue(recorded("kueue")[1])


def test_helm_finds_no_error_in_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="needs the Python package helm-python-sdk, 244 MB")
    assert helm.lint(str(CHART))["errors"] == []


@pytest.mark.parametrize("name", VALUES)
def test_the_recorded_rendering_is_of_this_chart(name: str) -> None:
    assert recorded(name)[0] == digest(), (
        "the chart has changed: pip install helm-python-sdk, then pytest --accept-goldens tests/test_k8s_chart.py"
    )


@pytest.mark.parametrize("name", ["kueue", "no-queue"])
def test_the_chart_has_the_objects_of_the_overlay(name: str) -> None:
    rendered = recorded(name)[1]
    assert rendered["PersistentVolumeClaim", "runs"]["metadata"].pop("annotations") == KEPT
    assert rendered == objects(f"overlays/{name}")


@needs_crds
@pytest.mark.parametrize("of_version", [dict, for_an_older_kueue], ids=["v1beta2", "v1beta1"])
def test_the_queues_are_valid_by_the_released_crds_of_their_version(of_version: Callable[[Objects], Objects]) -> None:
    queues = [one for one in of_version(recorded("kueue")[1]).values() if "kueue" in one["apiVersion"]]
    assert len(queues) > 8
    assert [problem for one in queues for problem in crd_problems(json.loads(json.dumps(one)))] == []


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text()))


@pytest.fixture
def values() -> dict[str, Any]:
    """Return the values of the chart, without YAML's sharing of nodes."""
    return dict(json.loads(json.dumps(YAML(typ="safe").load((CHART / "values.yaml").read_text()))))


def test_the_default_values_are_valid_and_every_key_is_required(schema: dict[str, Any], values: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert values
    assert values.keys() <= set(schema["required"])


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("namespace.name", "Not_A_Name"),
        ("namespace.podSecurity", "none"),
        ("kueue.queueingStrategy", "FIFO"),
        ("kueue.apiVersion", "v1beta2"),
        ("kueue.teams", []),
        ("runsClaim.accessModes", ["ReadOnlyMany"]),
        ("priorityClasses", [{"name": "a", "value": 2_000_000_000, "description": ""}]),
        ("submitters", []),
        ("workloads.slurm", True),
    ],
)
def test_wrong_values_are_refused(schema: dict[str, Any], values: dict[str, Any], path: str, wrong: object) -> None:
    section, _, key = path.rpartition(".")
    (values[section] if section else values)[key] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)


def test_the_chart_has_the_version_of_the_package() -> None:
    from scaletrain_cli import __version__

    chart = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
