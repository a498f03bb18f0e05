"""The causes of the time of profiled steps, from traces whose answers are known, and from one of torch.profiler."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from scaletrain_cli.engine.metrics import trace
from scaletrain_cli.engine.metrics.trace import (
    END,
    STEP,
    UPDATE,
    intersected,
    read_trace,
    subtracted,
    summarize,
    total,
    united,
    write_rank,
)
from scaletrain_cli.rundir.profiles import Profile, rank_file, summary_of, write_profile

Event = dict[str, Any]


def of_host(name: str, start: float, end: float, thread: int = 1, category: str = "cpu_op") -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": {}}


def mark(name: str, start: float, end: float) -> Event:
    return of_host(name, start, end, category="user_annotation")


def kernel(name: str, start: float, end: float, launched: float, kind: str = "kernel", **about: str) -> list[Event]:
    number = int(1000 * start)
    ran = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": 7}
    launch = of_host("cudaLaunchKernel", launched, launched + 1, category="cuda_runtime")
    return [ran | {"args": {"correlation": number, **about}}, launch | {"args": {"correlation": number}}]


ON_GPU: list[Event] = [
    mark(STEP, 0, 100),
    mark(STEP, 110, 200),
    mark(END, 220, 221),
    mark("scaletrain.data", 0, 10),
    mark("scaletrain.update", 70, 80),
    *kernel("gemm", 10, 40, launched=5),
    *kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 30, 60, launched=12),
    *kernel("Memcpy HtoD (Pinned -> Device)", 60, 65, launched=20, kind="gpu_memcpy"),
    *kernel("gemm", 65, 80, launched=25),
    *kernel("multi_tensor_apply", 90, 100, launched=75),
    *kernel("hipblaslt_gemm", 120, 150, launched=115),
    *kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 150, 170, launched=116, **{"Collective name": "send"}),
    *kernel("gemm", 180, 215, launched=117),
]


@pytest.mark.parametrize("pipelined", [True, False])
def test_each_moment_of_a_gpu_counts_once(pipelined: bool) -> None:
    found = summarize(ON_GPU, pipelined=pipelined)
    sends = {"bubble": 20.0, "exposed_communication": 20.0} if pipelined else {"exposed_communication": 40.0}
    expected = dict.fromkeys(found["causes"], 0.0) | {
        "compute": 110.0,
        "optimizer": 10.0,
        "copies": 5.0,
        "data_wait": 10.0,  # without kernels
        "between_steps": 15.0,  # 100 to 110, and from the last kernel to the end
        "host": 10.0,  # 110 to 120: the next kernel was launched at 115
        "idle": 20.0,  # 80 to 90 and 170 to 180: the next kernels had been launched
        **sends,
    }
    assert {name: pytest.approx(2e6 * seconds) for name, seconds in found["causes"].items()} == expected
    assert found["step_seconds"] == pytest.approx(110e-6)
    assert found["communication_seconds"] == pytest.approx(25e-6)
    assert found["overlap"] == pytest.approx(10 / 50)
    assert found["device"] == "gpu"
    assert found["top_kernels"][0] == {"name": "gemm", "seconds": pytest.approx(40e-6), "count": 1.5, "kind": "compute"}


def test_long_names_of_kernels_are_cut() -> None:
    found = summarize([mark(STEP, 0, 100), *kernel("gemm" * 100, 10, 40, launched=5)])
    assert found["top_kernels"][0]["name"] == "gemm" * 50


def test_an_all_to_all_is_no_bubble_although_its_kernel_sends_and_receives() -> None:
    exchange = kernel("ncclDevKernel_SendRecv", 10, 40, launched=5, **{"Collective name": "all_to_allv"})
    found = summarize([mark(STEP, 0, 100), *exchange], pipelined=True)
    assert found["causes"]["exposed_communication"] == pytest.approx(30e-6)
    assert found["causes"]["bubble"] == 0


ON_CPU: list[Event] = [
    mark(STEP, 0, 100),
    mark(END, 100, 100),
    of_host("aten::linear", 0, 30),
    of_host("aten::addmm", 5, 25),
    of_host("MyFunctionBackward", 30, 70),  # Python code that waits for a collective
    of_host("c10d::allreduce_", 32, 34),
    of_host("aten::mul", 60, 68),
    mark(UPDATE, 70, 90),
    mark("scaletrain.data", 90, 95),
    *(
        of_host(name, *times, thread=2, category="user_annotation")
        for name, times in (("gloo:all_reduce", (20, 24)), ("gloo:all_reduce", (33, 60)), ("gloo:all_gather", (75, 80)))
    ),
    of_host("aten::copy_", 0, 100, thread=3),  # of the thread that reads data
]


def test_each_moment_of_a_cpu_rank_counts_once() -> None:
    found = summarize(ON_CPU)
    expected = {"compute": 38.0, "optimizer": 15.0, "exposed_communication": 33.0, "data_wait": 5.0, "host": 9.0}
    assert {name: pytest.approx(1e6 * seconds) for name, seconds in found["causes"].items() if seconds} == expected
    assert found["overlap"] == pytest.approx(4 / 37)
    own = {row["name"]: row["seconds"] * 1e6 for row in found["top_operators"]}
    assert own["aten::linear"] == pytest.approx(10)
    assert own["MyFunctionBackward"] == pytest.approx(30)


def test_the_allocations_at_the_peak_are_named() -> None:
    def allocation(time: float, address: int, size: int) -> Event:
        about = {"Bytes": size, "Addr": address, "Device Type": 0, "Total Allocated": 0}
        return {"ph": "i", "name": "[memory]", "ts": time, "tid": 1, "args": about}

    times = [(1, 10, 100), (6, 11, 50), (40, 11, -50), (62, 12, 200), (63, 99, -1000), (64, 12, -200), (80, 13, 40)]
    found = summarize([*ON_CPU, *(allocation(*each) for each in times)])["memory"]
    assert found["peak_bytes"] == 300
    rows = [("MyFunctionBackward", 200, 1), ("aten::linear", 100, 1)]
    assert [tuple(row.values()) for row in found["top"]] == rows


def test_unions_agree_with_sets_of_points() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        pairs = [
            [tuple(sorted(pair)) for pair in torch.randint(0, 60, (8, 2), generator=generator).tolist()] for _ in "ab"
        ]
        one, two = (united(each) for each in pairs)
        points = [{at for start, end in each for at in range(start, end)} for each in pairs]
        assert total(one) == len(points[0])
        assert total(intersected(one, two)) == len(points[0] & points[1])
        assert total(subtracted(one, two)) == len(points[0] - points[1])


def test_operators_take_the_time_that_torch_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(STEP):
        model(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    monkeypatch.setattr(trace, "_CHUNK", 100)
    events = list(read_trace(io.StringIO(text)))
    assert events == json.loads(text)["traceEvents"]
    found = summarize(events)
    theirs = {one.key: one for one in recorded.key_averages()}
    assert len(found["top_operators"]) > 10
    for row in found["top_operators"]:
        assert row["count"] >= theirs[row["name"]].count  # torch counts aten::sum within aten::sum once
        assert 1e6 * row["seconds"] == pytest.approx(theirs[row["name"]].self_cpu_time_total, abs=0.1)
    counts = {row["name"]: row["count"] for row in found["top_operators"]}
    assert counts["aten::addmm"] == theirs["aten::addmm"].count == 2
    updated = sum(one.cpu_time_total for name, one in theirs.items() if name.startswith("Optimizer.step"))
    assert 1e6 * found["causes"]["optimizer"] == pytest.approx(updated, abs=0.1)

    cut = text[: len(text) // 2]
    with pytest.raises(ValueError, match="ends within an event"):
        list(read_trace(io.StringIO(cut)))
    with pytest.raises(ValueError, match="no steps"):
        summarize([])


def test_the_files_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {"step": 1e-4, "compute": 1e-4}
    write_profile(tmp_path, Profile("a", 1, "recorded", 5, 1, [0, 3], "cpu", planned))
    for rank, events in ((0, ON_CPU), (3, [])):
        raw = tmp_path / "raw.json"
        raw.write_text(json.dumps({"traceEvents": events}))
        write_rank(raw, tmp_path, rank, pipelined=False)
        assert not raw.exists()
        if rank == 0:
            summary = summary_of(tmp_path)
            assert summary["ranks_missing"] == [3]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks_missing"] == []
    assert summary["planned"] == planned
    whole = {"median": pytest.approx(1e-4), "lowest": pytest.approx(1e-4), "highest": pytest.approx(1e-4)}
    assert summary["measured"]["step"] == whole
    assert summary["by_rank"][1]["error"] == "ValueError: the trace has no steps"
    assert rank_file(tmp_path, 0, ".trace.json.gz").exists()

    monkeypatch.setattr("scaletrain_cli.engine.metrics.trace.MOST_TRACE_BYTES", 10)
    raw.write_text(json.dumps({"traceEvents": ON_CPU}))
    write_rank(raw, tmp_path, 0, pipelined=False)
    kept = json.loads(rank_file(tmp_path, 0).read_text())
    assert kept["trace"]["file"] is None
    assert kept["causes"]["compute"] == pytest.approx(38e-6)
    assert not rank_file(tmp_path, 0, ".trace.json.gz").exists()
