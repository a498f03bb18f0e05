"""The rendered objects: golden manifests of two recipes and of all options, and what these do not show.

test_schemas shows that those of the other recipes are valid.
"""

import base64
import copy
import dataclasses
import json
import re
from collections.abc import Callable

import pytest

from scaletrain_cli.errors import SpecError, UsageError
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest, to_yaml
from scaletrain_cli.spec import load_spec, parse_spec
from tests.launch.backends.kubernetes.rendering import (
    BACKENDS,
    DOCUMENTS,
    EVERY_OPTION,
    NEEDED,
    container_of,
    environment_of,
    plan_of,
    rendered,
    rendered_recipe,
    template_of,
)
from tests.launch.backends.kubernetes.rules import problems
from tests.launch.backends.kubernetes.schemas import require_valid
from tests.launch.conftest import PROJECT, make_spec

SPOT, SMALL = "llama-70b-spot", "llama-10m-cpu"
FREE_RESTART = "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize(("name", "backend"), [(SPOT, "jobset"), *((SMALL, backend) for backend in BACKENDS)])
def test_the_manifest_of_a_recipe_is_as_accepted(name: str, backend: str, golden: Callable[[str, str], None]) -> None:
    made = rendered_recipe(name, f"cluster.kubernetes.backend={backend}", plan=plan_of(name), run_id=name)
    golden(f"kubernetes/{backend}/{name}.yaml", to_yaml(made.objects))


def with_every_option(backend: str) -> Manifest:
    return rendered_recipe(
        "llama-7b-h100",
        *EVERY_OPTION,
        f"cluster.kubernetes.backend={backend}",
        run_id="Every.Option",
        submission=3,
        revision=2,
        documents={"run.json": "{}", "0002.json": '{"revision": 2}'},
        avoid=("gpu-17", "gpu-4"),
    )


def test_the_manifest_with_every_option_is_the_accepted_one(golden: Callable[[str, str], None]) -> None:
    made = with_every_option("jobset")
    golden("kubernetes/jobset/every-option.yaml", to_yaml(made.objects))
    golden("kubernetes/jobset/every-option-notes.txt", "".join(f"{note}\n" for note in map(str, made.notes)))


