from typing import Any

from scaletrain_cli.plan.axes import resolve_axes
from scaletrain_cli.plan.memory.peak import outside_allocator_bytes
from scaletrain_cli.plan.search.layouts import build_layout
from tests.plan.specs import spec_of

GB = 10**9


def outside(preset: str = "llama-7b", is_cpu: bool = False, **changed: Any) -> int:
    spec = spec_of(preset, **changed)
    layout = build_layout(spec, resolve_axes(spec), 1, "none", 1)
    return outside_allocator_bytes(layout, spec.cluster.gpus_per_node, is_cpu)


def test_one_gpu_has_only_its_context_outside_the_allocator() -> None:
    assert outside(cluster__gpus_per_node=1) == 0.7 * GB


def test_every_axis_above_1_adds_one_communicator() -> None:
    one, same, two, three = (
        outside(cluster__nodes=nodes, layout__tensor_parallel=tensor, layout__pipeline_parallel=pipeline)
        for nodes, tensor, pipeline in ((1, 1, 1), (16, 1, 1), (4, 2, 1), (4, 2, 2))
    )
    assert one == same < two < three
    assert one > 1 * GB
    assert three < 2 * GB  # what the fullest of the published runs left


def test_an_all_to_all_of_experts_opens_a_connection_to_every_peer_in_the_node() -> None:
    # NVIDIA/nccl issue 1685: 3.28 GB more after the first all-to-all of eight H100.
    alone, within, beyond = (
        outside("mixtral-8x7b", cluster__nodes=nodes, layout__expert_parallel=degree)
        for nodes, degree in ((1, 1), (1, 8), (2, 8))
    )
    assert abs(within - alone - 3.28 * GB) < 0.02 * GB
    assert beyond == within


def test_a_cpu_rank_has_no_context() -> None:
    assert outside(is_cpu=True) < outside(cluster__gpus_per_node=1)
