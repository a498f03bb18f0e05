"""Whether nodes have room for a gang at all, where no queue says so."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.capacity import _pods_on


def node(**allocatable: str) -> dict[str, Any]:
    return {"metadata": {"name": "n"}, "status": {"allocatable": allocatable}}


def test_two_pods_of_a_gang_may_share_a_node_that_has_room_for_both() -> None:
    one = {"nvidia.com/gpu": Fraction(4), "cpu": Fraction(8), "ephemeral-storage": Fraction(0)}
    assert _pods_on(node(**{"nvidia.com/gpu": "8", "cpu": "64"}), one) == 2
    assert _pods_on(node(**{"nvidia.com/gpu": "8", "cpu": "12"}), one) == 1
    assert _pods_on(node(cpu="64"), one) == 0
