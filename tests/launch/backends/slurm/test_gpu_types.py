"""Partitions whose nodes have GPUs of several types: what a job requests, and what is refused before it is queued."""

import dataclasses

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.backends.slurm import site as site_module
from scaletrain_cli.launch.backends.slurm.preflight import check_site
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, cores_per_gpu, nodes_of, type_of_accelerator
from scaletrain_cli.launch.backends.slurm.tables import Limit, nodes, partitions
from tests.launch.backends.slurm.test_preflight import SILENT, ask
from tests.launch.conftest import make_spec

# Node, partition and GPUs. mixed has both kinds, also on one node, and MIG instances.
ROWS = """\
h1|idle|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|mixed|64|1000000|
h2|idle|gpu:h100:8(S:0-1)|gpu:h100:0(IDX:N/A)|mixed|64|1000000|
a1|idle|gpu:a100:4|gpu:a100:0(IDX:N/A)|mixed|64|1000000|
a1|idle|gpu:a100:4|gpu:a100:0(IDX:N/A)|small|64|1000000|
b1|idle|gpu:h100:2,gpu:a100:2|gpu:h100:0(IDX:N/A),gpu:a100:0(IDX:N/A)|mixed|64|1000000|
m1|idle|gpu:a100_1g.10gb:7|gpu:a100_1g.10gb:0(IDX:N/A)|mixed|64|1000000|
p1|idle|gpu:8|gpu:0(IDX:N/A)|plain|64|1000000|
p2|idle|gpu:4,shard:16|gpu:0(IDX:N/A),shard:0(0/4,0/4,0/4,0/4)|plain|64|1000000|
s1|idle|shard:h100:32|shard:h100:0(0/32)|shards|64|1000000|
w1|idle|(null)|(null)|whole|96|1000000|
w2|idle|(null)|(null)|whole|96|1000000|
d1|idle|gpu:v100:4(S:0-1),nvme:3600|gpu:v100:0(IDX:N/A),nvme:0|disks|40|380000|
d2|idle|gpu:v100:4(S:0-1),nvme:local:2T(S:0,1)|gpu:v100:0(IDX:N/A),nvme:local:0|disks|40|380000|
"""
NAMES = ("mixed", "small", "plain", "shards", "whole", "disks")
PARTITIONS = partitions("".join(f"PartitionName={name} State=UP PriorityTier=1\n" for name in NAMES))
SITE = dataclasses.replace(SILENT, partitions=PARTITIONS, nodes=nodes(ROWS))


def problems(*overrides: str, gpus: int, nodes: int = 1, partition: str = "mixed", site: Site = SITE) -> list[str]:
    spec = ask(f"cluster.slurm.partition={partition}", *overrides, gpus=gpus, nodes=nodes)
    return [str(problem) for problem in check_site(site, spec).problems]


def test_a_type_is_part_of_the_request() -> None:
    assert "gpus-per-node=h100:8" in list(sbatch_options(ask("cluster.slurm.gres_type=h100"), "a"))
    slices = ask("cluster.slurm.gres_type=a100_1g.10gb", "code.command=[serve]", gpus=7)
    assert "gpus-per-node=a100_1g.10gb:7" in list(sbatch_options(slices, "a"))
    assert "gpus-per-node=8" in list(sbatch_options(ask(), "a"))


@pytest.mark.parametrize(
    ("settings", "requested"),
    [
        ("gpu_request: gres", ["gres=gpu:8"]),
        ("gpu_request: gres, gres_type: h100, gres: [nvme:500, tmpfs:1T]", ["gres=gpu:h100:8,nvme:500,tmpfs:1T"]),
        ("gres_type: h100, gres: [nvme:500]", ["gpus-per-node=h100:8", "gres=nvme:500"]),
        ("gpu_request: none", ["exclusive"]),
        ("gpu_request: none, gres: [shard:h100:8], extra: {exclusive: false}", ["gres=shard:h100:8"]),
        ("gpu_request: none, extra: {exclusive: user}", ["exclusive=user"]),
    ],
)
def test_the_form_of_the_request_and_other_generic_resources(settings: str, requested: list[str]) -> None:
    options = sbatch_options(ask(f"cluster.slurm={{{settings}}}"), "a")
    assert [one for one in options if one.startswith(("gpus", "gres", "exclusive"))] == requested


