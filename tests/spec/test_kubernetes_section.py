import pytest

from scaletrain_cli.spec.kubernetes import KubernetesSpec
from tests.spec.samples import SPEC, load, problem, problems

DIGEST = f"@sha256:{'ab' * 32}"


def kubernetes(*options: str) -> KubernetesSpec:
    return load(SPEC, *(f"cluster.kubernetes.{option}" for option in options)).cluster.kubernetes


def complaint(*options: str) -> str:
    return problem(SPEC, *(f"cluster.kubernetes.{option}" for option in options))


@pytest.mark.parametrize(
    "image",
    [
        f"scaletrain{DIGEST}",
        f"registry.example:5000/ml/sub_team/scaletrain{DIGEST}",
        f"ghcr.io/Example/scaletrain:v1{DIGEST}".lower(),
        "localhost:5000/scaletrain:2026-11-21_a.b",
    ],
)
def test_an_image_with_a_digest_or_a_tag_is_accepted(image: str) -> None:
    found = kubernetes(f"image={image}")
    assert found.image == image
    assert found.image_is_pinned == ("@" in image)


NO_DIGEST, INVALID = "must have a digest", "must be an image reference"
IMAGES = dict.fromkeys(("scaletrain", "scaletrain:latest", "registry.example:5000/scaletrain"), NO_DIGEST)
IMAGES |= dict.fromkeys(("Scale Train:1", "scaletrain@sha256:abc", "reg/Name:1", "REGISTRY/name:1"), INVALID)
IMAGES |= dict.fromkeys(("'-x:1'", "https://r/n:1"), INVALID)


@pytest.mark.parametrize(("image", "message"), IMAGES.items())
def test_an_image_that_is_not_pinned_or_no_reference_is_rejected(image: str, message: str) -> None:
    assert message in complaint(f"image={image}")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("namespace=Team_A", "must be a Kubernetes name of lower-case letters, digits and dashes"),
        (f"queue={'a' * 64}", "digits and dashes, at most 63 characters long"),
        ("runs.claim=My Claim", "must be a Kubernetes name"),
        ("runs.path=runs", "must be an absolute path"),
        ("runs.path=/runs/../etc", "must be an absolute path"),
        ("runs.path=/", "must be an absolute path"),
        ("runs.sub_path=/abs", "must be a relative path"),
        ("gpu_resource=gpu", "must be the resource name of a device plugin"),
        ("node_selector={a b: c}", "must be a label key"),
        ("node_selector={ssd: true}", 'must be text. Put it in quotes: "true"'),
        ("node_selector={rack: 12}", 'must be text. Put it in quotes: "12"'),
        ("node_selector={rack: -a}", "must be a label value of letters"),
        ("run_as_user=0", "must be at least 1"),
        ("cpus_per_node=0", "whole number of at least 1, or auto"),
        ("shm_size=0", "must be above 0, or auto"),
        ("backend=kueue", "must be 'jobset', 'volcano' or 'trainjob'"),
        ("native_gang=v1beta1", "must be 'none', 'auto' or 'v1alpha2'"),
        ("secrets={HF TOKEN: {secret: a, key: b}}", "must be the name of an environment variable"),
        ("secrets={HF_TOKEN: {secret: a, key: 'x y'}}", "must be a key of a Secret"),
    ],
)
def test_values_that_kubernetes_would_reject_are_rejected(option: str, message: str) -> None:
    assert message in complaint(option)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["priority=high"], "priority"),
        (["queue=a", "gpu_product=NVIDIA-H100-80GB-HBM3"], "gpu_product"),
        (["gpu_product=H100", "node_selector={nvidia.com/gpu.product: H100}"], "gpu_product"),
        (["rdma_resource=nvidia.com/gpu"], "rdma_resource"),
        (["ttl_seconds_after_finished=1e12"], "ttl_seconds_after_finished"),
        (["native_gang=v1alpha2", "queue=a"], "native_gang"),
        (["native_gang=v1alpha2", "backend=volcano"], "native_gang"),
        (["active_deadline=1h", "backend=volcano"], "active_deadline"),
        (["shm_size=2GiB", "memory_per_node=1GiB"], "shm_size"),
        (["queue=a", "topology={kind: required}"], "topology.key"),
        (["queue=a", "topology={kind: unconstrained, key: rack}"], "topology.key"),
        (["topology={kind: required, key: rack}"], "topology.kind"),
        (["queue=a", "topology={kind: exclusive, key: rack}"], "topology.kind"),
        (["backend=volcano", "topology={kind: unconstrained}"], "topology.kind"),
        (["volumes=[{claim: a, path: /runs/data}]"], "volumes.0.path"),
        (["volumes=[{claim: a, path: /x}, {claim: b, path: /x/}]"], "volumes.1.path"),
        (["volumes=[{claim: a, path: /dev}]"], "volumes.0.path"),
        (["runs.path=/etc"], "runs.path"),
        (["tolerations=[{key: a, operator: Equal}]"], "tolerations.0.value"),
        (["tolerations=[{value: a, key: b}]"], "tolerations.0.value"),
        (["tolerations=[{key: a, effect: NoSchedule, seconds: 5}]"], "tolerations.0.seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_contradictory_kubernetes_settings_are_rejected(options: list[str], key: str) -> None:
    assert f"cluster.kubernetes.{key}" in complaint(*options)


def test_volcano_has_queues_and_priorities_of_its_own() -> None:
    found = kubernetes("backend=volcano", "queue=gold", "priority=high", "gpu_product=H100")
    assert not found.kueue
    assert kubernetes("queue=gold", "priority=high").kueue


def test_each_secret_needs_a_secret_object_and_must_not_be_in_env() -> None:
    on_kubernetes = "cluster.scheduler=kubernetes"
    line = problem(SPEC, on_kubernetes, "secret_env=[HF_TOKEN, WANDB_API_KEY]")
    assert "HF_TOKEN, WANDB_API_KEY must also be in cluster.kubernetes.secrets" in line
    known = "cluster.kubernetes.secrets={HF_TOKEN: {secret: hub, key: token}}"
    assert load(SPEC, on_kubernetes, "secret_env=[HF_TOKEN]", known).secret_env == ["HF_TOKEN"]
    assert load(SPEC, "secret_env=[HF_TOKEN]").secret_env == ["HF_TOKEN"]  # elsewhere they come from the environment
    assert "where its value is visible" in problem(SPEC, on_kubernetes, "env={HF_TOKEN: abc}", known)


def test_planning_requires_neither_image_nor_volume() -> None:
    found = load(SPEC, "cluster.scheduler=kubernetes").cluster.kubernetes
    assert (found.image, found.runs.claim) == (None, None)


def test_an_unknown_key_in_a_list_or_mapping_is_reported_with_the_known_keys() -> None:
    in_list = complaint("tolerations=[{key: a, efect: NoSchedule}]")
    assert "Did you mean effect?" in in_list
    found = problems(SPEC, "cluster.kubernetes.secrets={A: {secret: a, key: b, kee: c}}")
    assert ["Known keys: secret, key." in str(one) for one in found] == [True]
