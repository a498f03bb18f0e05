"""Properties of every valid spec: the manifest is valid, YAML readers agree, and every value arrives unchanged."""

import io
import re
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from scaletrain_cli.launch.backends.kubernetes.manifest import to_yaml
from scaletrain_cli.launch.backends.kubernetes.names import LONGEST_LABEL_VALUE, Workload, parse_id, run_label
from scaletrain_cli.launch.backends.kubernetes.workloads import children
from scaletrain_cli.own_processes import absolute_paths, python_words
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.spec.pod_overrides import OWN_VARIABLES
from tests.launch.backends.kubernetes.rendering import IMAGE, container_of, environment_of, rendered
from tests.launch.backends.kubernetes.rules import problems
from tests.launch.backends.kubernetes.schemas import FastLoader, require_valid
from tests.launch.conftest import make_spec

characters = st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))
pieces = [
    *("$(HOME)", "$$", "$", "$(", "\n", "'", '"', "\\", ": ", "# ", "- ", "on", "0x1f", "1e3", "12:30", "\x85"),
    "\ufeff",
]
texts = st.text(characters, max_size=30) | st.lists(st.sampled_from(pieces), max_size=6).map("".join)
variables = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,12}\Z") | st.sampled_from(["NO", "y", "MASTER_ADDR", "LD_X"])
labels = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
names = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]{1,20}){0,2}\Z")
label_keys = st.from_regex(r"\A([a-z]{1,9}\.[a-z]{1,9}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?\Z")
label_values = st.just("") | st.from_regex(r"\A[A-Za-z0-9]([-A-Za-z0-9_.]{0,40}[A-Za-z0-9])?\Z")
resources = st.from_regex(r"\A[a-z]{1,9}\.(com|io)/[a-z]([-a-z0-9]{0,20}[a-z0-9])?\Z")
folders = st.lists(st.from_regex(r"\A[A-Za-z0-9 $_'\"-]{1,9}\Z"), min_size=1, max_size=3).map("/".join)
sizes = st.integers(2**20, 2**44)
seconds = st.floats(0, 1e6, allow_nan=False)
run_ids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
workloads = st.builds(Workload, run_ids, st.integers(1, 999), st.integers(0, 9), st.sampled_from(["jobset", "volcano"]))

tolerations = st.one_of(
    st.fixed_dictionaries({"key": label_keys, "operator": st.just("Equal"), "value": label_values}),
    st.fixed_dictionaries({"key": st.none() | label_keys, "effect": st.sampled_from(["NoSchedule", "NoExecute"])}),
    st.fixed_dictionaries({"key": label_keys, "effect": st.just("NoExecute"), "seconds": seconds}),
)


@st.composite
def sections(draw: st.DrawFn) -> KubernetesSpec:
    backend = draw(st.sampled_from(["jobset", "volcano", "trainjob"]))
    queue = draw(st.none() | labels)
    kueue = queue is not None and backend != "volcano"
    secrets = st.fixed_dictionaries({"secret": names, "key": st.sampled_from(["token", ".dot", "A_b-c.d"])})
    paths = draw(st.lists(folders, max_size=4, unique_by=lambda path: path.split("/")[0]))
    claims = ({"claim": draw(names), "path": f"/x/{path}", "read_only": draw(st.booleans())} for path in paths[1:])
    kinds = ["required", "preferred"] if backend == "volcano" or kueue else []
    kinds += ["unconstrained"] if kueue else ["exclusive"] if backend == "jobset" and queue is None else []
    kind = draw(st.none() | st.sampled_from(kinds)) if kinds else None
    priorities = st.none() | names.filter(lambda name: not kueue or len(name) <= LONGEST_LABEL_VALUE)
    topology = kind and {"kind": kind, **({} if kind == "unconstrained" else {"key": draw(label_keys)})}
    return KubernetesSpec.model_validate(
        {
            "namespace": draw(labels),
            "backend": backend,
            "queue": queue,
            "priority": draw(priorities) if kueue or backend == "volcano" else None,
            "pod_priority": draw(st.none() | names),
            "image": draw(st.sampled_from([IMAGE, "localhost/st:v1.2-rc_3", f"st:1@sha256:{'0' * 64}"])),
            "image_pull_policy": draw(st.sampled_from(["auto", "Always", "IfNotPresent", "Never"])),
            "pull_secrets": draw(st.lists(names, max_size=2)),
            "service_account": draw(st.none() | names),
            "runs": {"claim": draw(names), "path": f"/runs/{paths[0]}" if paths else "/runs", "sub_path": "a b/c"},
            "volumes": list(claims),
            "gpu_resource": draw(st.just("nvidia.com/gpu") | resources),
            "rdma_resource": draw(st.none() | resources.map("rdma.{}".format)),
            "rdma_count": draw(st.integers(1, 16)),
            "ipc_lock": draw(st.booleans()),
            "cpus_per_node": draw(st.just("auto") | st.integers(1, 1000)),
            "memory_per_node": draw(st.just("auto") | st.integers(2**45, 2**50)),
            "ephemeral_storage": draw(st.none() | sizes),
            "shm_size": draw(st.just("auto") | sizes),
            "gpu_product": draw(st.none() | label_values) if not kueue else None,
            "node_selector": draw(st.dictionaries(label_keys, label_values, max_size=3)),
            "tolerations": draw(st.lists(tolerations, max_size=3)),
            "spot_taint": draw(st.sampled_from(["auto", "gke", "eks", "karpenter", "aks", "none"])),
            "not_ready_seconds": draw(seconds),
            "topology": topology,
            "native_gang": "v1alpha2" if backend == "jobset" and queue is None and draw(st.booleans()) else "none",
            "ttl_seconds_after_finished": draw(st.none() | seconds),
            "active_deadline": draw(st.none() | st.floats(1, 1e6)) if backend != "volcano" else None,
            "secrets": draw(
                st.dictionaries(variables.filter(lambda name: name not in OWN_VARIABLES), secrets, max_size=2)
            ),
            "run_as_user": draw(st.integers(1, 2**31 - 1)),
            "fs_group": draw(st.none() | st.integers(1, 2**31 - 1)),
            "host_network": draw(st.booleans()),
        }
    )


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    kubernetes = draw(sections())
    assert list(kubernetes.inconsistencies()) == []
    cluster = ClusterSpec(
        scheduler="kubernetes",
        nodes=draw(st.integers(1, 100_000)),
        gpus_per_node=draw(st.integers(1, 16)),
        gpu=draw(st.sampled_from(["cpu", "h100-sxm-80gb"])),
        spot=draw(st.booleans()),
        grace_seconds=draw(seconds),
        kubernetes=kubernetes,
    )
    env = draw(st.dictionaries(variables.filter(lambda name: name not in kubernetes.secrets), texts, max_size=4))
    return make_spec().model_copy(update={"cluster": cluster, "env": env})


