"""Refusals and missing answers of an API server become errors with the place, the cause and a remedy."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, ForbiddenError, NotServedError, RefusedError, connect
from scaletrain_cli.launch.backends.kubernetes.api_kinds import CONFIG_MAP, JOB_SET, NODE, POD, VOLCANO_JOB
from tests.launch.backends.kubernetes.fake_api import FakeApi, status, write_kubeconfig


def config_map(name: str = "c", **more: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "ml"}, **more}


def test_an_unanswered_dry_run_is_not_said_to_be_applied(cluster: Cluster, api: FakeApi) -> None:
    api.put("configmaps", {"metadata": {"name": "c"}})
    for verb in ("create", "patch", "delete"):
        api.refusals[(verb, "configmaps")] = (503, status(503, "ServiceUnavailable", "the server is overloaded"))
    for send in (
        lambda: cluster.apply(config_map("new"), dry_run=True),
        lambda: cluster.delete(CONFIG_MAP, "ml", "c", dry_run=True),
    ):
        with pytest.raises(SchedulerError) as refused:
            send()
        assert not isinstance(refused.value, SchedulerSilentError)
        assert "503" in str(refused.value)
        assert "may have been applied" not in str(refused.value)


def test_a_list_of_several_pages_is_complete_and_can_be_selected_by_label(cluster: Cluster, api: FakeApi) -> None:
    api.page = 2
    for number in range(5):
        api.put("pods", {"metadata": {"name": f"p{number}", "labels": {"app": "a" if number else "b"}}})
    assert len(cluster.find(POD, "ml")) == 5
    assert [pod["metadata"]["name"] for pod in cluster.find(POD, "ml", labels="app=b")] == ["p0"]
    api.put("nodes", {"metadata": {"name": "n"}}, namespace="")
    assert len(cluster.find(NODE, "ml")) == 1  # nodes have no namespace


def test_annotations_are_added_and_a_missing_object_is_ignored(cluster: Cluster) -> None:
    cluster.apply(config_map())
    cluster.annotate(CONFIG_MAP, "ml", "c", {"a": "1"})
    found = cluster.get(CONFIG_MAP, "ml", "c")
    assert found["metadata"]["annotations"] == {"a": "1"}
    cluster.annotate(CONFIG_MAP, "ml", "none", {"a": "1"})


def test_a_deletion_is_in_the_foreground_and_of_the_given_uid_only(cluster: Cluster, api: FakeApi) -> None:
    uid = cluster.apply(config_map())["metadata"]["uid"]
    assert not cluster.delete(CONFIG_MAP, "ml", "c", uid="another")
    assert cluster.delete(CONFIG_MAP, "ml", "c", uid=uid)
    assert not cluster.delete(CONFIG_MAP, "ml", "c")
    ((_, options),) = api.deletions
    assert options["propagationPolicy"] == "Foreground"
    assert "gracePeriodSeconds" not in options  # the pods keep theirs


def test_a_missing_resource_is_reported_with_its_install_command(cluster: Cluster, api: FakeApi) -> None:
    assert cluster.serves(JOB_SET)
    del api.installed["jobset.x-k8s.io/v1alpha2"]
    assert not cluster.serves(JOB_SET)
    with pytest.raises(NotServedError, match=r"has no JobSet of jobset.x-k8s.io/v1alpha2. Install it: kubectl apply"):
        cluster.get(JOB_SET, "ml", "j")
    api.installed["batch.volcano.sh/v1alpha1"] = ()
    assert not cluster.serves(VOLCANO_JOB)


def test_a_refusal_by_a_quota_is_not_a_missing_right(cluster: Cluster, api: FakeApi) -> None:
    said = 'configmaps "c" is forbidden: exceeded quota: q, requested: count/configmaps=1'
    api.refusals[("create", "configmaps")] = (403, status(403, "Forbidden", said))
    with pytest.raises(RefusedError, match="exceeded quota") as caught:
        cluster.apply(config_map())
    assert not isinstance(caught.value, ForbiddenError)


def test_every_invalid_field_is_reported(cluster: Cluster, api: FakeApi) -> None:
    causes = [{"field": "spec.a", "message": "Invalid value: 1"}, {"field": "spec.b", "message": "Required value"}]
    refusal = status(422, "Invalid", "ConfigMap c is invalid", name="c", causes=causes)
    api.refusals[("create", "configmaps")] = (422, refusal)
    with pytest.raises(RefusedError) as caught:
        cluster.apply(config_map())
    assert [problem.key for problem in caught.value.problems] == ["spec.a", "spec.b"]
    assert "ConfigMap spec.b: Required value" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [(401, "Unauthorized", "not authenticated"), (409, "Conflict", r"is refused \(409\)"), (500, "Internal", "500")],
)
def test_other_refusals_have_their_message(cluster: Cluster, api: FakeApi, code: int, reason: str, words: str) -> None:
    api.refusals[("create", "configmaps")] = (code, status(code, reason, "the server's words"))
    with pytest.raises(RefusedError, match=words) as caught:
        cluster.apply(config_map())
    assert caught.value.said == "the server's words"


def test_an_answer_429_is_repeated_a_few_times(cluster: Cluster, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.refusals[("create", "configmaps")] = (429, status(429, "TooManyRequests", "please try again later"))
    waited: list[float] = []
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.api.time.sleep", waited.append)
    with pytest.raises(RefusedError, match="please try again later"):
        cluster.apply(config_map())
    assert waited == [1.0, 2.0, 4.0]
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.api.time.sleep", lambda _: api.refusals.clear())
    assert cluster.apply(config_map())["metadata"]["name"] == "c"


def test_an_error_page_of_a_proxy_is_a_refusal(cluster: Cluster, api: FakeApi) -> None:
    api.refusals[("get", "pods")] = (502, {"html": "bad gateway"})
    with pytest.raises(RefusedError, match="502"):
        cluster.get(POD, "ml", "p")


def test_a_login_page_is_not_accepted_as_an_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SimpleNamespace(data=b"<html>log in</html>")
    monkeypatch.setattr(cluster._client, "request", lambda *args, **options: page)
    for ask in (cluster.version, lambda: cluster.find(POD, "ml")):
        with pytest.raises(RefusedError, match="did not return a Kubernetes object: '<html>log in"):
            ask()


def test_an_unreachable_server_is_reported_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "k", "http://127.0.0.1:9", "far")))
    cluster = connect("far", "ml")
    with pytest.raises(SchedulerError, match=r"context far, http://127.0.0.1:9, .* does not answer") as caught:
        cluster.version()
    assert not isinstance(caught.value, SchedulerSilentError)
    with pytest.raises(SchedulerError, match="did not answer a moment ago"):
        cluster.version()  # a list of many runs waits only once


def test_an_unanswered_change_may_have_been_applied(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib3.exceptions

    def silent(*args: Any, **options: Any) -> Any:
        raise urllib3.exceptions.ReadTimeoutError(None, "/", "read timed out")  # type: ignore[arg-type]

    monkeypatch.setattr(cluster._client, "request", silent)
    with pytest.raises(SchedulerSilentError, match="The request may have been applied"):
        cluster.apply(config_map())


def test_a_dead_node_is_no_unreachable_server(cluster: Cluster, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for the node of a log; a list of runs must not stop at the first dead node."""
    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.api._LOG_SECONDS", 0.05)
    api.dead_pods.add("p")
    with pytest.raises(RefusedError, match="the node of pod p does not answer"):
        list(cluster.log("ml", "p", "node"))
    assert cluster.version() == "v1.36.2"


def test_a_missing_context_is_reported_with_the_kubeconfig(api: FakeApi, tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match=r"context other of the kubeconfig \(.*kubeconfig\) cannot be") as error:
        connect("other", "ml")
    assert error.value.exit_code == 4


def test_without_the_client_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UsageError, match=r"'\.\[k8s\]'"):
        connect(None, "ml")


def test_a_log_is_read_line_by_line_from_a_given_second(cluster: Cluster, api: FakeApi) -> None:
    api.logs["p"] = ["2026-11-21T10:00:00.1Z one", "2026-11-21T10:00:05.2Z two", "2026-11-21T10:00:05.3Z thrée"]
    assert list(cluster.log("ml", "p", "node")) == api.logs["p"]
    assert list(cluster.log("ml", "p", "node", since="2026-11-21T10:00:05.2Z")) == api.logs["p"][1:]
    assert list(cluster.log("ml", "p", "node", last_lines=1)) == api.logs["p"][2:]
