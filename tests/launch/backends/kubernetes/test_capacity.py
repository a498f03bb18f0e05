"""The capacity of nodes for a gang, and the quantities of the API server."""

from fractions import Fraction
from typing import Any

import pytest

from scaletrain_cli.launch.backends.kubernetes.capacity import _pods_on, amounts
from scaletrain_cli.launch.backends.kubernetes.quota import parse_quantity, quantity_text


def node(**allocatable: str) -> dict[str, Any]:
    return {"metadata": {"name": "n"}, "status": {"allocatable": allocatable}}


def test_two_pods_of_a_gang_may_share_a_node_with_resources_for_both() -> None:
    one = {"nvidia.com/gpu": Fraction(4), "cpu": Fraction(8), "ephemeral-storage": Fraction(0)}
    assert _pods_on(node(**{"nvidia.com/gpu": "8", "cpu": "64"}), one) == 2
    assert _pods_on(node(**{"nvidia.com/gpu": "8", "cpu": "12"}), one) == 1
    assert _pods_on(node(cpu="64"), one) == 0


def test_a_pod_requests_what_its_containers_and_side_cars_do_together_or_its_largest_first_container() -> None:
    def container(cpu: str, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}, "limits": {"gpu": "1"}}, **more}

    side_car = container("1", restartPolicy="Always")
    pod = {"containers": [container("2"), container("500m")], "initContainers": [container("3"), side_car]}
    assert amounts(pod) == {"cpu": Fraction(7, 2), "gpu": 3}
    assert amounts({**pod, "initContainers": [container("9")]}) == {"cpu": 9, "gpu": 2}
    assert amounts(pod, "limits") == {"gpu": 3}
    assert amounts({"containers": [{}], "initContainers": None}) == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((8, 8), ("8", 8), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)), ("1k", 1000)),
        *(("2Gi", 2 * 2**30), ("1Ti", 2**40), ("1e3", 1000), ("12E", 12 * 10**18), ("1E2", 100), ("-1", -1)),
    ],
)
def test_a_quantity_is_parsed_as_kubernetes_defines_it(text: str | int, number: Fraction | int) -> None:
    assert parse_quantity(text) == number


def test_amounts_are_shown_in_readable_units() -> None:
    assert [quantity_text(parse_quantity(text)) for text in ("16", "512Gi", "500m", "2M")] == [
        "16",
        "512.0Gi",
        "0.5",
        "2e+06",
    ]
