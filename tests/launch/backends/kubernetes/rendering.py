"""Recipes rendered for Kubernetes, and functions that return parts of the objects."""

from functools import cache
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest, manifest
from scaletrain_cli.launch.backends.kubernetes.workloads import child_jobs
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import RunSpec, load_spec
from tests.launch.conftest import PROJECT, make_plan

RECIPES = sorted(path.stem for path in (PROJECT / "recipes").glob("*.yaml"))
BACKENDS = ("jobset", "volcano", "trainjob")
IMAGE = f"registry.example:5000/ml/scaletrain@sha256:{'4b' * 32}"
NEEDED = ("cluster.scheduler=kubernetes", f"cluster.kubernetes.image={IMAGE}", "cluster.kubernetes.runs.claim=runs")
DOCUMENTS = {"run.json": '{"schema": "scaletrain.run/v1"}'}
# Options of every backend. The kubelet would expand $(HOME) and $$.
EVERY_OPTION = (
    "cluster.kubernetes.namespace=ml",
    "cluster.kubernetes.queue=team-a",
    "cluster.kubernetes.priority=training-normal",
    "cluster.kubernetes.pod_priority=training-pods",
    "cluster.kubernetes.pull_secrets=[registry, mirror]",
    "cluster.kubernetes.service_account=scaletrain-run",
    "cluster.kubernetes.image_pull_policy=Always",
    "cluster.kubernetes.runs={claim: shared, path: /mnt/runs, sub_path: team-a/runs}",
    "cluster.kubernetes.volumes=[{claim: shared, path: /data, read_only: true, sub_path: d}, {claim: hub, path: /hub}]",
    "cluster.kubernetes.rdma_resource=rdma/hca_shared_devices_a",
    "cluster.kubernetes.rdma_count=8",
    "cluster.kubernetes.cpus_per_node=96",
    "cluster.kubernetes.memory_per_node=1TiB",
    "cluster.kubernetes.ephemeral_storage=200GB",
    "cluster.kubernetes.shm_size=64GiB",
    "cluster.kubernetes.node_selector={network: ib}",
    "cluster.kubernetes.tolerations=[{key: team, operator: Equal, value: a, effect: NoExecute, seconds: 90}]",
    "cluster.kubernetes.topology={kind: required, key: topology.example/rack}",
    "cluster.kubernetes.ttl_seconds_after_finished=1h",
    "cluster.kubernetes.secrets={HF_TOKEN: {secret: hub-login, key: token}}",
    "cluster.kubernetes.run_as_user=4711",
    "cluster.kubernetes.fs_group=null",
    "cluster.kubernetes.host_network=true",
    "cluster.kubernetes.cpu_limit=none",
    """cluster.kubernetes.pod_overrides={
        metadata: {labels: {team: a}, annotations: {k8s.v1.cni.cncf.io/networks: 'rdma-1,rdma-2'}},
        spec: {
          runtimeClassName: nvidia, hostIPC: true,
          securityContext: {runAsUser: null, runAsGroup: null, supplementalGroups: [44]},
          tolerations: [{key: maintenance, operator: Exists}],
          affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
            {matchExpressions: [{key: zone, operator: In, values: [a]}]},
            {matchExpressions: [{key: zone, operator: In, values: [b]}]}]}}},
          volumes: [{name: scratch, emptyDir: {sizeLimit: 100Gi}}, {name: nvme, hostPath: {path: /mnt/nvme}}],
          initContainers: [{name: telemetry, image: registry.example/dcgm:4.1, restartPolicy: Always}],
          containers: [{
            name: node,
            env: [{name: NODE_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}],
            resources: {limits: {hugepages-2Mi: 1Gi, vpc.amazonaws.com/efa: 4}},
            volumeMounts: [{name: scratch, mountPath: /scratch}, {name: nvme, mountPath: /nvme}]}]}}""",
    "cluster.spot=true",
    "secret_env=[HF_TOKEN]",
    'env={NCCL_DEBUG: WARN, NOTE: "it\'s $(HOME) $$5\\n\\tand on", MASTER_ADDR: ignored, "ON": "yes"}',
)


@cache
def recipe(name: str, *overrides: str) -> RunSpec:
    return load_spec(PROJECT / "recipes" / f"{name}.yaml", (*NEEDED, *overrides))


@cache
def plan_of(name: str) -> RunPlan:
    from scaletrain_cli.plan import make_plan as plan

    return plan(load_spec(PROJECT / "recipes" / f"{name}.yaml", ()))


def rendered(spec: RunSpec, *, run_id: str = "demo-1", plan: RunPlan | None = None, **more: Any) -> Manifest:
    """Return the manifest of a spec; without ``plan``, with a plan of arbitrary numbers."""
    record = RunRecord(run_id, 0.0, spec, plan or make_plan(spec), {}, "", "", revision=more.pop("revision", 0))
    return manifest(record, more.pop("documents", DOCUMENTS), **more)


def rendered_recipe(name: str, *overrides: str, **more: Any) -> Manifest:
    return rendered(recipe(name, *overrides), **more)


def template_of(made: Manifest) -> dict[str, Any]:
    """Return the pod template."""
    kinds = {one["kind"]: one for one in made.objects}
    if "tasks" in made.workload_object["spec"]:
        return made.workload_object["spec"]["tasks"][0]["template"]
    jobset = kinds["TrainingRuntime"]["spec"]["template"] if "TrainingRuntime" in kinds else kinds["JobSet"]
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def container_of(made: Manifest) -> dict[str, Any]:
    (container,) = template_of(made)["spec"]["containers"]
    return container


def environment_of(made: Manifest) -> dict[str, Any]:
    """Return the container's environment: values by name, references unchanged."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container_of(made)["env"]}


def child_job(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the first Job that the controller creates for a JobSet."""
    return next(child_jobs(jobset))
