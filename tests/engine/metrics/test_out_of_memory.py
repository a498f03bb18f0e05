import json
import pickle
from pathlib import Path

import pytest
import torch

from scaletrain_cli.engine.metrics import out_of_memory
from scaletrain_cli.engine.metrics.out_of_memory import reporting_out_of_memory
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir
from tests.plan.specs import spec_of


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_plan(spec_of("gpt2", layout__pipeline_parallel=2, layout__tensor_parallel=1))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.new_attempt()
    return found


def report(run: RunDir, rank: int) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((run.attempt(1) / "memory" / f"rank-{rank:05d}.json").read_text())
    return loaded


def test_a_host_out_of_memory_is_reported_with_the_plan_of_its_stage(run: RunDir, plan: RunPlan) -> None:
    outer = reporting_out_of_memory(run, plan, 1, 7)
    with pytest.raises(MemoryError) as caught, outer, reporting_out_of_memory(run, plan, 1, 7):
        raise MemoryError
    found = report(run, 7)
    assert found["stage"] == 1
    assert found["planned"]["peak"] == plan.memory.by_stage[1].peak  # type: ignore[index]
    assert found["held"]["peak_resident"] > 10**7  # type: ignore[index]
    assert found["snapshot"] is None
    (note,) = caught.value.__notes__
    assert "attempts/0001/memory/rank-00007.json" in note
    assert f"{plan.memory.by_stage[1].peak / 1e9:.2f} GB" in note


def test_only_the_first_gpu_writes_a_snapshot(run: RunDir, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    held = dict.fromkeys(("allocated", "reserved", "peak_allocated", "peak_reserved"), 3 * 10**9)
    monkeypatch.setattr(out_of_memory, "_gpu_bytes", lambda: held)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    for rank in (1, 0):
        with pytest.raises(torch.OutOfMemoryError, match="tried"), reporting_out_of_memory(run, plan, 1, rank):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert [report(run, rank)["snapshot"] for rank in (0, 1)] == [None, "snapshot.pickle"]
    assert report(run, 1)["held"] == held
    assert pickle.loads((run.attempt(1) / "memory" / "snapshot.pickle").read_bytes()) == {"segments": []}


def test_other_errors_write_no_memory_report(run: RunDir, plan: RunPlan) -> None:
    with pytest.raises(ValueError, match="something else") as caught, reporting_out_of_memory(run, plan, 1, 0):
        raise ValueError("something else")
    assert not hasattr(caught.value, "__notes__")
    assert not (run.attempt(1) / "memory").exists()


def test_a_report_that_cannot_be_written_hides_no_error(run: RunDir, plan: RunPlan) -> None:
    (run.attempt(1) / "memory").write_text("in the way")
    with pytest.raises(MemoryError) as caught, reporting_out_of_memory(run, plan, 1, 0):
        raise MemoryError
    assert not hasattr(caught.value, "__notes__")
