"""cluster.kubernetes.pod_overrides: what is merged into which pods, and what is refused, at its line and why."""

from typing import Any

import pytest
from ruamel.yaml import YAML

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.backends.kubernetes.pod import preparation_template, view_template
from scaletrain_cli.launch.backends.kubernetes.pod_overrides import merged, unknown_fields
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from tests.launch.backends.kubernetes.rendering import IMAGE, recipe, rendered, rendered_recipe, template_of
from tests.launch.conftest import PROJECT

NAME = "llama-7b-h100"
SCRATCH = """{
    metadata: {labels: {team: a}, annotations: {sidecar.istio.io/inject: 'false'}},
    spec: {
        runtimeClassName: nvidia,
        tolerations: [{key: maintenance, operator: Exists}],
        initContainers: [{name: dcgm, image: 'registry.example/dcgm:4.1', restartPolicy: Always}],
        volumes: [{name: scratch, emptyDir: {}}, {name: nvme, hostPath: {path: /mnt/nvme}}],
        containers: [{name: node, resources: {limits: {hugepages-2Mi: 1Gi}},
                      volumeMounts: [{name: scratch, mountPath: /scratch}, {name: nvme, mountPath: /nvme}]}]}}"""


def overriding(overrides: str, *more: str) -> tuple[str, ...]:
    return (f"cluster.kubernetes.pod_overrides={overrides}", *more)


def refusal(overrides: str, *more: str) -> str:
    with pytest.raises(SpecError) as refused:
        rendered(_load(*overriding(overrides, *more)))
    return str(refused.value)


def _load(*overrides: str) -> RunSpec:
    return recipe.__wrapped__(NAME, *overrides)


def preparation(spec: RunSpec) -> dict[str, Any]:
    return preparation_template(spec, "data-spec", {"app": "x"}, {})


def test_a_list_is_merged_by_the_names_of_its_items_and_null_removes() -> None:
    base = {"containers": [{"name": "node", "env": [{"name": "A", "value": "1"}], "tty": True}], "x": {"y": 1, "z": 2}}
    override = {
        "containers": [
            {"name": "node", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}], "tty": None}
        ],
        "x": {"y": None},
        "tolerations": [{"key": "a"}],
    }
    assert merged(base, override) == {
        "containers": [{"name": "node", "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]}],
        "x": {"z": 2},
        "tolerations": [{"key": "a"}],
    }
    assert base["x"] == {"y": 1, "z": 2}, "the base stays as it is"
    assert merged({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}, {"key": "a"}]}) == {
        "tolerations": [{"key": "a"}, {"key": "b"}]
    }, "lists without names are added to"


def test_pods_that_prepare_data_get_them_without_the_resources_of_the_run() -> None:
    spec = _load(*overriding(SCRATCH))
    pod = preparation(spec)
    assert pod["metadata"]["labels"] == {"app": "x", "team": "a"}
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert {each["name"] for each in pod["spec"]["volumes"]} >= {"scratch", "nvme"}
    (container,) = pod["spec"]["containers"]
    assert "hugepages-2Mi" not in container["resources"]["limits"]
    own = "cluster.kubernetes.preparation.pod_overrides={spec: {schedulerName: batch}}"
    pod = preparation(_load(*overriding(SCRATCH, own)))
    assert (pod["spec"]["schedulerName"], "runtimeClassName" in pod["spec"]) == ("batch", False)
    assert "initContainers" not in pod["spec"]


def test_a_pod_for_views_gets_their_labels_and_fields_and_no_container_or_volume() -> None:
    spec = _load(*overriding(SCRATCH))
    pod = view_template(spec, ["view"], {"app": "x"}, {}, ["gpu-1"])
    assert pod["metadata"]["labels"] == {"app": "x", "team": "a"}
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert "initContainers" not in pod["spec"]
    assert {each["name"] for each in pod["spec"]["volumes"]} == {"runs"}
    assert len(pod["spec"]["containers"]) == 1


@pytest.mark.parametrize(
    ("setting", "limited"),
    [
        ("cluster.kubernetes.cpu_limit=requested", True),
        ("cluster.kubernetes.cpus_per_node=32", True),
        ("cluster.kubernetes.cpu_limit=auto", False),
    ],
)
def test_cores_are_a_limit_in_every_pod_of_a_run_or_in_none(setting: str, limited: bool) -> None:
    spec = _load(setting, "cluster.kubernetes.preparation={cpus: 8, memory: 32GiB, ephemeral_storage: 9GiB}")
    pods = [template_of(rendered(spec)), preparation(spec), view_template(spec, ["view"], {}, {}, [])]
    found = [pod["spec"]["containers"][0]["resources"] for pod in pods]
    for resources in found:
        assert resources["limits"].get("cpu") == (resources["requests"]["cpu"] if limited else None)
    assert found[1]["limits"]["ephemeral-storage"] == found[1]["requests"]["ephemeral-storage"] == "9Gi"
    if limited:
        assert all(resources["limits"] == resources["requests"] for resources in found), "any ratio is kept"


