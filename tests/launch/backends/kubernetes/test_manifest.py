"""The rendered objects: golden manifests of two recipes and of all options, and the purpose of each part.

test_schemas shows that those of the other recipes are valid.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable

import pytest

from scaletrain_cli.errors import SpecError, UsageError
from scaletrain_cli.launch.backends.kubernetes.manifest import to_yaml
from scaletrain_cli.launch.backends.kubernetes.workloads import children
from scaletrain_cli.own_processes import python_words
from scaletrain_cli.spec import load_spec, parse_spec
from tests.launch.backends.kubernetes.rendering import (
    BACKENDS,
    DOCUMENTS,
    EVERY_OPTION,
    NEEDED,
    child_job,
    container_of,
    environment_of,
    plan_of,
    rendered,
    rendered_recipe,
    template_of,
)
from tests.launch.backends.kubernetes.rules.objects import problems
from tests.launch.backends.kubernetes.schemas import require_valid
from tests.launch.conftest import PROJECT, make_spec

SPOT, SMALL = "llama-70b-spot", "llama-10m-cpu"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [SPOT, SMALL])
def test_the_manifest_of_a_recipe_is_the_accepted_one(
    name: str, backend: str, golden: Callable[[str, str], None]
) -> None:
    made = rendered_recipe(name, f"cluster.kubernetes.backend={backend}", plan=plan_of(name), run_id=name)
    golden(f"kubernetes/{backend}/{name}.yaml", to_yaml(made.objects))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_manifest_with_every_option_is_the_accepted_one(backend: str, golden: Callable[[str, str], None]) -> None:
    made = rendered_recipe(
        "llama-7b-h100",
        *EVERY_OPTION,
        f"cluster.kubernetes.backend={backend}",
        run_id="Every.Option",
        submission=3,
        revision=2,
        documents={"run.json": "{}", "0002.json": '{"revision": 2}'},
        avoid=("gpu-17", "gpu-4"),
    )
    golden(f"kubernetes/{backend}/every-option.yaml", to_yaml(made.objects))
    golden(f"kubernetes/{backend}/every-option-notes.txt", "".join(f"{note}\n" for note in map(str, made.notes)))


def test_a_gang_is_one_indexed_job_whose_pods_are_not_replaced() -> None:
    job = child_job(rendered_recipe(SPOT).workload_object)["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 16, 16)
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")
    assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("message", "reason", "action"),
    [
        # Messages of kube-controller-manager 1.36.
        (
            "Container node for pod ml/demo-1-s1-node-0-0-x failed with exit code 93 matching FailJob rule at index 1",
            "PodFailurePolicy",
            "FailJobSet",
        ),
        (
            "Container node for pod ml/demo-1-s1-node-0-0-x failed with exit code 2 matching FailJob rule at index 1",
            "PodFailurePolicy",
            "FailJobSet",
        ),
        (
            "Container node for pod ml/demo-1-s1-node-0-0-x failed with exit code 75 matching FailJob rule at index 2",
            "PodFailurePolicy",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        (
            "Pod ml/demo-1-s1-node-0-0-x has condition DisruptionTarget matching FailJob rule at index 0",
            "PodFailurePolicy",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        ("Job has reached the specified backoff limit", "BackoffLimitExceeded", "RestartJobSet"),
        ("Job was active longer than specified deadline", "DeadlineExceeded", "FailJobSet"),
    ],
)
def test_the_failure_message_of_a_job_decides_whether_a_restart_is_charged(
    message: str, reason: str, action: str
) -> None:
    policy = rendered_recipe(SPOT).workload_object["spec"]["failurePolicy"]

    def matches(rule: dict[str, list[str]]) -> bool:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        return reason in rule.get("onJobFailureReasons", [reason]) and any(re.search(p, message) for p in patterns)

    assert next(rule["action"] for rule in policy["rules"] if matches(rule)) == action
    assert policy["maxRestarts"] == 50 + 3 + 0
    assert policy["restartStrategy"] == "BlockingRecreate"


def test_a_preemption_ends_a_run_that_allows_none() -> None:
    rules = rendered_recipe(SPOT, "restarts.preemption=0").workload_object["spec"]["failurePolicy"]["rules"]
    assert {rule["name"]: rule["action"] for rule in rules}["disruption"] == "FailJobSet"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_pod_requests_all_gpus_of_a_node_as_its_limit(backend: str) -> None:
    resources = container_of(rendered_recipe(SPOT, f"cluster.kubernetes.backend={backend}"))["resources"]
    for name in ("nvidia.com/gpu", "memory"):
        assert resources["requests"][name] == resources["limits"][name]
    assert resources["limits"]["nvidia.com/gpu"] == "8"
    assert "cpu" not in resources["limits"]  # a default must not throttle the pod
    asked = container_of(rendered_recipe(SPOT, "cluster.cpus_per_gpu=12"))["resources"]
    assert asked["requests"]["cpu"] == asked["limits"]["cpu"] == "96"


def test_a_cpu_run_requests_no_device_and_tolerates_no_gpu_taint() -> None:
    made = rendered_recipe(SMALL, plan=plan_of(SMALL))
    resources = container_of(made)["resources"]
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert resources["requests"]["cpu"] == "2"
    assert "nvidia.com/gpu" not in [each.get("key") for each in template_of(made)["spec"]["tolerations"]]


def test_memory_includes_the_checkpoint_copy_shared_memory_and_every_rank() -> None:
    plan = plan_of(SPOT)
    made = rendered_recipe(SPOT, plan=plan)
    asked = int(container_of(made)["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    assert asked >= plan.durability.copy_bytes_per_node + (9 + 1 + 8 * 8) * 2**30
    assert template_of(made)["spec"]["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}
    offloaded = rendered_recipe(SPOT, plan=plan_with_host_memory(2**36))
    assert int(container_of(offloaded)["resources"]["limits"]["memory"].removesuffix("Gi")) >= 8 * 64


def plan_with_host_memory(host_bytes: int):  # type: ignore[no-untyped-def]
    import dataclasses

    plan = plan_of(SPOT)
    return dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, host=host_bytes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pod_has_no_token_and_no_capability(backend: str) -> None:
    made = rendered_recipe(SPOT, f"cluster.kubernetes.backend={backend}")
    pod, container = template_of(made)["spec"], container_of(made)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_pod_meets_the_restricted_pod_security_standard_by_default() -> None:
    made = rendered_recipe(SPOT)
    pod, container = template_of(made)["spec"], container_of(made)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {key for volume in pod["volumes"] for key in volume} <= {
        "name",
        "emptyDir",
        "configMap",
        "persistentVolumeClaim",
    }
    assert container["securityContext"]["capabilities"].keys() == {"drop"}
    assert "ports" not in container


def test_pods_are_annotated_against_eviction_by_autoscalers() -> None:
    annotations = template_of(rendered_recipe(SPOT))["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"


def test_rdma_adds_ipc_lock_and_a_note_on_the_memory_limit() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.rdma_resource=rdma/ib")
    assert container_of(made)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container_of(made)["resources"]["limits"]["rdma/ib"] == "1"
    assert any("LimitMEMLOCK=infinity" in note and "not root" in note for note in map(str, made.notes))
    without = rendered_recipe(SPOT, "cluster.kubernetes.rdma_resource=rdma/ib", "cluster.kubernetes.ipc_lock=false")
    assert "add" not in container_of(without)["securityContext"]["capabilities"]
    assert any("LimitMEMLOCK=infinity" in note for note in map(str, without.notes))


@pytest.mark.parametrize(
    ("taint", "keys"),
    [
        (
            "auto",
            {
                "cloud.google.com/gke-spot",
                "kubernetes.azure.com/scalesetpriority",
                "karpenter.sh/capacity-type",
                "eks.amazonaws.com/capacityType",
                "spot",
            },
        ),
        ("gke", {"cloud.google.com/gke-spot", "spot"}),
        ("none", set()),
    ],
)
def test_only_spot_runs_tolerate_spot_taints(taint: str, keys: set[str]) -> None:
    usual = {"nvidia.com/gpu", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    option = f"cluster.kubernetes.spot_taint={taint}"
    found = [each["key"] for each in template_of(rendered_recipe(SPOT, option))["spec"]["tolerations"]]
    assert set(found) - usual == keys
    steady = template_of(rendered_recipe("llama-7b-h100", option))["spec"]["tolerations"]
    assert {each["key"] for each in steady} == usual


def test_pods_leave_an_unreachable_node_after_not_ready_seconds() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.not_ready_seconds=7.5")
    seconds = [
        each["tolerationSeconds"] for each in template_of(made)["spec"]["tolerations"] if "tolerationSeconds" in each
    ]
    assert seconds == [8, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_agent_is_pid_1_and_has_more_time_than_the_grace_period(backend: str) -> None:
    made = rendered_recipe(SPOT, f"cluster.kubernetes.backend={backend}", "cluster.grace_seconds=90.5")
    container = container_of(made)
    assert container["command"] == ["python", *python_words("scaletrain_cli.launch.backends.kubernetes.pod_agent")]
    assert container["args"] == ["--documents", "/etc/scaletrain/run", "--runs-root", "/runs"]
    assert template_of(made)["spec"]["terminationGracePeriodSeconds"] == 91 + 80


@pytest.mark.parametrize(
    ("backend", "address", "rank"),
    [
        ("jobset", "demo-1-s1-node-0-0.demo-1-s1", "batch.kubernetes.io/job-completion-index"),
        ("trainjob", "demo-1-s1-node-0-0.demo-1-s1", "batch.kubernetes.io/job-completion-index"),
        ("volcano", "demo-1-s1-node-0.demo-1-s1", "volcano.sh/task-index"),
    ],
)
def test_the_master_address_is_pod_0_under_the_headless_service(backend: str, address: str, rank: str) -> None:
    environment = environment_of(rendered_recipe(SPOT, f"cluster.kubernetes.backend={backend}"))
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (address, "29500")
    assert environment["SCALETRAIN_WORKLOAD"] == f"{backend}/demo-1-s1"
    assert rank in environment["SCALETRAIN_NODE_RANK"]["fieldRef"]["fieldPath"]
    assert environment["SCALETRAIN_GANG"]["fieldRef"]["fieldPath"].endswith(("restart-attempt']", "job-version']"))


def test_objects_contain_only_references_to_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    made = rendered_recipe(
        SPOT, "cluster.kubernetes.secrets={HF_TOKEN: {secret: hub, key: token}}", "secret_env=[HF_TOKEN]"
    )
    assert environment_of(made)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "hf_0123456789" not in json.dumps(made.objects)


def test_kueue_reads_labels_of_the_workload_and_topology_of_the_pods() -> None:
    options = ("cluster.kubernetes.queue=team-a", "cluster.kubernetes.priority=high")
    made = rendered_recipe(SPOT, *options, "cluster.kubernetes.topology={kind: preferred, key: example.com/block}")
    labels = made.workload_object["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    annotations = template_of(made)["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-preferred-topology"] == "example.com/block"
    anywhere = rendered_recipe(SPOT, *options, "cluster.kubernetes.topology={kind: unconstrained}")
    assert template_of(anywhere)["metadata"]["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"


def test_exclusive_topology_is_an_annotation_of_the_jobset() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.topology={kind: exclusive, key: example.com/rack}")
    annotations = made.workload_object["metadata"]["annotations"]
    assert annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "example.com/rack"


def test_volcano_schedules_the_gang_and_a_note_explains_its_retries() -> None:
    options = ("cluster.kubernetes.backend=volcano", "cluster.kubernetes.queue=gold")
    made = rendered_recipe(SPOT, *options, "cluster.kubernetes.topology={kind: required, key: rack}")
    job = made.workload_object["spec"]
    assert (job["minAvailable"], job["tasks"][0]["replicas"], job["queue"]) == (16, 16, "gold")
    assert job["networkTopology"] == {"mode": "hard", "highestTierName": "rack"}
    assert job["plugins"]["svc"] == ["--publish-not-ready-addresses=true"]
    assert job["maxRetry"] == 1_000_000
    assert any("evictions" in note for note in map(str, made.notes))
    counted = rendered_recipe(SPOT, *options, "restarts.preemption=5").workload_object["spec"]
    assert counted["maxRetry"] == 50 + 3 + 5 + 1


def test_budgets_beyond_32_bits_are_limited() -> None:
    many = "restarts={preemption: 1000000000, node: 1000000000, crash: 1000000000, oom: 1000000000}"
    assert rendered_recipe(SPOT, many).workload_object["spec"]["failurePolicy"]["maxRestarts"] == 1_000_000
    volcano = rendered_recipe(SPOT, many, "cluster.kubernetes.backend=volcano")
    assert volcano.workload_object["spec"]["maxRetry"] == 1_000_000


def test_the_runtime_of_a_trainjob_precedes_it() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.backend=trainjob", "cluster.kubernetes.queue=team-a")
    kinds = [one["kind"] for one in made.objects]
    assert kinds == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    assert made.workload_object["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    jobset, job, _ = children(made.objects)
    assert (jobset["kind"], job["kind"]) == ("JobSet", "Job")
    assert jobset["spec"]["failurePolicy"] == rendered_recipe(SPOT).workload_object["spec"]["failurePolicy"]


def test_the_native_gang_is_rendered_only_if_the_spec_sets_it() -> None:
    assert "PodGroup" not in [one["kind"] for one in rendered_recipe(SPOT).objects]
    made = rendered_recipe(SPOT, "cluster.kubernetes.native_gang=v1alpha2")
    group = made.objects[1]
    assert (group["apiVersion"], group["kind"]) == ("scheduling.k8s.io/v1alpha2", "PodGroup")
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 16}}}
    assert template_of(made)["spec"]["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}


def test_a_run_of_several_nodes_without_a_queue_has_a_note() -> None:
    assert any("nothing schedules 16 pods together" in note for note in map(str, rendered_recipe(SPOT).notes))
    for option in ("queue=team-a", "backend=volcano", "native_gang=v1alpha2"):
        assert not any(
            "pods together" in note for note in map(str, rendered_recipe(SPOT, f"cluster.kubernetes.{option}").notes)
        )


def test_bad_nodes_are_excluded_by_label_and_by_name() -> None:
    affinity = template_of(rendered_recipe(SPOT, avoid=("gpu-1", "gpu-2")))["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["gpu-1", "gpu-2"]
    assert [each["values"] for each in term["matchFields"]] == [["gpu-1"], ["gpu-2"]]


def test_a_claim_that_is_mounted_twice_is_one_volume() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.volumes=[{claim: runs, path: /data, sub_path: data}]")
    claims = [each for each in template_of(made)["spec"]["volumes"] if "persistentVolumeClaim" in each]
    assert len(claims) == 1
    mounts = [each["mountPath"] for each in container_of(made)["volumeMounts"] if each["name"] == "runs"]
    assert mounts == ["/runs", "/data"]


def test_the_record_is_in_an_immutable_config_map() -> None:
    made = rendered_recipe(SPOT, documents={"run.json": "{}", "0001.json": "{}"}, revision=1)
    config_map = made.objects[0]
    assert config_map["immutable"] is True
    assert config_map["data"] == {"run.json": "{}", "0001.json": "{}"}
    volume = next(each for each in template_of(made)["spec"]["volumes"] if each["name"] == "documents")
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert config_map["metadata"]["annotations"]["scaletrain.dev/revision"] == "1"
    other = rendered_recipe(SPOT, documents={"run.json": "{} "})
    key = "scaletrain.dev/documents-sha256"
    assert other.objects[0]["metadata"]["annotations"][key] != config_map["metadata"]["annotations"][key]


def test_a_record_that_is_too_large_for_a_config_map_is_refused() -> None:
    with pytest.raises(UsageError, match="ConfigMap"):
        rendered_recipe(SPOT, documents={"run.json": "x" * 1_000_001})


def test_code_that_is_too_large_for_a_config_map_is_refused_with_a_remedy() -> None:
    packed = {**DOCUMENTS, "0123456789ab.tar.gz": bytes(1_000_000)}
    with pytest.raises(UsageError, match=r"1,000,000 of them the packed code; .*\.scaletrainignore.*code\.on_nodes"):
        rendered_recipe("llama-7b-h100", documents=packed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_config_map_has_the_code_byte_for_byte(backend: str) -> None:
    content = bytes(range(256))
    named = {**DOCUMENTS, "0123456789ab.tar.gz": content}
    made = rendered_recipe("llama-7b-h100", f"cluster.kubernetes.backend={backend}", documents=named)
    config_map = made.objects[0]
    assert config_map["data"].keys() == {"run.json"}
    assert base64.b64decode(config_map["binaryData"]["0123456789ab.tar.gz"]) == content
    volumes = {volume["name"]: volume for volume in template_of(made)["spec"]["volumes"]}
    assert {"key": "0123456789ab.tar.gz", "path": "0123456789ab.tar.gz"} in volumes["documents"]["configMap"]["items"]
    require_valid(config_map)


def test_all_settings_that_a_submission_lacks_are_named_with_their_place() -> None:
    spec = load_spec(PROJECT / "recipes" / f"{SPOT}.yaml", (NEEDED[0],))
    with pytest.raises(SpecError) as caught:
        rendered(spec)
    assert [problem.key for problem in caught.value.problems] == [
        "cluster.kubernetes.image",
        "cluster.kubernetes.runs.claim",
    ]
    assert caught.value.exit_code == 2
    assert f"{SPOT}.yaml" in str(caught.value)


def test_the_example_of_the_documentation_renders_valid_objects() -> None:
    example = re.findall(r"```yaml\n(.*?)```", (PROJECT / "docs" / "kubernetes.md").read_text(), flags=re.DOTALL)[0]
    head, _, _ = (PROJECT / "recipes" / f"{SPOT}.yaml").read_text(encoding="utf-8").partition("cluster:\n")
    spec = parse_spec(head + example, file="example.yaml", base_dir=PROJECT)
    assert problems(rendered(spec).objects) == ()


def test_variables_that_the_launcher_sets_are_set_once() -> None:
    spec = make_spec("cluster.kubernetes.runs.claim=runs", "cluster.kubernetes.image=a/b:1", env={"MASTER_PORT": "1"})
    made = rendered(spec)
    names = [each["name"] for each in container_of(made)["env"]]
    assert len(names) == len(set(names))
    assert environment_of(made)["MASTER_PORT"] == "29500"
    assert any("MASTER_PORT" in note for note in map(str, made.notes))
    assert any("a/b:1" in note and "digest" in note for note in map(str, made.notes))


def test_a_priority_that_is_too_long_for_a_label_is_refused_with_kueue() -> None:
    priority = f"cluster.kubernetes.priority={'p' * 64}"
    with pytest.raises(SpecError) as caught:
        rendered_recipe(SPOT, priority, "cluster.kubernetes.queue=q")
    assert [problem.key for problem in caught.value.problems] == ["cluster.kubernetes.priority"]
    assert rendered_recipe(SPOT, priority, "cluster.kubernetes.queue=q", "cluster.kubernetes.backend=volcano")


def test_a_secret_with_the_name_of_a_launcher_variable_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        rendered_recipe(SPOT, "cluster.kubernetes.secrets={MASTER_ADDR: {secret: s, key: k}}")
    assert [problem.key for problem in caught.value.problems] == ["cluster.kubernetes.secrets.MASTER_ADDR"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.source=text/*.jsonl", "pods look for it in the working folder of the image"),
        ("data.source=/corpus/*.jsonl", "no volume is mounted there, so it must be in the image"),
        ("checkpoint.dir=/scratch", "no volume is mounted there"),
        ("data.source=/data/*.jsonl", ""),
        ("data.source=python-stdlib", ""),
        ("checkpoint.dir=/runs/checkpoints", ""),
    ],
)
def test_a_path_outside_the_mounted_volumes_has_a_note(setting: str, words: str) -> None:
    volumes = "cluster.kubernetes.volumes=[{claim: text, path: /data}]"
    messages = [
        note
        for note in map(str, rendered_recipe(SMALL, volumes, setting).notes)
        if "volume" in note or "folder" in note
    ]
    assert len(messages) == bool(words)
    assert words in "".join(messages)
