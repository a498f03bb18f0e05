"""Users with the rights of k8s/base/rbac.yaml or less, two users with one run id, and secrets."""

import base64
import copy
import json
from collections.abc import Callable

import pytest
from ruamel.yaml import YAML

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.place import Place
from tests.kubernetes_cluster.proxy import User
from tests.kubernetes_cluster.server import Object
from tests.kubernetes_cluster.site import PROJECT, Site

pytestmark = pytest.mark.kubernetes
GROUPED = {"roles": "Role", "rolebindings": "RoleBinding", "clusterroles": "ClusterRole"}
GROUPED["clusterrolebindings"] = "ClusterRoleBinding"


def rendered(place: Place, suffix: str, without: Callable[[Object, str], bool]) -> list[tuple[str, Object]]:
    """Return the roles of k8s/base/rbac.yaml for a group of this name; ``without``: the rules to leave out, by verb."""
    found = []
    for document in YAML(typ="safe").load_all((PROJECT / "k8s" / "base" / "rbac.yaml").read_text()):
        body = copy.deepcopy(document)
        resource = next((name for name, kind in GROUPED.items() if kind == body["kind"]), None)
        if resource is None:
            continue
        body["metadata"] = {"name": f"{body['metadata']['name']}-{suffix}"}
        for subject in body.get("subjects", ()):
            subject["name"] = suffix
        if "roleRef" in body:
            body["roleRef"]["name"] += f"-{suffix}"
        for rule in body.get("rules", ()):
            rule["verbs"] = [verb for verb in rule["verbs"] if not without(rule, verb)]
        body["rules"] = [rule for rule in body.get("rules", ()) if rule["verbs"]]
        if "roleRef" in body:
            del body["rules"]
        found.append((resource, body))
    return found


@pytest.fixture
def user_with(place: Place, offers: Offers) -> Callable[..., User]:
    """Return a function that makes a user with the rights of rbac.yaml, except those that ``without`` names."""
    offers.need_right("impersonate", "", "users")
    offers.need_right("impersonate", "", "groups")
    offers.need_right("create", "rbac.authorization.k8s.io", "clusterrolebindings")

    def make(name: str, without: Callable[[Object, str], bool] = lambda rule, verb: False) -> User:
        group = f"{name}-{place.suffix}"
        for resource, body in rendered(place, group, without):
            (place.create_outside if resource.startswith("cluster") else place.create)(resource, body)
        return User(group, (group, "system:authenticated"))

    return make


def test_a_user_with_the_rights_of_rbac_yaml_can_do_everything(
    site_of: Callable[[User], Site], user_with: Callable[..., User], backend: str, offers: Offers
) -> None:
    offers.need_pods()
    site = site_of(user_with(f"all-{backend}"))
    said = site.submit("mine", f"cluster.kubernetes.backend={backend}")
    assert "forbidden" not in said.stderr
    site.running("mine")
    site.wait("mine", "running", "starting")
    for verb in (("explain", "mine"), ("logs", "mine"), ("list",), ("status", "--cluster"), ("doctor",)):
        done = site.scaletrain(*verb, check=False)
        assert "forbidden" not in done.stderr + done.stdout, done.stdout + done.stderr
    site.cancel("mine")
    site.scaletrain("resume", "mine", "--yes")
    site.finish("mine")
    site.wait("mine", "finished")


def test_a_user_without_any_right_is_refused_and_leaves_nothing(
    site_of: Callable[[User], Site], offers: Offers, place: Place, backend: str
) -> None:
    offers.need_right("impersonate", "", "users")
    site = site_of(User(f"nobody-{place.suffix}", ("system:authenticated",)))
    refused = site.submit("nothing", f"cluster.kubernetes.backend={backend}", check=False)
    assert (refused.returncode, "cannot patch resource" in refused.stderr) == (4, True), refused.stderr
    assert not place.names()