def test_a_run_on_cpus_takes_other_generic_resources_and_no_whole_nodes() -> None:
    spec = make_spec("cluster.scheduler=slurm", "cluster.slurm={gpu_request: none, gres: [nvme:500]}")
    options = [one for one in sbatch_options(spec, "a") if one.startswith(("gpus", "gres", "exclusive"))]
    assert options == ["gres=nvme:500"]


def test_a_site_whose_gpus_slurm_does_not_manage_is_used_by_whole_nodes() -> None:
    (refused,) = problems(gpus=4, partition="whole")
    assert "no node of partition whole has GPUs that Slurm manages" in refused
    assert "set cluster.slurm.gpu_request: none if jobs get whole nodes" in refused
    whole = "cluster.slurm.gpu_request=none"
    assert problems(whole, gpus=4, nodes=2, partition="whole") == []
    (few,) = problems(whole, gpus=4, nodes=3, partition="whole")
    assert "partition whole has 2 nodes" in few
    spec = ask(whole, "cluster.slurm.partition=whole", gpus=4)
    assert dataclasses.replace(SITE, cores_per_gpu=cores_per_gpu(SITE, spec.cluster)).cores_per_gpu == 24
    limits = (Limit("QOS normal", "MaxTRESPJ", "gres/gpu", 1.0, None),)
    config = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}
    limited = dataclasses.replace(SITE, limits=limits, config=config)
    assert problems(whole, gpus=4, partition="whole", site=limited) == [], "the job requests no GPUs"


def test_other_generic_resources_are_looked_for_on_the_nodes() -> None:
    disks = {"gpus": 4, "partition": "disks"}
    assert problems("cluster.slurm.gres=[nvme:500]", **disks, nodes=2) == []  # type: ignore[arg-type]
    assert problems("cluster.slurm.gres=[nvme:1T]", **disks) == [], "of the second node"  # type: ignore[arg-type]
    for much in ("[nvme:500, nvme:3T]", "[nvme, tmpfs:1]"):
        (refused,) = problems(f"cluster.slurm.gres={much}", **disks)  # type: ignore[arg-type]
        assert f"cluster.slurm.gres.1 = {much[1:-1].split(', ')[1]}: nodes of partition disks do not have it" in refused
        assert "nvme:local:2T" in refused
    (few,) = problems("cluster.slurm.gres=[nvme:1T]", **disks, nodes=2)  # type: ignore[arg-type]
    assert "partition disks has 1 node with enough resources" in few


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            "extra: {gres: 'nvme:500'}",
            "cluster.slurm.extra.gres = nvme:500: is not possible here: cluster.gpus_per_node",
        ),
        ("extra: {ntasks: 2}", "cluster.slurm.extra.ntasks = 2: is not possible: a job has one task on each node"),
        ("extra: {gpus-per-task: 1}", "cluster.slurm.extra.gpus-per-task = 1: is not possible: a job has one task"),
        ("gres: ['nvme:1', 'gpu:h100:8']", "cluster.slurm.gres.1 = gpu:h100:8: is not possible here"),
        ("gres: ['gres:tmpfs:1']", "cluster.slurm.gres.0 = gres:tmpfs:1: must be a generic resource of Slurm as NAME"),
        ("gres: ['nvme:1,tmpfs:1']", "must be a generic resource of Slurm as NAME[:TYPE][:COUNT]"),
        ("gpu_request: none, gres_type: h100", "cluster.slurm.gres_type = h100: has no effect with slurm.gpu_request"),
        ("gpu_request: gpus", "cluster.slurm.gpu_request = gpus: must be 'gpus-per-node', 'gres' or 'none'"),
    ],
)
def test_other_ways_to_request_gpus_or_tasks_are_refused_with_the_keys_to_use(settings: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        ask(f"cluster.slurm={{{settings}}}")
    assert said in str(refused.value)


def test_a_job_with_a_type_is_checked_against_the_nodes_of_that_type() -> None:
    assert problems("cluster.slurm.gres_type=h100", gpus=8, nodes=2) == []
    assert problems("cluster.slurm.gres_type=a100", gpus=4) == []
    (few,) = problems("cluster.slurm.gres_type=h100", gpus=8, nodes=4)
    assert "partition mixed has 2 nodes with enough resources for the job. Request at most 2." in few
    (many,) = problems("cluster.slurm.gres_type=a100", gpus=8)
    assert "cluster.gpus_per_node = 8: nodes of partition mixed have at most 4 GPUs of type a100" in many
    assert "gres_type" not in many
    (none,) = problems("cluster.slurm.gres_type=v100", gpus=1)
    assert "no node of partition mixed has GPUs of this type; it has a100, a100_1g.10gb, h100" in none


def test_a_job_without_a_type_is_checked_against_the_gpus_of_all_types() -> None:
    (many,) = problems(gpus=16, partition="plain,mixed")[:1]
    assert "have at most 8 GPUs." in many
    both = dataclasses.replace(SITE, nodes=nodes(ROWS.replace("gpu:8|", "gpu:h100:8|")))
    (many,) = problems(gpus=16, partition="plain", site=both)
    assert "nodes of partition plain have at most 8 GPUs." in many


def test_a_job_without_a_type_is_refused_where_it_could_get_several() -> None:
    (both,) = problems(gpus=4)
    assert "cluster.slurm.gres_type = null: nodes that fit the job have GPUs of different types, a100, a100_1g" in both
    assert "Set it to h100 for h100-sxm-80gb" in both


def test_an_accelerator_that_is_not_in_the_catalogue_is_named_as_in_the_spec() -> None:
    rates = "fp32_flops: 60TFLOPS, bf16_flops: 900TFLOPS, memory_bandwidth: 3TB/s, intra_node_bandwidth: 400GB/s"
    (both,) = problems(f"cluster.gpu={{name: Q7, memory: 80GB, {rates}}}", gpus=4)
    assert "Set it to the type of Q7" in both


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], {"gpus": 8, "nodes": 2}),
        ([], {"gpus": 4, "partition": "small"}),
        ([], {"gpus": 4, "nodes": 2, "partition": "plain"}),
        (["cluster.slurm.constraint=h100"], {"gpus": 4, "nodes": 2}),
        (["cluster.slurm.nodelist=h1,h2"], {"gpus": 4, "nodes": 2}),
        (["cluster.slurm.exclude=a1,b1,m1"], {"gpus": 4, "nodes": 2}),
    ],
    ids=["only h100 nodes have 8", "one type in the partition", "no types", "constraint", "nodelist", "exclude"],
)
def test_a_job_without_a_type_is_accepted_where_it_gets_one(overrides: list[str], sizes: dict[str, object]) -> None:
    assert problems(*overrides, **sizes) == []  # type: ignore[arg-type]


