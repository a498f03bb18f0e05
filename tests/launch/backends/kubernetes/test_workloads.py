"""The objects that controllers create from a workload, as JobSet 0.12, Volcano 1.15 and Trainer 2.3 do."""

from scaletrain_cli.launch.backends.kubernetes.workloads import child_pod, children
from tests.launch.backends.kubernetes.rendering import child_job, environment_of, rendered_recipe, template_of

RECIPE = "llama-7b-h100"


def test_a_jobset_becomes_a_job_whose_pods_have_host_names() -> None:
    made = rendered_recipe(RECIPE, "cluster.kubernetes.namespace=ml")
    job = child_job(made.workload_object)
    assert (job["apiVersion"], job["kind"], job["metadata"]["namespace"]) == ("batch/v1", "Job", "ml")
    assert job["metadata"]["name"] == "demo-1-s1-node-0"
    address = f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
    assert environment_of(made)["MASTER_ADDR"] == address
    assert children(made.objects) == [job, child_pod(job)]


def test_a_job_becomes_pods_with_an_index_and_the_host_name_of_the_master_address() -> None:
    made = rendered_recipe(RECIPE)
    pod = child_pod(child_job(made.workload_object))
    assert f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" == environment_of(made)["MASTER_ADDR"]
    path = environment_of(made)["SCALETRAIN_NODE_RANK"]["fieldRef"]["fieldPath"]
    assert any(path == f"metadata.annotations['{name}']" for name in pod["metadata"]["annotations"])
    assert len(pod["metadata"]["name"]) == len(pod["spec"]["hostname"]) + 6


def test_the_label_of_the_gang_is_on_the_pods() -> None:
    made = rendered_recipe(RECIPE)
    labels = child_job(made.workload_object)["spec"]["template"]["metadata"]["labels"]
    path = environment_of(made)["SCALETRAIN_GANG"]["fieldRef"]["fieldPath"]
    assert any(path == f"metadata.labels['{label}']" for label in labels)
    assert labels.items() >= template_of(made)["metadata"]["labels"].items()


def test_a_task_of_volcano_becomes_pods_with_an_index() -> None:
    made = rendered_recipe(RECIPE, "cluster.kubernetes.backend=volcano")
    (pod,) = children(made.objects)
    assert f"{pod['metadata']['name']}.{pod['spec']['subdomain']}" == environment_of(made)["MASTER_ADDR"]
    path = environment_of(made)["SCALETRAIN_NODE_RANK"]["fieldRef"]["fieldPath"]
    assert any(path == f"metadata.labels['{label}']" for label in pod["metadata"]["labels"])
    gang = environment_of(made)["SCALETRAIN_GANG"]["fieldRef"]["fieldPath"]
    assert any(gang == f"metadata.annotations['{name}']" for name in pod["metadata"]["annotations"])


def test_a_trainjob_becomes_the_jobset_of_the_jobset_backend() -> None:
    jobset, job, _ = children(rendered_recipe(RECIPE, "cluster.kubernetes.backend=trainjob").objects)
    plain = rendered_recipe(RECIPE).workload_object
    for one in (jobset, plain):
        for entry in one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"]:
            if entry["name"] == "SCALETRAIN_WORKLOAD":
                entry["value"] = "alike"
        one["spec"]["replicatedJobs"][0]["template"]["metadata"].pop("labels")
    assert jobset["spec"] == plain["spec"]
    assert job["spec"]["completions"] == 4
