"""GPU health from NVML, with a fake of the module pynvml, because there is no GPU here.

Not shown: that a driver reports these figures as NVIDIA documents them. One test holds the fake to the real module.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.node import gpu_health
from scaletrain_cli.launch.node.gpu_health import (
    NodeHealth,
    gpu_notes,
    gpu_problems,
    gpus_of_ranks,
    query_driver,
    read_driver,
)

pytestmark = pytest.mark.process  # the driver is read in a process of its own
GB = 10**9
FAKE = Path(__file__).parent / "fake_nvml"


def fake_nvml() -> Any:
    spec = importlib.util.spec_from_file_location("fake_pynvml", FAKE / "pynvml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def health(*gpus: dict[str, Any], **state: Any) -> NodeHealth:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NVML", json.dumps({"gpus": gpus, **state}))
        found = read_driver(fake_nvml())
    assert found is not None
    return found


def problems(*gpus: dict[str, Any], needed: int = 70 * GB) -> list[str]:
    found = health(*gpus)
    return list(map(str, gpu_problems(found, found.gpus, needed)))


def test_healthy_gpus_are_no_problem() -> None:
    found = health({}, {})
    assert found.driver == "550.127.05"
    assert [(one.index, one.name, one.uncorrected_errors) for one in found.gpus] == [
        (0, "NVIDIA H100 80GB HBM3", 0),
        (1, "NVIDIA H100 80GB HBM3", 0),
    ]
    assert problems({}, {}) == []
    assert list(gpu_notes(found.gpus)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": [0, 1, 1, 0]}, "GPU 1 has broken memory and needs a reset"),
        ({"rows": None, "pages": 1}, "GPU 1 has broken memory and needs a reset"),
        ({"rows": [0, 1, 1, 1]}, "GPU 1 has broken memory that its spare rows cannot replace"),
        (
            {"used": 40000 << 20, "processes": 2},
            "GPU 1 has 43.6 GB free of 85.5 GB, and 2 processes use it; the plan needs 70.0 GB",
        ),
        ({"lost": True}, "GPU 1 cannot be read: GPU is lost"),
    ],
)
def test_each_fault_that_rejects_a_node_is_reported_with_its_gpu(changed: dict[str, Any], words: str) -> None:
    (problem,) = problems({}, changed)
    assert problem.startswith(words)


def test_a_smaller_gpu_than_planned_is_reported_with_its_name() -> None:
    assert problems({}, needed=100 * GB) == ["GPU 0 is a NVIDIA H100 80GB HBM3 with 85.5 GB; the plan needs 100 GB"]


def test_clocks_that_are_held_down_are_a_note() -> None:
    assert list(map(str, gpu_notes(health({"reasons": 0x41}, {"reasons": 0x80}).gpus))) == [
        "the clocks of GPU 0 are held down by overheating",
        "the clocks of GPU 1 are held down by the power supply",
    ]


def test_uncorrected_errors_are_a_note() -> None:
    found = health({}, {"ecc": 3})
    assert list(gpu_problems(found, found.gpus, GB)) == []
    assert [*map(str, gpu_notes(found.gpus))] == ["GPU 1 has had 3 uncorrected ECC errors since its driver was loaded"]


def test_a_value_that_a_gpu_does_not_report_is_none_and_not_zero() -> None:
    nothing = dict.fromkeys(("total", "used", "ecc", "rows", "pages", "processes", "name", "reasons"))
    (gpu,) = health(nothing).gpus
    assert (gpu.memory_bytes, gpu.used_bytes, gpu.uncorrected_errors) == (None, None, None)
    assert (gpu.waits_for_reset, gpu.beyond_repair, gpu.processes, gpu.held_down_by) == (None, None, None, ())
    assert problems(nothing) == []


@pytest.mark.parametrize(
    ("visible", "indices"), [(None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("GPU-1aaaa", [1]), ("", []), ("-1", [])]
)
def test_only_the_gpus_that_the_job_has_count(visible: str | None, indices: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [one.index for one in gpus_of_ranks(health({}, {}, {}), environment, 3)] == indices


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace pynvml by the fake, also in the process that reads the driver."""

    def report(**state: Any) -> NodeHealth | None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("FAKE_NVML", json.dumps(state))
        monkeypatch.setattr(gpu_health.importlib.util, "find_spec", lambda name: object())
        return query_driver()

    return report


def test_values_of_the_driver_are_returned_by_the_process_that_reads_them(fake_driver: Any) -> None:
    state = {"gpus": [{"reasons": 0x40}, {"ecc": None}]}
    assert fake_driver(**state) == health(*state["gpus"])


def test_a_driver_that_is_broken_is_the_problem(fake_driver: Any) -> None:
    found = fake_driver(init_error=18, gpus=[])
    (problem,) = gpu_problems(found, found.gpus, 1)
    assert str(problem) == "the driver cannot be used: Driver/library version mismatch"


def test_a_node_without_a_driver_library_reports_nothing(fake_driver: Any) -> None:
    assert fake_driver(init_error=12, gpus=[]) is None


def test_a_node_without_nvidia_ml_py_reports_a_note_and_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_health.importlib.util, "find_spec", lambda name: None)
    found = query_driver()
    assert "nvidia-ml-py is not installed" in found.note
    assert list(gpu_problems(found, found.gpus, 1)) == []


def test_the_fake_has_only_what_the_real_module_has_with_the_same_values() -> None:
    real = pytest.importorskip("pynvml")
    fake = fake_nvml()
    for name in (name for name in vars(fake) if name.lower().startswith("nvml")):
        assert hasattr(real, name), name
        if isinstance(getattr(fake, name), int) and name != "nvmlMemory_v2":
            assert getattr(real, name) == getattr(fake, name), name
