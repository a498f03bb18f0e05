"""A spec without a namespace uses that of the kubeconfig's context, and its run keeps it."""

import json
import re
from pathlib import Path

import pytest

from scaletrain_cli.api import prepare_submission
from scaletrain_cli.launch.backends.kubernetes.api import default_namespace
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec
from tests.launch.backends.kubernetes.conftest import SETTINGS
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.conftest import MakeRun, make_spec

WITHOUT = tuple(setting for setting in SETTINGS if "namespace" not in setting)


def put_context(tmp_path: Path, namespace: str | None, name: str = "test") -> None:
    """Write the namespace of a context into the kubeconfig."""
    path = tmp_path / "kubeconfig"
    config = json.loads(path.read_text())
    contexts = [one for one in config["contexts"] if one["name"] != name]
    place = {"cluster": "c", "user": "kim", **({} if namespace is None else {"namespace": namespace})}
    path.write_text(json.dumps(config | {"contexts": [*contexts, {"name": name, "context": place}]}))


def test_later_verbs_use_the_namespace_of_the_submission(api: FakeApi, tmp_path: Path, make_run: MakeRun) -> None:
    put_context(tmp_path, "team")
    made = make_run(*WITHOUT)
    submit_run(made.run, made.record, KubernetesBackend())
    put_context(tmp_path, "elsewhere")
    record = read_record(made.run)
    assert record.spec.cluster.kubernetes.namespace == "team"
    assert replan(made.run, ["cluster.nodes=1"]).spec.cluster.kubernetes.namespace == "team"
    backend = KubernetesBackend()
    assert backend.job(made.run, record).state == "queued"
    assert backend.findings(made.run, record) == []
    backend.cancel(made.run, record)
    assert {name for asked in api.asked for name in re.findall(r"/namespaces/([^/?]+)", asked)} == {"team"}


def test_a_resume_without_a_namespace_has_that_of_the_context(api: FakeApi, tmp_path: Path, make_run: MakeRun) -> None:
    made = make_run(*SETTINGS)
    put_context(tmp_path, "team")
    assert replan(made.run, ["cluster.kubernetes.namespace=null"]).spec.cluster.kubernetes.namespace == "team"


@pytest.mark.parametrize(
    ("context", "namespace"), [(None, "team"), ("other", "vision"), ("bare", "default"), ("unknown", "default")]
)
def test_the_namespace_is_of_the_context(api: FakeApi, tmp_path: Path, context: str | None, namespace: str) -> None:
    put_context(tmp_path, "team")
    put_context(tmp_path, "vision", "other")
    put_context(tmp_path, None, "bare")
    assert default_namespace(context) == namespace


def test_without_a_kubeconfig_the_namespace_is_default(make_run: MakeRun) -> None:
    assert make_run(*WITHOUT).record.spec.cluster.kubernetes.namespace == "default"


def test_the_checks_before_a_submission_look_at_the_same_namespace(api: FakeApi, tmp_path: Path) -> None:
    put_context(tmp_path, "team")
    spec: RunSpec = make_spec(*WITHOUT, "cluster.gpu=h100-sxm-80gb", "training.micro_batch_size=auto")
    prepared = prepare_submission(spec)
    assert prepared.spec.cluster.kubernetes.namespace == "team"
    with pytest.raises(Exception, match="namespace") as refused:  # the fake server has none
        KubernetesBackend().preflight(spec, prepared.plan)
    assert "cluster.kubernetes.namespace = team" in str(refused.value)


def test_doctor_names_the_namespace_of_the_context(api: FakeApi, tmp_path: Path) -> None:
    put_context(tmp_path, "team")
    (check,) = KubernetesBackend().checks()
    assert "namespace team" in check.found
