import json
from pathlib import Path

import pytest

import scaletrain_cli.plan.catalogue.hardware
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.plan import accelerator_names, find_accelerator
from tests.plan.specs import spec_of


@pytest.mark.parametrize("name", accelerator_names())
def test_every_accelerator_has_plausible_sourced_figures(name: str) -> None:
    device = find_accelerator(spec_of(cluster__gpu=name).cluster)
    assert device.source
    assert device.flops["fp32"] <= max(device.flops.values())
    assert device.network
    if not device.is_cpu:
        assert device.compute_capability
        assert 20 <= device.multiprocessors <= 304
        assert 15e9 < device.host_bandwidth <= 450e9
        assert 10e9 < device.memory_bytes < 310e9
        assert 100e9 < device.memory_bandwidth < 10e12
        size = int(name.rsplit("-", 1)[1].removesuffix("gb")) * 1e9
        assert 0.94 * size < device.memory_bytes < 1.075 * size  # vendors' GB are partly GiB
        assert 3 <= device.host_cores <= 72
        assert 15e9 < device.host_memory_bandwidth < 400e9


def test_a_device_has_only_the_precisions_of_its_units() -> None:
    """bf16 and tf32 came with Ampere, fp8 with Ada and Hopper (CUDA C++ Programming Guide, compute capabilities)."""
    devices = {name: find_accelerator(spec_of(cluster__gpu=name).cluster) for name in accelerator_names()}
    with_cuda = {name: device for name, device in devices.items() if device.cuda_capability}
    assert len(with_cuda) > 10
    for name, device in with_cuda.items():
        capability = device.cuda_capability
        assert ("bf16" in device.flops) == ("tf32" in device.flops) == (capability >= 8.0), name
        assert ("fp8" in device.flops) == (capability >= 8.9), name


def test_old_devices_and_fp32_have_no_fused_attention_with_grouped_queries() -> None:
    old, new = (find_accelerator(spec_of(cluster__gpu=name).cluster) for name in ("v100-sxm2-32gb", "a100-sxm-80gb"))
    assert new.fuses_attention("bf16", 128, grouped=True)
    assert not old.fuses_attention("fp16", 128, grouped=True)
    assert old.fuses_attention("fp16", 128, grouped=False)
    assert [new.fuses_attention("fp32", 128, grouped=grouped) for grouped in (True, False)] == [False, True]


def test_common_names_of_gpus_are_known() -> None:
    known = accelerator_names()
    families = (
        "v100-sxm2 v100-pcie a100-sxm a100-pcie h100-sxm h100-pcie h100-nvl h20 h200 b200 b300 gb200 gb300 l4 l40s a10g"
    )
    also = "a6000 t4 rtx-3090 rtx-4090 rtx-5090 rtx-pro-6000 mi300x mi325x mi350x mi355x cpu"
    for family in (*families.split(), *also.split()):
        assert any(name.startswith(family) for name in known), family


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("L4", "l4-24gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("RTX A6000", "a6000-48gb"),
        ("h100-pcie", "h100-pcie-80gb"),
        ("NVIDIA H200 NVL", "h200-nvl-141gb"),
        ("h100-sxm5-80gb", "h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090-32gb"),
        ("NVIDIA RTX PRO 6000", "rtx-pro-6000-96gb"),
        ("H20", "h20-96gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
    ],
)
def test_parts_of_a_name_that_fit_no_other_are_enough(given: str, meant: str) -> None:
    assert find_accelerator(spec_of(cluster__gpu=given).cluster).name == meant


def test_a_name_of_several_devices_is_refused_with_all_of_them() -> None:
    with pytest.raises(UsageError, match="Did you mean a100-sxm-80gb or a100-pcie-80gb") as caught:
        find_accelerator(spec_of(cluster__gpu="a100-80gb").cluster)
    assert [problem.reason and problem.reason.code for problem in caught.value.problems] == ["plan.ambiguous-device"]


def test_the_data_file_is_json_without_repeated_names() -> None:
    path = Path(scaletrain_cli.plan.catalogue.hardware.__file__).with_name("hardware.json")
    pairs: list[str] = []
    json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda items: pairs.extend(k for k, _ in items))
    names = [key for key in pairs if key in accelerator_names()]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_a_usage_error_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="Did you mean h100-sxm-80gb") as caught:
        find_accelerator(spec_of(cluster__gpu="h100-sxm-80").cluster)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_table_describes_an_accelerator_that_the_catalogue_lacks() -> None:
    table = {
        **{"name": "mine", "memory": "48GB", "bf16_flops": 2e14, "fp32_flops": 5e13, "memory_bandwidth": "1TB/s"},
        "intra_node_bandwidth": "32GB/s",
    }
    device = find_accelerator(spec_of(cluster__gpu=table).cluster)
    assert (device.name, device.memory_bytes, device.peak_flops("bf16")) == ("mine", 48 * 10**9, 2e14)
    assert device.peak_flops("fp8") == 5e13
    assert device.host_bandwidth == 31.5e9
    more = find_accelerator(spec_of(cluster__gpu=table | {"fp8_flops": 4e14, "host_bandwidth": "64GB/s"}).cluster)
    assert (more.peak_flops("fp8"), more.host_bandwidth) == (4e14, 64e9)


def test_a_stated_bandwidth_replaces_the_catalogue() -> None:
    assert find_accelerator(spec_of(cluster__intra_node_bandwidth="7GB/s").cluster).intra_node_bandwidth == 7e9
    assert find_accelerator(spec_of(cluster__host_bandwidth="7GB/s").cluster).host_bandwidth == 7e9


def test_a_part_of_a_gpu_is_planned_with_its_own_memory_and_rates() -> None:
    """1g.10gb of an A100: 14 of its 108 multiprocessors and 9,728 MiB (NVIDIA's Multi-Instance GPU User Guide)."""
    slurm = {"cluster__scheduler": "slurm", "cluster__gpus_per_node": 1, "cluster__gpu": "a100-sxm-80gb"}
    whole = find_accelerator(spec_of(**slurm).cluster)
    for kind in ("1g.10gb", "nvidia_a100_80gb_1g.10gb"):
        cluster = spec_of(**slurm, cluster__slurm={"gres_type": kind}).cluster
        part = find_accelerator(cluster)
        assert part.memory_bytes == pytest.approx(9728 * 2**20, rel=1e-3)
        assert part.multiprocessors == 14
        assert part.flops["bf16"] == whole.flops["bf16"] / 8
        assert part.memory_bandwidth == pytest.approx(whole.memory_bandwidth / 8, rel=0.05)
    assert find_accelerator(spec_of(**slurm, cluster__slurm={"gres_type": "a100"}).cluster) == whole