def test_a_refused_cancel_changes_nothing(
    site_of: Callable[[User], Site], user_with: Callable[..., User], backend: str, offers: Offers
) -> None:
    offers.need_pods()
    kinds = {"jobsets", "trainjobs", "jobs"}
    user = user_with(f"keep-{backend}", lambda rule, verb: verb == "delete" and bool(kinds & {*rule["resources"]}))
    site = site_of(user)
    site.submit("kept", f"cluster.kubernetes.backend={backend}")
    pods = site.running("kept")
    refused = site.scaletrain("cancel", "kept", "--yes", check=False)
    assert (refused.returncode, "delete" in refused.stderr) == (4, True), refused.stderr
    assert {one["metadata"]["uid"] for one in site.running("kept")} == {one["metadata"]["uid"] for one in pods}
    site.finish("kept")
    assert site.wait("kept", "finished", "cancelled")["state"] == "finished"


def test_without_the_rights_for_dry_runs_and_for_reading_the_cluster_a_run_starts_with_notes(
    site_of: Callable[[User], Site], user_with: Callable[..., User], backend: str, offers: Offers
) -> None:
    offers.need_pods()

    def left_out(rule: Object, verb: str) -> bool:
        resources = {*rule["resources"]}
        if resources & {"nodes", "namespaces", "persistentvolumes", "csidrivers", "clusterqueues", "priorityclasses"}:
            return True
        return verb in ("create", "patch") and resources == {"pods"}

    site = site_of(user_with(f"less-{backend}", left_out))
    said = site.submit("less", f"cluster.kubernetes.backend={backend}")
    assert "forbidden" in said.stderr or "may not" in said.stderr or "right" in said.stderr, said.stderr
    site.finish("less")
    site.wait("less", "finished")


def test_two_users_with_one_run_id_never_touch_each_others_job(
    site_of: Callable[[User], Site], user_with: Callable[..., User], backend: str, offers: Offers
) -> None:
    offers.need_pods()
    first, second = site_of(user_with(f"ann-{backend}")), site_of(user_with(f"ben-{backend}"))
    first.submit("same", f"cluster.kubernetes.backend={backend}")
    pods = first.running("same")
    refused = second.submit("same", f"cluster.kubernetes.backend={backend}", check=False)
    assert refused.returncode != 0, refused.stdout + refused.stderr
    error = refused.stderr.rpartition("error:")[2].lower()
    assert "delete" not in error, "it must not advise to delete the job of another user"
    second.scaletrain("cancel", "same", "--yes", check=False)
    again = first.running("same")
    assert {pod["metadata"]["uid"] for pod in again} == {pod["metadata"]["uid"] for pod in pods}
    first.finish("same")
    first.wait("same", "finished")


def test_the_value_of_a_secret_is_nowhere(site: Site, place: Place, backend: str, offers: Offers) -> None:
    offers.need_pods()
    value = "hidden-7c9a2f41d8"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"token-{backend}"}}
    place.create("secrets", {**secret, "stringData": {"key": value}})
    given = f"cluster.kubernetes.secrets={{THE_TOKEN: {{secret: token-{backend}, key: key}}}}"
    said = site.submit("hush", f"cluster.kubernetes.backend={backend}", given, "secret_env=[THE_TOKEN]")
    (pod, *_) = site.running("hush")
    (container,) = pod["spec"]["containers"]
    (reference,) = [one for one in container["env"] if one["name"] == "THE_TOKEN"]
    assert reference["valueFrom"]["secretKeyRef"]["name"] == f"token-{backend}"
    shown = [said.stdout, said.stderr]
    shown += [site.scaletrain(*verb, check=False).stdout for verb in (("status", "hush"), ("explain", "hush"))]
    resources = ("jobsets", "trainjobs", "trainingruntimes", "vcjobs", "jobs", "pods", "configmaps", "events")
    shown += [json.dumps(place.server.list(resource, place.namespace)) for resource in resources]
    shown += [file.read_bytes().decode(errors="replace") for file in site.folder.rglob("*") if file.is_file()]
    for form in (value, base64.b64encode(value.encode()).decode()):
        assert not [text[:200] for text in shown if form in text]
    site.cancel("hush")
