"""What is made of nvidia-smi's XML. Its elements as drivers 470 to 580 name them; there is no GPU here to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaletrain_cli.launch.node.gpu_health import (
    NodeHealth,
    ask_driver,
    gpu_notes,
    gpu_problems,
    read_health,
    visible_gpus,
)

GB = 10**9


def gpu(index: int = 0, **changed: str) -> str:
    told = {
        "used": "4 MiB",
        "dram": "0",
        "sram": "0",
        "pending": "No",
        "failure": "No",
        "retirement": "N/A",
        "thermal": "Not Active",
        "processes": "",
        **changed,
    }
    return f"""<gpu id="00000000:{index:02x}:00.0">
      <product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-{index}aaaa-bbbb</uuid>
      <fb_memory_usage><total>81559 MiB</total><reserved>551 MiB</reserved><used>{told["used"]}</used></fb_memory_usage>
      <ecc_errors>
        <volatile><sram_correctable>3</sram_correctable>
          <sram_uncorrectable_parity>{told["sram"]}</sram_uncorrectable_parity>
          <sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
          <dram_correctable>7</dram_correctable><dram_uncorrectable>{told["dram"]}</dram_uncorrectable></volatile>
        <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
      <retired_pages><pending_retirement>{told["retirement"]}</pending_retirement></retired_pages>
      <remapped_rows><remapped_row_pending>{told["pending"]}</remapped_row_pending>
        <remapped_row_failure>{told["failure"]}</remapped_row_failure></remapped_rows>
      <clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
        <clocks_event_reason_hw_thermal_slowdown>{told["thermal"]}</clocks_event_reason_hw_thermal_slowdown>
      </clocks_event_reasons>
      <processes>{told["processes"]}</processes></gpu>"""


def health(*gpus: str) -> NodeHealth:
    return read_health(
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>'
        f"<driver_version>550.127.05</driver_version>{''.join(gpus)}</nvidia_smi_log>"
    )


def problems(*gpus: str, needed: int = 70 * GB) -> list[str]:
    found = health(*gpus)
    return list(gpu_problems(found, found.gpus, needed))


def test_healthy_gpus_are_no_problem() -> None:
    found = health(gpu(0), gpu(1))
    assert found.driver == "550.127.05"
    assert [(one.index, one.name, one.uncorrected_errors) for one in found.gpus] == [
        (0, "NVIDIA H100 80GB HBM3", 0),
        (1, "NVIDIA H100 80GB HBM3", 0),
    ]
    assert problems(gpu(0), gpu(1)) == []
    assert list(gpu_notes(found.gpus)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pending": "Yes"}, "GPU 1 has broken memory and waits for a reset"),
        ({"retirement": "Yes"}, "GPU 1 has broken memory and waits for a reset"),
        ({"failure": "Yes", "pending": "Yes"}, "GPU 1 has broken memory that its spare rows cannot replace"),
        (
            {"used": "40000 MiB", "processes": "<process_info/><process_info/>"},
            "GPU 1 has 43.6 GB free of 85.5 GB, the rest is in use by 2 processes; the plan needs 70.0 GB",
        ),
    ],
)
def test_each_thing_that_no_rank_should_meet_is_named_with_its_gpu(changed: dict[str, str], words: str) -> None:
    (told,) = problems(gpu(0), gpu(1, **changed))
    assert told.startswith(words)


def test_a_smaller_gpu_than_planned_is_named_for_what_it_is() -> None:
    assert problems(gpu(0), needed=100 * GB) == [
        "GPU 0 is a NVIDIA H100 80GB HBM3 with 85.5 GB; the plan needs 100.0 GB"
    ]


def test_clocks_that_are_held_down_are_a_note_under_the_older_name_too() -> None:
    for text in (gpu(thermal="Active"), gpu(thermal="Active").replace("clocks_event", "clocks_throttle")):
        assert list(gpu_notes(health(text).gpus)) == ["GPU 0 is held down by hw thermal slowdown"]


def test_errors_that_were_dealt_with_are_a_note() -> None:
    found = health(gpu(0), gpu(1, dram="2", sram="1"))
    assert list(gpu_problems(found, found.gpus, GB)) == []
    assert list(gpu_notes(found.gpus)) == ["GPU 1 has had 3 uncorrected ECC errors since its driver was loaded"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("1", [1]), ("2,0", [0, 2]), ("GPU-1aaaa", [1]), ("", []), ("-1", [])],
)
def test_only_the_gpus_that_the_job_has_count(visible: str | None, indices: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [one.index for one in visible_gpus(health(gpu(0), gpu(1), gpu(2)), environment)] == indices


def program(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_driver_that_is_broken_is_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", monkeypatch)
    found = ask_driver()
    assert found is not None
    (told,) = gpu_problems(found, found.gpus, 1)
    assert told == "nvidia-smi ended with 18: Failed to initialize NVML: Driver/library version mismatch"
    program(tmp_path, "echo Segmentation fault", monkeypatch)
    found = ask_driver()
    assert found is not None
    assert "something else than XML" in found.trouble


def test_a_node_without_nvidia_smi_has_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_driver() is None


def test_a_warning_beside_what_it_says_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xml = tmp_path / "said.xml"
    xml.write_text(f"<nvidia_smi_log>{gpu(0)}</nvidia_smi_log>")
    program(tmp_path, f"cat {xml}; exit 14", monkeypatch)
    found = ask_driver()
    assert found is not None
    assert (len(found.gpus), found.trouble) == (1, "")
