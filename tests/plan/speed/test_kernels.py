"""Kernels against what others measured, and against the limits that no device can pass."""

import pytest

from scaletrain_cli.plan.catalogue.hardware import Accelerator, accelerator_names, find_accelerator
from scaletrain_cli.plan.speed.kernels import (
    Rates,
    flash_attention_seconds,
    materialized_attention_seconds,
    matmul_seconds,
    memory_seconds,
    rates,
)
from scaletrain_cli.spec import ClusterSpec


def device(name: str) -> Accelerator:
    return find_accelerator(ClusterSpec(gpu=name))


def on(name: str, precision: str = "bf16") -> Rates:
    return rates(device(name), precision)


@pytest.mark.parametrize("name", [name for name in accelerator_names() if name != "cpu"])
def test_no_product_is_faster_than_the_data_sheet(name: str) -> None:
    accelerator = device(name)
    assert accelerator.flops
    for precision in accelerator.flops:
        rate = rates(accelerator, precision)
        for rows, inner, columns in ((64, 64, 64), (8192, 8192, 8192), (4096, 1024, 128), (131072, 4096, 14336)):
            seconds = matmul_seconds(rows, inner, columns, rate)
            assert seconds >= 2 * rows * inner * columns / accelerator.peak_flops(precision)


# ml-engineering, maximum achievable matmul FLOP/s; training sustains less than the best shape in a short burst.
@pytest.mark.parametrize(("name", "best"), [("a100-sxm-80gb", 271e12), ("h100-sxm-80gb", 795e12), ("b200", 1745e12)])
def test_a_large_product_reaches_most_of_the_measured_rate(name: str, best: float) -> None:
    reached = 2 * 8192**3 / matmul_seconds(8192, 8192, 8192, on(name))
    assert 0.6 * best < reached < 1.02 * best


def test_small_and_narrow_products_are_less_efficient() -> None:
    rate = on("h100-sxm-80gb")

    def flops(rows: int, inner: int, columns: int) -> float:
        return 2 * rows * inner * columns / matmul_seconds(rows, inner, columns, rate)

    assert flops(4096, 4096, 4096) > 1.1 * flops(4096, 512, 4096)
    assert flops(4096, 4096, 4096) > 1.5 * flops(256, 4096, 512)
    assert flops(4096, 4096, 4096) > 1.05 * flops(4096, 4096, 4100)  # rows that begin where tensor cores do not load


def test_a_small_kernel_takes_at_least_its_launch_time() -> None:
    rate = on("h100-sxm-80gb")
    assert memory_seconds(0, 3, rate) == pytest.approx(3 * rate.kernel_seconds)
    assert memory_seconds(3.35e9, 1, rate) > 1e-3


def test_attention_costs_its_square_and_twice_and_a_half_backward() -> None:
    rate = on("h100-sxm-80gb")
    short = flash_attention_seconds(8192, 8192, 32, 128, 128, False, rate)
    long = flash_attention_seconds(16384, 16384, 32, 128, 128, False, rate)
    assert 3.7 < long[0] / short[0] < 4
    assert 2.5 < long[1] / long[0] < 4


def test_attention_that_keeps_its_scores_is_slower() -> None:
    rate = on("a100-sxm-80gb")
    fused = flash_attention_seconds(8192, 2048, 16, 128, 128, False, rate)
    kept = materialized_attention_seconds(8192, 2048, 16, 128, 128, (8, 14), False, rate)
    dropped = materialized_attention_seconds(8192, 2048, 16, 128, 128, (8, 14), True, rate)
    assert sum(kept) > 1.5 * sum(fused)
    assert sum(dropped) > sum(kept)


def test_a_cpu_has_one_rate_for_all_dimensions() -> None:
    rate = on("cpu", "fp32")
    assert matmul_seconds(64, 64, 64, rate) == pytest.approx(2 * 64**3 / rate.matmul)
