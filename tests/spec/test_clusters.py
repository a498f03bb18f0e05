import pwd
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError, UsageError
from scaletrain_cli.launch.login_node.sent_runs import sent_runs_file
from scaletrain_cli.launch.login_node.ssh import _socket_folder
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec, load_spec, parse_spec
from scaletrain_cli.spec.clusters_file import clusters_file
from tests.cli.command_line import scaletrain

SPEC = """
schema: scaletrain/v1
name: a
model: {preset: llama-7b}
data: {source: data/*.jsonl, tokenizer: {vocab_size: 32000}}
training: {global_batch_size: 1024, steps: 100}
cluster:
  nodes: 4
  slurm: {qos: high}
"""
CLUSTERS = """
default: lab
runs: ~/shared/runs
clusters:
  lab:
    scheduler: slurm
    gpu: h100-sxm-80gb
    gpus_per_node: 8
    slurm: {partition: gpu, account: team-a, qos: normal}
  other:
    scheduler: slurm
    nodes: 2
    gpus_per_node: 4
    gpu: a100-sxm-80gb
    slurm: {qos: low}
"""


@pytest.fixture
def configured() -> Path:
    return write(CLUSTERS)


def write(text: str) -> Path:
    file = clusters_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def load(tmp_path: Path, *overrides: str, cluster: str | None = None, spec: str = SPEC) -> RunSpec:
    path = tmp_path / "a.yaml"
    path.write_text(spec)
    return load_spec(path, overrides, cluster=cluster)


def test_the_default_cluster_supplies_missing_keys(configured: Path, tmp_path: Path) -> None:
    cluster = load(tmp_path).cluster
    assert (cluster.scheduler, cluster.nodes, cluster.gpu, cluster.gpus_per_node) == ("slurm", 4, "h100-sxm-80gb", 8)
    assert (cluster.slurm.partition, cluster.slurm.account, cluster.slurm.qos) == ("gpu", "team-a", "high")


def test_the_cluster_option_overrides_the_spec_and_set_overrides_both(configured: Path, tmp_path: Path) -> None:
    cluster = load(tmp_path, "cluster.nodes=3", cluster="other").cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.slurm.qos, cluster.slurm.partition) == (3, 4, "low", None)


def test_the_default_cluster_does_not_apply_to_another_scheduler(configured: Path, tmp_path: Path) -> None:
    here = load(tmp_path, spec=SPEC.replace("nodes: 4", "scheduler: local")).cluster
    assert (here.scheduler, here.gpu, here.slurm.partition) == ("local", "cpu", None)


def test_without_a_clusters_file_a_spec_is_unchanged(tmp_path: Path) -> None:
    assert load(tmp_path, "cluster.nodes=1").cluster.scheduler == "local"


def test_a_spec_without_a_cluster_section_uses_the_default_cluster(configured: Path, tmp_path: Path) -> None:
    assert load(tmp_path, spec=SPEC.partition("cluster:")[0]).cluster.slurm.account == "team-a"


def test_a_problem_from_the_clusters_file_names_its_line(tmp_path: Path) -> None:
    file = write(
        CLUSTERS.replace("partition: gpu", "partitoin: gpu").replace("gpus_per_node: 8", "gpus_per_node: many")
    )
    with pytest.raises(SpecError) as error:
        load(tmp_path)
    reported = {(problem.where, problem.key) for problem in error.value.problems}
    assert reported == {(f"{file}:8", "cluster.gpus_per_node"), (f"{file}:9", "cluster.slurm.partitoin")}


def test_an_error_in_the_spec_still_names_the_line_of_the_spec(configured: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        load(tmp_path, spec=SPEC.replace("nodes: 4", "nodes: none"))
    assert [problem.where for problem in error.value.problems] == [f"{tmp_path}/a.yaml:8"]


def test_an_unknown_cluster_is_rejected_with_a_suggestion(configured: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--cluster = labb: no such cluster .*Did you mean lab.*lab, other"):
        load(tmp_path, cluster="labb")
    file = write(CLUSTERS.replace("default: lab", "default: nowhere"))
    with pytest.raises(UsageError, match=f"{file}:2 default = nowhere: no such cluster"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusters: {lab: 3}", "clusters.lab"),
        ("clusters: [lab]", "must be a mapping of cluster names"),
        ("cluster: {}", "unknown key. Use default, runs, clusters"),
        ("default: 3", "must be text"),
        ("runs: [a]", "must be text"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_invalid_clusters_file_is_rejected(text: str, words: str, tmp_path: Path) -> None:
    write(text)
    with pytest.raises(SpecError) as error:
        load(tmp_path)
    assert words in f"{error.value} {error.value.problems}"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "clusters:\n", "default:\n"])
def test_an_empty_clusters_file_has_no_clusters(text: str, tmp_path: Path) -> None:
    write(text)
    assert load(tmp_path, "cluster.nodes=1").cluster.scheduler == "local"


def test_env_overrides_the_runs_root_of_the_clusters_file(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_root() != Path.home() / "shared" / "runs"
    monkeypatch.delenv("SCALETRAIN_RUNS")
    assert runs_root() == Path.home() / "shared" / "runs"
    write("clusters: {}")
    assert runs_root() == Path.cwd() / "runs"


@pytest.mark.process
def test_verbs_accept_a_cluster_name(configured: Path, tmp_path: Path) -> None:
    load(tmp_path)
    path = tmp_path / "a.yaml"
    assert scaletrain("validate", path, "--cluster", "other", "--json").data["spec"]["cluster"]["nodes"] == 2
    assert scaletrain("plan", path, "--cluster", "other", "--json").data["layout"]["world_size"] == 8
    submitted = scaletrain("submit", path, "--cluster", "other", "--dry-run", "--set=data.source=python-stdlib")
    assert "--gpus-per-node=4" in submitted.out
    assert scaletrain("plan", path, "--cluster", "nowhere").code == 2


def test_a_user_without_a_home_folder_has_no_clusters_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user that is in no user database."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    folders = ("CONFIG_HOME", "STATE_HOME", "CACHE_HOME", "RUNTIME_DIR")
    for name in ("HOME", "SCALETRAIN_CLUSTERS", *(f"XDG_{folder}" for folder in folders)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not clusters_file().exists()
    assert not sent_runs_file().exists()
    assert _socket_folder() is None
    assert parse_spec(SPEC, file="a.yaml", base_dir=Path(), overrides=("cluster.nodes=1",)).name == "a"