def test_a_trainjob_has_the_jobset_and_the_notes_of_the_jobset_backend() -> None:
    made, accepted = with_every_option("trainjob"), with_every_option("jobset")
    config_map, runtime, trainjob = json.loads(json.dumps(made.objects))
    assert config_map == accepted.objects[0]
    metadata, jobset = (accepted.workload_object[key] for key in ("metadata", "spec"))
    assert trainjob["metadata"] == metadata
    workload = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": metadata["name"]}
    assert trainjob["spec"] == {"runtimeRef": workload, "trainer": {"numNodes": 4}}
    # Kueue admits the TrainJob alone; Trainer finds the pods of its trainer by a label.
    queue = {key: value for key, value in metadata["labels"].items() if key.startswith("kueue")}
    assert {**runtime["metadata"], "labels": runtime["metadata"]["labels"] | queue} == metadata
    own = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert own.pop("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer"
    assert runtime["spec"].pop("mlPolicy") == {"numNodes": 4}
    named = json.loads(json.dumps(jobset).replace("jobset/every-option", "trainjob/every-option"))
    marks = {key: runtime["metadata"][key] for key in ("labels", "annotations")}
    assert runtime["spec"] == {"template": {"metadata": marks, "spec": named}}
    extra = set(map(str, made.notes)) ^ set(map(str, accepted.notes))
    assert extra == {
        "cluster.kubernetes.ttl_seconds_after_finished: the JobSet and its pods are deleted; Trainer keeps the TrainJob"
    }


def test_a_volcano_job_has_the_pods_of_the_jobset_backend_under_its_own_gang() -> None:
    made, accepted = with_every_option("volcano"), with_every_option("jobset")
    assert made.objects[0] == accepted.objects[0]
    metadata, job = made.workload_object["metadata"], copy.deepcopy(made.workload_object["spec"])
    assert metadata == accepted.objects[0]["metadata"] | {
        "name": "every-option-eaaf1d-s3",
        "annotations": accepted.workload_object["metadata"]["annotations"],
    }
    (task,) = job.pop("tasks")
    pods = json.dumps(template_of(accepted))
    for other, own in (
        ("annotations['batch.kubernetes.io/job-completion-index']", "labels['volcano.sh/task-index']"),
        ("labels['jobset.sigs.k8s.io/restart-attempt']", "annotations['volcano.sh/job-version']"),
        ("jobset/every-option", "volcano/every-option"),
        ("node-0-0.", "node-0."),
    ):
        assert pods.count(other) == 1
        pods = pods.replace(other, own)
    template = json.loads(pods)
    del template["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"]
    assert task == {"name": "node", "replicas": 4, "minAvailable": 4, "template": template}
    assert job == {
        "schedulerName": "volcano",
        "minAvailable": 4,
        "maxRetry": 1_000_000,  # evictions count as retries
        "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
        "policies": [
            *({"exitCode": code, "action": "TerminateJob"} for code in (2, 3, 93)),
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"},
        ],
        "queue": "team-a",
        "priorityClassName": "training-normal",
        "ttlSecondsAfterFinished": 3600,
        "networkTopology": {"mode": "hard", "highestTierName": "topology.example/rack"},
    }
    (extra,) = set(map(str, made.notes)) ^ set(map(str, accepted.notes))
    assert "Volcano counts evictions as retries" in extra


@pytest.mark.parametrize(
    ("message", "reason", "action"),
    [
        # Messages of kube-controller-manager 1.36, after the name of the pod.
        ("failed with exit code 93 matching FailJob rule at index 1", "PodFailurePolicy", "FailJobSet"),
        ("failed with exit code 2 matching FailJob rule at index 1", "PodFailurePolicy", "FailJobSet"),
        ("failed with exit code 75 matching FailJob rule at index 2", "PodFailurePolicy", FREE_RESTART),
        ("has condition DisruptionTarget matching FailJob rule at index 0", "PodFailurePolicy", FREE_RESTART),
        ("Job has reached the specified backoff limit", "BackoffLimitExceeded", "RestartJobSet"),
        ("Job was active longer than specified deadline", "DeadlineExceeded", "FailJobSet"),
    ],
)
def test_the_message_of_a_failed_job_decides_if_a_restart_is_charged(message: str, reason: str, action: str) -> None:
    policy = rendered_recipe(SPOT).workload_object["spec"]["failurePolicy"]

    def matches(rule: dict[str, list[str]]) -> bool:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        whole = f"Pod ml/demo-1-s1-node-0-0-x {message}"
        return reason in rule.get("onJobFailureReasons", [reason]) and any(re.search(p, whole) for p in patterns)

    assert next(rule["action"] for rule in policy["rules"] if matches(rule)) == action


def test_a_preemption_ends_a_run_that_allows_none() -> None:
    rules = rendered_recipe(SPOT, "restarts.preemption=0").workload_object["spec"]["failurePolicy"]["rules"]
    assert {rule["name"]: rule["action"] for rule in rules}["disruption"] == "FailJobSet"


def test_a_number_of_cpus_is_requested_as_the_limit() -> None:
    asked = container_of(rendered_recipe(SPOT, "cluster.cpus_per_gpu=12"))["resources"]
    assert asked["requests"]["cpu"] == asked["limits"]["cpu"] == "96"


def test_memory_includes_the_checkpoint_copy_shared_memory_and_every_rank() -> None:
    plan = plan_of(SPOT)
    made = rendered_recipe(SPOT, plan=plan)
    asked = int(container_of(made)["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    assert asked >= plan.durability.copy_bytes_per_node + (9 + 1 + 8 * 8) * 2**30
    offloaded = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, host=2**36))
    resources = container_of(rendered_recipe(SPOT, plan=offloaded))["resources"]
    assert int(resources["limits"]["memory"].removesuffix("Gi")) >= 8 * 64


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
            "cloud.google.com/gke-spot kubernetes.azure.com/scalesetpriority karpenter.sh/capacity-type "
            "eks.amazonaws.com/capacityType spot",
        ),
        ("gke", "cloud.google.com/gke-spot spot"),
        ("none", ""),
    ],
)
def test_only_spot_runs_tolerate_spot_taints(taint: str, keys: str) -> None:
    usual = {"nvidia.com/gpu", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    option = f"cluster.kubernetes.spot_taint={taint}"
    for recipe, more in ((SPOT, set(keys.split())), ("llama-7b-h100", set())):
        tolerations = template_of(rendered_recipe(recipe, option))["spec"]["tolerations"]
        assert {each["key"] for each in tolerations} == usual | more, recipe


def test_fractions_of_seconds_are_rounded_up_and_the_agent_has_more_time_than_the_grace_period() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.not_ready_seconds=7.5", "cluster.grace_seconds=90.5")
    pod = template_of(made)["spec"]
    assert [each["tolerationSeconds"] for each in pod["tolerations"] if "tolerationSeconds" in each] == [8, 8]
    assert pod["terminationGracePeriodSeconds"] == 91 + 80


def test_objects_contain_only_references_to_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    made = rendered_recipe(SPOT, "cluster.kubernetes.secrets={HF_TOKEN: {secret: a, key: b}}", "secret_env=[HF_TOKEN]")
    assert environment_of(made)["HF_TOKEN"] == {"secretKeyRef": {"name": "a", "key": "b"}}
    assert "hf_0123456789" not in json.dumps(made.objects)


@pytest.mark.parametrize(
    ("topology", "annotation", "value"),
    [
        ("kind: preferred, key: example.com/block", "kueue.x-k8s.io/podset-preferred-topology", "example.com/block"),
        ("kind: unconstrained", "kueue.x-k8s.io/podset-unconstrained-topology", "true"),
    ],
)
def test_kueue_reads_the_topology_of_the_pods(topology: str, annotation: str, value: str) -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.queue=team-a", f"cluster.kubernetes.topology={{{topology}}}")
    assert template_of(made)["metadata"]["annotations"][annotation] == value


def test_exclusive_topology_is_an_annotation_of_the_jobset() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.topology={kind: exclusive, key: example.com/rack}")
    annotations = made.workload_object["metadata"]["annotations"]
    assert annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "example.com/rack"


def test_volcano_counts_limited_evictions_as_retries() -> None:
    made = rendered_recipe(SPOT, "cluster.kubernetes.backend=volcano", "restarts.preemption=5")
    assert made.workload_object["spec"]["maxRetry"] == 50 + 3 + 5 + 1


def test_budgets_beyond_32_bits_are_limited() -> None:
    many = "restarts={preemption: 1000000000, node: 1000000000, crash: 1000000000, oom: 1000000000}"
    assert rendered_recipe(SPOT, many).workload_object["spec"]["failurePolicy"]["maxRestarts"] == 1_000_000
    volcano = rendered_recipe(SPOT, many, "cluster.kubernetes.backend=volcano")
    assert volcano.workload_object["spec"]["maxRetry"] == 1_000_000


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


def test_a_record_that_is_too_large_for_a_config_map_is_refused() -> None:
    with pytest.raises(UsageError, match="ConfigMap"):
        rendered_recipe(SPOT, documents={"run.json": "x" * 1_000_001})


def test_the_config_map_has_the_code_byte_for_byte() -> None:
    content = bytes(range(256))
    made = rendered_recipe("llama-7b-h100", documents={**DOCUMENTS, "0123456789ab.tar.gz": content})
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
    assert problems(rendered(spec).objects) == []


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