def test_a_path_on_a_volume_of_the_overrides_has_no_note() -> None:
    notes = map(str, rendered_recipe(NAME, *overriding(SCRATCH, "checkpoint.dir=/nvme/checkpoints")).notes)
    assert not [note for note in notes if "checkpoint.dir" in note]


NODE = "{spec: {containers: [{name: node, %s}]}}"


@pytest.mark.parametrize(
    ("limit", "said"),
    [("memory: 1Gi", "kubernetes.preparation.memory."), ("nvidia.com/gpu: 1", "is not for pods that prepare data")],
)
def test_overrides_of_the_preparation_name_its_own_keys(limit: str, said: str) -> None:
    overrides = NODE % f"resources: {{limits: {{{limit}}}}}"
    assert said in refusal("{}", f"cluster.kubernetes.preparation.pod_overrides={overrides}")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        *(
            (overrides, key, "would remove what the launcher sets")
            for overrides, key in (
                ("{spec: null}", "spec"),
                ("{metadata: {labels: null}}", "metadata.labels"),
                ("{spec: {containers: null}}", "spec.containers"),
                ("{spec: {volumes: null}}", "spec.volumes"),
                ("{spec: {containers: [{name: node, env: null}]}}", "spec.containers.0.env"),
                ("{spec: {containers: [{name: node, volumeMounts: null}]}}", "spec.containers.0.volumeMounts"),
                (
                    "{spec: {containers: [{name: node, resources: {limits: null}}]}}",
                    "spec.containers.0.resources.limits",
                ),
            )
        ),
        ("{spec: {restartPolicy: Always}}", "spec.restartPolicy", "must stay Never: pods restart as a whole gang"),
        ("{spec: {terminationGracePeriodSeconds: 5}}", "spec.terminationGracePeriodSeconds", "cluster.grace_seconds"),
        ("{spec: {hostname: a}}", "spec.hostname", "is the address by which the pods meet"),
        ("{spec: {nodeName: n1}}", "spec.nodeName", "would put all pods on one node"),
        ("{spec: {shareProcessNamespace: true}}", "spec.shareProcessNamespace", "must be process 1"),
        ("{spec: {hostNetwork: true}}", "spec.hostNetwork", "set cluster.kubernetes.host_network"),
        ("{spec: {priorityClassName: p}}", "spec.priorityClassName", "set cluster.kubernetes.pod_priority"),
        ("{spec: {serviceAccountName: s}}", "spec.serviceAccountName", "set cluster.kubernetes.service_account"),
        ("{spec: {securityContext: {runAsUser: 0}}}", "spec.securityContext.runAsUser", "kubernetes.run_as_user"),
        (NODE % "securityContext: {runAsUser: 7}", "spec.containers.0.securityContext.runAsUser", "run_as_user"),
        ("{spec: {securityContext: {runAsNonRoot: false}}}", "spec.securityContext.runAsNonRoot", "must be true"),
        ("{spec: {volumes: [{name: runs, emptyDir: {}}]}}", "spec.volumes.0", "is a volume of the launcher"),
        ("{spec: {volumes: [{emptyDir: {}}]}}", "spec.volumes.0", "must be a mapping with its name"),
        ("{spec: {volumes: {a: {emptyDir: {}}}}}", "spec.volumes.a", "must be a list"),
        ("{spec: {containers: [{name: dcgm, image: a}]}}", "spec.containers.0", "with restartPolicy: Always"),
        ("{spec: {containers: [{image: a}]}}", "spec.containers.0", "must have the name node"),
        ("{spec: {initContainers: [{name: node}]}}", "spec.initContainers.0", "the name of the container of the agent"),
        (NODE % "command: [sleep]", "spec.containers.0.command", "starts the agent"),
        (NODE % "args: null", "spec.containers.0.args", "starts the agent"),
        (NODE % "image: a", "spec.containers.0.image", "set cluster.kubernetes.image"),
        (NODE % "livenessProbe: {exec: {command: [x]}}", "spec.containers.0.livenessProbe", "decides when a pod ends"),
        (NODE % "terminationMessagePath: /x", "spec.containers.0.terminationMessagePath", "why a pod ended"),
        (
            NODE % "resources: {limits: {nvidia.com/gpu: 4}}",
            "spec.containers.0.resources.limits.nvidia.com/gpu",
            "gpus_per",
        ),
        (NODE % "resources: {requests: {cpu: 4}}", "spec.containers.0.resources.requests.cpu", "cpus_per_node"),
        (NODE % "env: [{name: RANK, value: '0'}]", "spec.containers.0.env.0", "is set by the launcher"),
        (NODE % "env: [{name: MASTER_ADDR, value: a}]", "spec.containers.0.env.0", "is set by the launcher"),
        (NODE % "env: [{name: ON, value: a}]", "spec.containers.0.env.0", "is also in env; remove one of them"),
        (
            NODE % "volumeMounts: [{name: a, mountPath: /runs/a}]",
            "spec.containers.0.volumeMounts.0.mountPath",
            "equal /runs, which is runs",
        ),
        (
            NODE % "volumeMounts: [{name: a, mountPath: /dev}]",
            "spec.containers.0.volumeMounts.0.mountPath",
            "equal /dev/shm, which is used",
        ),
        (
            "{spec: {initContainers: [{name: a, resources: {limits: {nvidia.com/gpu: 1}}}]}}",
            "spec.initContainers.0.resources.limits.nvidia.com/gpu",
            "is requested by the launcher",
        ),
        (
            "{metadata: {labels: {scaletrain.dev/run: a}}}",
            "metadata.labels.scaletrain.dev/run",
            "is set by the launcher",
        ),
        ("{metadata: {labels: {job-name: a}}}", "metadata.labels.job-name", "or by a controller"),
        ("{metadata: {labels: {tier: 1}}}", "metadata.labels.tier", "must be text. Put it in quotes"),
        ("{metadata: {name: a}}", "metadata.name", "Use labels or annotations"),
        ("{metadata: a}", "metadata", "must be a mapping"),
        ("{runtimeClassName: nvidia}", "runtimeClassName", "is no part of a pod template"),
        ("{spec: {$patch: replace}}", "spec.$patch", "Directives of kubectl are not supported"),
        ("{spec: {runtimeClas: nvidia}}", "spec.runtimeClas", "Did you mean runtimeClassName?"),
        ("{spec: {runtimeClassName: [nvidia]}}", "spec.runtimeClassName", "must be str"),
        ("{spec: {volumes: [{name: a, hostPath: /mnt}]}}", "spec.volumes.0.hostPath", "must be HostPathVolumeSource"),
        ("{spec: {tolerations: [{seconds: 3}]}}", "spec.tolerations.0.seconds", "is no field of Toleration"),
    ],
)
def test_what_would_break_a_run_is_refused_at_its_key_with_the_reason(overrides: str, key: str, said: str) -> None:
    section = KubernetesSpec(pod_overrides=YAML(typ="safe").load(overrides))
    found = {**dict(section.inconsistencies()), **dict(section.run_inconsistencies(env=["ON"], secret_env=[]))}
    if not found:  # the fields of Kubernetes
        named = unknown_fields(section.pod_overrides)
        found = {f"pod_overrides.{where}": ". ".join((str(why), *why.remedies)) for where, why in named}
    ((where, message),) = found.items()
    assert where.endswith(f"pod_overrides.{key}")
    assert said in message


