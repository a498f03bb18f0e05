"""Partitions whose nodes have GPUs of several types: what a job requests, and what is refused before it is queued."""

from __future__ import annotations

import dataclasses

import pytest

from scaletrain_cli.launch.backends.slurm import site as site_module
from scaletrain_cli.launch.backends.slurm.preflight import check_site
from scaletrain_cli.launch.backends.slurm.script import sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, type_of_accelerator, usable_nodes
from scaletrain_cli.launch.backends.slurm.tables import gpus, nodes, partitions
from tests.launch.backends.slurm.test_preflight import ask

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
"""
NAMES = ("mixed", "small", "plain", "shards")
SITE = Site(
    user="ada",
    now=0.0,
    config={},
    partitions=partitions("".join(f"PartitionName={name} State=UP PriorityTier=1\n" for name in NAMES)),
    nodes=nodes(ROWS),
    reservations=(),
    associations=(),
    qos_rules=(),
    account="",
    qos="",
    limits=(),
)


def problems(*overrides: str, gpus: int, nodes: int = 1, partition: str = "mixed", site: Site = SITE) -> list[str]:
    spec = ask(f"cluster.slurm.partition={partition}", *overrides, gpus=gpus, nodes=nodes)
    return [str(problem) for problem in check_site(site, spec).problems]


def test_a_type_is_part_of_the_request() -> None:
    assert "gpus-per-node=h100:8" in list(sbatch_options(ask("cluster.slurm.gres_type=h100"), "a"))
    slices = ask("cluster.slurm.gres_type=a100_1g.10gb", "code.command=[serve]", gpus=7)
    assert "gpus-per-node=a100_1g.10gb:7" in list(sbatch_options(slices, "a"))
    assert "gpus-per-node=8" in list(sbatch_options(ask(), "a"))


def test_only_gpus_are_counted_and_no_other_gres() -> None:
    assert gpus("gpu:4,shard:16,vgpu:3") == {"": 4}
    assert gpus("shard:h100:32") == {}
    assert gpus("nic:2,gpu:h100:8(S:0,2-3)") == {"h100": 8}


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
def test_a_job_without_a_type_is_accepted_where_it_can_get_only_one(
    overrides: list[str], sizes: dict[str, object]
) -> None:
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


def test_only_nodes_with_the_requested_gpus_are_left_when_bad_ones_are_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ("h1|idle|mixed|gpu:h100:8", "h2|idle|mixed|gpu:h100:8", "a1|idle|mixed|gpu:a100:4", "c1|idle|mixed|(null)")
    answer = type("Answer", (), {"stdout": "\n".join(rows)})
    monkeypatch.setattr(site_module, "call_slurm", lambda command: answer)
    typed = ask("cluster.slurm.partition=mixed", "cluster.slurm.gres_type=h100", gpus=4)
    assert usable_nodes(typed.cluster) == {"h1", "h2"}
    assert usable_nodes(ask("cluster.slurm.partition=mixed", gpus=8).cluster) == {"h1", "h2"}
