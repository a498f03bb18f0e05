"""The section on accelerators of docs/extending.md, as a reader would follow it."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.plan import find_accelerator, make_plan
from scaletrain_cli.plan.catalogue import hardware
from scaletrain_cli.plan.speed.kernels import rates
from tests.cli.command_line import scaletrain
from tests.extending.pages import write_files
from tests.plan.specs import spec_of

HEADING = "An accelerator"


def test_a_described_accelerator_is_planned_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_files("extending.md", HEADING, tmp_path)
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(written["clusters.yaml"]))
    plan = scaletrain("plan", written["run.yaml"], "--cluster", "lab", "--json").data
    assert plan["layout"]["world_size"] == 16
    assert plan["memory"]["capacity"] == 96 * 10**9
    assert plan["feasible"]
    assert any("example-x1-96gb" in line for line in plan["assumptions"])
    assert plan["cost"]["price_per_gpu_hour"] == 2.10


def test_a_row_of_the_catalogue_is_an_accelerator_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.loads(write_files("extending.md", HEADING, tmp_path)["hardware-row.json"].read_text(encoding="utf-8"))
    whole = {**hardware._catalogue(), **row}
    monkeypatch.setattr(hardware, "_catalogue", lambda: whole)
    (name,) = row
    spec = spec_of("llama-7b", cluster__gpu=name)
    device = find_accelerator(spec.cluster)
    assert rates(device, "bf16").matmul > 0
    assert make_plan(spec).memory.capacity == row[name]["memory_bytes"]