@pytest.mark.parametrize("section", ["pod_overrides", "preparation.pod_overrides"])
def test_the_overrides_of_both_kinds_of_pods_are_checked(section: str) -> None:
    for overrides, said in (("{spec: {hostname: a}}", "by which the pods meet"), ("{spec: {hostnam: a}}", "hostname?")):
        with pytest.raises(SpecError) as refused:
            rendered(_load(f"cluster.kubernetes.{section}={overrides}"))
        (line,) = [line for line in str(refused.value).splitlines() if f"cluster.kubernetes.{section}.spec." in line]
        assert said in line


def test_a_gang_of_volcano_keeps_its_scheduler() -> None:
    other = "{spec: {schedulerName: other}}"
    assert template_of(rendered_recipe(NAME, *overriding(other)))["spec"]["schedulerName"] == "other"
    assert "must stay volcano" in refusal(other, "cluster.kubernetes.backend=volcano")


def test_a_refusal_names_the_line_in_the_file() -> None:
    head = (PROJECT / "recipes" / f"{NAME}.yaml").read_text(encoding="utf-8").partition("cluster:\n")[0]
    lines = [
        "cluster:",
        "  scheduler: kubernetes",
        "  kubernetes:",
        f"    image: {IMAGE}",
        "    runs: {claim: runs}",
        "    pod_overrides:",
        "      spec:",
        "        restartPolicy: Always",
        "        containers:",
        "          - name: node",
        "            image: other:1",
    ]
    with pytest.raises(SpecError) as refused:
        parse_spec("\n".join([head.rstrip("\n"), *lines]), file="run.yaml", base_dir=PROJECT)
    first = len(head.splitlines())
    found = {problem.key.rpartition("pod_overrides.")[2]: problem.where for problem in refused.value.problems}
    assert found == {"spec.restartPolicy": f"run.yaml:{first + 8}", "spec.containers.0.image": f"run.yaml:{first + 11}"}


def test_fields_are_those_of_kubernetes_with_numbers_for_quantities() -> None:
    spec = {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": 1024}}], "overhead": {"cpu": 1}, "hostUsers": False}
    assert list(unknown_fields({"spec": spec})) == []
    assert [key for key, _ in unknown_fields({"spec": {"hostUsers": 1, "dnsConfig": {"nameservers": "a"}}})] == [
        "spec.hostUsers",
        "spec.dnsConfig.nameservers",
    ]