def expanded(text: str, environment: dict[str, str]) -> str:
    """Expand a value as the kubelet does: $$ to $, and $(NAME) to the value of another variable, if it exists."""
    known = lambda match: "$" if match[0] == "$$" else environment.get(match[1], match[0])  # noqa: E731
    return re.sub(r"\$\$|\$\(([^)]*)\)", known, text)


@settings(max_examples=25)
@given(specs(), run_ids, st.integers(1, 50))
def test_the_manifest_of_every_spec_is_valid_and_has_its_values(spec: RunSpec, run_id: str, submission: int) -> None:
    made = rendered(spec, run_id=run_id, submission=submission, avoid=("node-1",))
    assert problems(made.objects) == []
    core = [one for one in (*made.objects, *children(made.objects)) if one["apiVersion"] in ("v1", "batch/v1")]
    for one in core:
        require_valid(one)
    assert {"ConfigMap", "Pod"} <= {one["kind"] for one in core}

    text = to_yaml(made.objects)
    for read in (yaml.load_all(text, Loader=FastLoader), YAML(typ="safe", pure=True).load_all(io.StringIO(text))):
        assert list(read) == list(made.objects)

    variables = environment_of(made)
    plain = {name: value for name, value in variables.items() if isinstance(value, str)}
    wanted = {name: value for name, value in absolute_paths(spec.env).items() if name not in OWN_VARIABLES}
    assert {name: expanded(plain[name], {"HOME": "/root", **plain}) for name in wanted} == wanted
    assert set(variables) - set(wanted) <= OWN_VARIABLES | spec.cluster.kubernetes.secrets.keys()
    command = [expanded(word, plain) for word in (*container_of(made)["command"], *container_of(made)["args"])]
    agent = ["python", *python_words("scaletrain_cli.launch.backends.kubernetes.pod_agent")]
    agent += ["--documents", "/etc/scaletrain/run"]
    assert command == [*agent, "--runs-root", spec.cluster.kubernetes.runs.path]


scalars: st.SearchStrategy[Any] = texts | st.integers() | st.booleans() | st.none()
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(st.lists(st.dictionaries(texts, trees, min_size=1, max_size=3), min_size=1, max_size=2))
@example([{"a": [[], {}, [1, [2]], {"b": {"c": []}}], "": {"": ""}}])
def test_yaml_1_1_and_1_2_read_the_same_values(documents: list[dict[str, Any]]) -> None:
    text = to_yaml(documents)
    assert list(yaml.safe_load_all(text)) == documents
    assert list(YAML(typ="safe", pure=True).load_all(io.StringIO(text))) == documents


@given(workloads)
@example(Workload("x" * 64, 1))
def test_every_generated_name_is_a_dns_label(workload: Workload) -> None:
    for name in (workload.name, *workload.master_address.split("."), workload.config_map):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert len(f"{workload.name}-node-0-99999-abcde") <= 63
    assert parse_id(workload.id) == (workload.backend, workload.name)
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", run_label(workload.run_id))


@given(st.lists(workloads, min_size=2, max_size=2, unique_by=lambda one: (one.run_id, one.submission)))
@example([Workload("Run", 1), Workload("run", 1)])
@example([Workload("a.b", 1), Workload("a-b", 1)])
@example([Workload("x" * 60 + "1", 1), Workload("x" * 60 + "2", 1)])
def test_no_two_submissions_share_a_name(two: list[Workload]) -> None:
    assert two[0].name != two[1].name
