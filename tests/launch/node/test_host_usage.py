"""Node columns of the telemetry: counters of psutil, control groups of both versions, ports of InfiniBand."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scaletrain_cli.available_memory import available_bytes, used_bytes
from scaletrain_cli.launch.node.telemetry import HostSampler
from tests.waiting import Clock

CORES = len(os.sched_getaffinity(0))
MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n"


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def sampler(root: Path) -> tuple[HostSampler, Callable[[], dict[str, float]]]:
    """Return a sampler of ``root``, and a function that takes a sample two seconds after the one before."""
    clock = Clock()
    made = HostSampler(root, clock=clock)

    def sample() -> dict[str, float]:
        clock.now += 2.0
        return made.sample()

    return made, sample


def test_this_machine_has_the_columns_of_every_linux_machine() -> None:
    host = HostSampler()
    first = host.sample()
    found = host.sample()
    while not found.get("cpu_utilization"):  # until a tick of the kernel counts the work of this process
        found = host.sample()
    assert {"memory_used_bytes", "memory_available_bytes"} <= first.keys()
    assert 0.0 < found["cpu_utilization"] <= 1.0
    assert {"network_received_bytes_per_second", "network_sent_bytes_per_second"} <= found.keys()
    assert 0 < found["memory_used_bytes"] < psutil.virtual_memory().total
    assert "infiniband_errors" not in found


def test_a_quota_of_the_group_is_the_measure_of_cpu_use(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/jobs/7"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/7/step",
            f"{job}/step/cpu.max": "max 100000",
            f"{job}/cpu.max": "50000 100000",
            f"{job}/cpu.stat": "usage_usec 1000000\nnr_periods 100\nnr_throttled 10\nthrottled_usec 5",
            "proc/meminfo": MEMINFO,
        },
    )
    _, sample = sampler(tmp_path)
    assert not {"cpu_utilization", "cpu_throttled"} & sample().keys()
    write(tmp_path, {f"{job}/cpu.stat": "usage_usec 1800000\nnr_periods 120\nnr_throttled 15\nthrottled_usec 9"})
    found = sample()
    assert found["cpu_utilization"] == pytest.approx(0.8 / 2 / 0.5)
    assert found["cpu_throttled"] == 0.25


def test_a_quota_of_a_version_1_group(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/slurm/9\n2:cpuacct:/slurm/9\n1:cpu:/slurm/9",
            "sys/fs/cgroup/cpu/slurm/9/cpu.cfs_quota_us": 100000 * CORES * 4,
            "sys/fs/cgroup/cpu/slurm/9/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu/slurm/9/cpu.stat": "nr_periods 1\nnr_throttled 0\nthrottled_time 0",
            "sys/fs/cgroup/cpuacct/slurm/9/cpuacct.usage": 10**9,
        },
    )
    _, sample = sampler(tmp_path)
    sample()
    write(tmp_path, {"sys/fs/cgroup/cpuacct/slurm/9/cpuacct.usage": 2 * 10**9})
    assert sample()["cpu_utilization"] == pytest.approx(1 / 2 / CORES)


def test_without_a_quota_the_cores_of_this_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {core})
    times = [SimpleNamespace(idle=0.0) for _ in range(core)]

    class Times(tuple[float, ...]):
        idle, iowait, guest, guest_nice = (property(lambda self, at=at: self[at]) for at in range(1, 5))

    readings = iter([Times((10.0, 50.0, 5.0, 1.0, 0.0)), Times((13.0, 50.5, 5.5, 1.0, 0.0))])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [*times, next(readings)])
    _, sample = sampler(tmp_path)
    sample()
    found = sample()
    assert found["cpu_utilization"] == pytest.approx(3 / 4)
    assert "cpu_throttled" not in found


def test_memory_is_that_of_the_lowest_group_with_a_limit(tmp_path: Path) -> None:
    statistics = "active_file 100000\ninactive_file 20000\nslab_reclaimable 3000\nanon 5"
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step"})
    assert used_bytes(tmp_path) == 600 * 1024
    assert available_bytes(tmp_path) == 400 * 1024
    write(tmp_path, {"sys/fs/cgroup/job/step/memory.max": "max", "sys/fs/cgroup/job/step/memory.current": 7})
    assert used_bytes(tmp_path) == 600 * 1024
    group = {"memory.max": 500_000, "memory.current": 300_000, "memory.stat": statistics}
    write(tmp_path, {f"sys/fs/cgroup/job/{name}": value for name, value in group.items()})
    assert used_bytes(tmp_path) == 177_000
    assert available_bytes(tmp_path) == 323_000
    assert used_bytes(tmp_path / "nothing") is available_bytes(tmp_path / "nothing") is None
    write(tmp_path, {"proc/self/cgroup": "3:memory:/job"})
    write(
        tmp_path / "sys/fs/cgroup/memory/job",
        {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 5},
    )
    assert used_bytes(tmp_path) == 600 * 1024  # the largest number stands for no limit
    group = {"memory.limit_in_bytes": 200_000, "memory.usage_in_bytes": 50_000}
    group["memory.stat"] = "inactive_file 1\ntotal_inactive_file 10000"
    write(tmp_path, {f"sys/fs/cgroup/memory/job/{name}": value for name, value in group.items()})
    assert available_bytes(tmp_path) == 160_000


def test_a_bridge_and_a_bond_do_not_count_bytes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for card in ("eth0", "eth1"):
        (tmp_path / "sys/class/net" / card / "device").mkdir(parents=True)
    total = 0

    def counters(pernic: bool) -> dict[str, SimpleNamespace]:
        assert pernic
        return {name: SimpleNamespace(bytes_recv=total, bytes_sent=2 * total) for name in "lo eth0 eth1 bond0".split()}

    monkeypatch.setattr(psutil, "net_io_counters", counters)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    _, sample = sampler(tmp_path)
    sample()
    total = 1000
    found = sample()
    assert found["network_received_bytes_per_second"] == 2 * 1000 / 2
    assert found["network_sent_bytes_per_second"] == 2 * 2000 / 2
    assert not {name for name in found if name.startswith("disk")}
    total = 10  # counters of a card that was set up anew
    assert "network_received_bytes_per_second" not in sample()


def test_infiniband_ports_are_counted_in_bytes_and_errors_from_the_start(tmp_path: Path) -> None:
    def port(name: str, *, state: str, data: int, **errors: int) -> None:
        values = {"port_rcv_data": data, "port_xmit_data": 2 * data, **errors}
        folder = f"sys/class/infiniband/{name}/ports/1"
        write(
            tmp_path, {f"{folder}/state": state} | {f"{folder}/counters/{key}": value for key, value in values.items()}
        )

    _, sample = sampler(tmp_path)
    port("mlx5_0", state="1: DOWN", data=100, symbol_error=5)
    assert "infiniband_errors" not in sample()
    port("mlx5_1", state="4: ACTIVE", data=1000, symbol_error=5, link_downed=1)
    assert sample()["infiniband_errors"] == 0
    port("mlx5_1", state="1: DOWN", data=3000, symbol_error=7, link_downed=2, port_xmit_wait=99)
    found = sample()
    assert found["infiniband_errors"] == 3
    assert found["infiniband_received_bytes_per_second"] == 4 * 2000 / 2
    assert found["infiniband_sent_bytes_per_second"] == 4 * 4000 / 2