def test_several_partitions_count_as_one_pool_of_gpus() -> None:
    (both,) = problems(gpus=4, partition="small,plain")
    assert "GPUs of different types, GPUs without a type, a100" in both
    assert "Set it to the type of h100-sxm-80gb" in both


def test_where_a_plugin_may_set_the_type_a_missing_one_is_a_note() -> None:
    plugin = dataclasses.replace(SITE, config={"JobSubmitPlugins": "lua"})
    found = check_site(plugin, ask("cluster.slurm.partition=mixed", gpus=4, nodes=1))
    assert found.problems == ()
    assert [note.code for note in found.notes] == ["slurm.note-several-gpu-types"]


def test_shards_are_no_gpus() -> None:
    (none,) = problems(gpus=1, partition="shards")
    assert "no node of partition shards has GPUs" in none


def test_the_type_of_an_accelerator_is_found_by_its_family() -> None:
    assert type_of_accelerator("h100-sxm-80gb", ["a100", "h100"]) == "h100"
    assert type_of_accelerator("h100-sxm-80gb", ["nvidia_h100_80gb_hbm3", "a100"]) == "nvidia_h100_80gb_hbm3"
    assert type_of_accelerator("a100-sxm-40gb", ["a100", "a100_1g.10gb"]) == "a100"
    assert type_of_accelerator("a100-sxm-40gb", ["a100", "a100_80gb"]) is None
    assert type_of_accelerator("h100-sxm-80gb", ["gh100", ""]) is None


def test_only_nodes_with_the_requested_gpus_are_left_without_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("h1|idle|mixed|gpu:h100:8", "h2|idle|mixed|gpu:h100:8", "a1|idle|mixed|gpu:a100:4", "c1|idle|mixed|(null)")
    answer = type("Answer", (), {"stdout": "\n".join(f"{row}|(null)" for row in rows)})
    monkeypatch.setattr(site_module, "call_slurm", lambda command: answer)
    typed = ask("cluster.slurm.partition=mixed", "cluster.slurm.gres_type=h100", gpus=4)
    for cluster in (typed.cluster, ask("cluster.slurm.partition=mixed", gpus=8).cluster):
        assert nodes_of(cluster) == {"h1": True, "h2": True, "a1": False, "c1": False}
