"""The catalogue is complete, sourced, and plausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scaletrain_cli.plan.hardware
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.plan import accelerator_names, find_accelerator
from tests.plan.specs import spec_of


@pytest.mark.parametrize("name", accelerator_names())
def test_every_accelerator_has_plausible_sourced_figures(name: str) -> None:
    device = find_accelerator(spec_of(cluster__gpu=name).cluster)
    assert device.source
    assert 0.3 <= device.achievable_fraction <= 1
    assert device.flops["fp32"] <= max(device.flops.values())
    if not device.is_cpu:
        assert 10e9 < device.memory_bytes < 300e9
        assert 100e9 < device.memory_bandwidth < 10e12
        size = int(name.rsplit("-", 1)[1].removesuffix("gb")) * 1e9
        assert 0.9 * size < device.memory_bytes < 1.08 * size  # vendors' GB are partly GiB


def test_the_names_people_use_are_known() -> None:
    known = accelerator_names()
    for family in ("v100", "a100", "h100", "h200", "b200", "l4", "l40s", "a10g", "rtx-4090", "mi300x", "cpu"):
        assert any(name.startswith(family) for name in known), family


def test_the_data_file_is_json_without_repeated_names() -> None:
    path = Path(scaletrain_cli.plan.hardware.__file__).with_name("hardware.json")
    pairs: list[str] = []
    json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda items: pairs.extend(k for k, _ in items))
    names = [key for key in pairs if key in accelerator_names()]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_a_usage_error_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="Did you mean h100-sxm-80gb") as caught:
        find_accelerator(spec_of(cluster__gpu="h100-sxm-80").cluster)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_table_describes_an_accelerator_of_ones_own() -> None:
    table = {
        "name": "mine",
        "memory": "48GB",
        "bf16_flops": 2e14,
        "fp32_flops": 5e13,
        "memory_bandwidth": "1TB/s",
        "intra_node_bandwidth": "32GB/s",
    }
    device = find_accelerator(spec_of(cluster__gpu=table).cluster)
    assert (device.name, device.memory_bytes, device.peak_flops("bf16")) == ("mine", 48 * 10**9, 2e14)
    assert device.peak_flops("fp8") == 5e13


def test_a_stated_bandwidth_replaces_the_catalogue() -> None:
    assert find_accelerator(spec_of(cluster__intra_node_bandwidth="7GB/s").cluster).intra_node_bandwidth == 7e9
