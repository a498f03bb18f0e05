"""From a row of measurements to a prediction and a score: the planner's inputs, and rows that cannot be used."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from planner_truth import bigscience, fsdp_runs, megatron_ci, mlperf, nanotron, train_runs, vtrain
from planner_truth.evaluation import judge, score
from planner_truth.mapping import Unmapped
from planner_truth.sets import SETS
from planner_truth.table import Table

TABLES = [nanotron.TABLE, vtrain.TABLE, train_runs.TABLE, megatron_ci.TABLE, mlperf.TABLE]
MEASURED = "time mem oom tokens_per_s tflops mfu hfu throughput status raw_json _last _first iter_ samples_s".split()
GIVEN = {  # one row of the layout sweep
    "row_id": "a",
    "model": "1B",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "tie_embeddings": "1",
    "seq_len": "4096",
    "gpu": "H100",
    "gpus_per_node": "8",
    "n_nodes": "1",
    "n_gpus": "8",
    "mbs": "1",
    "gbs_samples": "256",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage": "1",
    "status": "ok",
    "mfu_pct": "40.0",
    "gpu_memory_gb": "24.0",
    "step_time_s": "3.2",
}


def write(directory: Path, file: str, *rows: dict[str, str]) -> Path:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (directory / file).open("w", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, columns)
        writer.writeheader()
        writer.writerows(rows)
    return directory


def set_named(name: str):  # type: ignore[no-untyped-def]
    return next(chosen for chosen in SETS if chosen.name == name)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.file)
def test_no_measured_column_is_an_input(table: Table) -> None:
    assert not table.input_columns & table.truth_columns
    suspicious = {column for column in table.input_columns if any(word in column for word in MEASURED)}
    assert suspicious <= {"gpu_mem_gb"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.file)
def test_the_mapping_receives_only_the_inputs(table: Table, tmp_path: Path) -> None:
    write(tmp_path, table.file, dict.fromkeys(sorted(table.input_columns | table.truth_columns), "1"))
    (row,) = table.read(tmp_path)
    assert set(row.inputs) == table.input_columns
    assert set(row.truth) == table.truth_columns


def test_results_in_notes_are_removed(tmp_path: Path) -> None:
    note = {"row_id": "a", "notes": "A100 > 3D Topology | 31GB, 12.5 s, OOM; Tokens/sec (total): 1650 [arch from x]"}
    (row,) = train_runs.TABLE.read(write(tmp_path, train_runs.TABLE.file, note))
    assert row.inputs["notes"] == "A100 > 3D Topology | , , ; [arch from x]"


def test_a_column_cannot_be_both_input_and_measurement() -> None:
    with pytest.raises(ValueError, match="input and measured at once"):
        dataclasses.replace(nanotron.TABLE, truth_columns=nanotron.TABLE.truth_columns | {"mbs"})


def test_the_prediction_does_not_depend_on_what_was_measured(tmp_path: Path) -> None:
    other = GIVEN | {"row_id": "b", "gpu_memory_gb": "70", "step_time_s": "9", "mfu_pct": "1", "status": "ok"}
    first, second = judge(nanotron.TABLE, write(tmp_path, nanotron.TABLE.file, GIVEN, other)).rows
    assert (first.step_seconds, first.memory) == (second.step_seconds, second.memory)
    assert first.measured != second.measured


def test_the_layout_is_the_measured_one(tmp_path: Path) -> None:
    (row,) = judge(nanotron.TABLE, write(tmp_path, nanotron.TABLE.file, GIVEN)).rows
    layout = row.case.layout
    assert (layout.data_parallel, layout.zero_stage, layout.micro_batch_size) == (8, 1, 1)
    assert layout.gradient_accumulation_steps == 32
    assert row.case.spec.planner.framework == "nanotron"


def test_rows_that_cannot_be_mapped_are_counted_with_their_reason(tmp_path: Path) -> None:
    bad = [GIVEN | change for change in ({"gpu": "TPU"}, {"dp": "3"}, {"layers": ""}, {"hidden": "many"}, {"mbs": "0"})]
    outcome = judge(nanotron.TABLE, write(tmp_path, nanotron.TABLE.file, GIVEN, *bad))
    assert len(outcome.rows) == 1
    assert sum(outcome.skipped.values()) == len(bad)
    assert "no layers" in outcome.skipped
    assert "hidden is not a number" in outcome.skipped


def test_a_crashed_run_counts_as_not_fitting_and_not_in_the_errors(tmp_path: Path) -> None:
    crashed = GIVEN | {"row_id": "b", "mbs": "32", "status": "crashed_or_oom"}
    crashed |= dict.fromkeys(("mfu_pct", "gpu_memory_gb", "step_time_s"), "")
    outcome = judge(nanotron.TABLE, write(tmp_path, nanotron.TABLE.file, GIVEN, crashed))
    assert score(set_named("nanotron-fits"), outcome).verdicts.n == 2
    assert score(set_named("nanotron-memory"), outcome).errors.n == 1
    assert score(set_named("nanotron-time"), outcome).errors.n == 1


def test_a_layout_that_the_planner_refuses_counts_as_one_that_does_not_run(tmp_path: Path) -> None:
    deep = GIVEN | {
        "dp": "1",
        "pp": "32",
        "n_gpus": "32",
        "n_nodes": "4",
        "status": "crashed_or_oom",
        "step_time_s": "",
    }
    outcome = judge(nanotron.TABLE, write(tmp_path, nanotron.TABLE.file, deep))
    found = score(set_named("nanotron-fits"), outcome).verdicts
    assert (found.n, found.accuracy) == (1, 1.0)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    outcome = judge(nanotron.TABLE, tmp_path)
    assert outcome.missing
    assert score(set_named("nanotron-memory"), outcome).errors is None


def test_megatron_defaults_fill_what_a_test_leaves_out(tmp_path: Path) -> None:
    arguments = {"num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024, "bf16": True}
    arguments |= {"micro-batch-size": 4, "global-batch-size": 32, "tensor-model-parallel-size": 4}
    row = {"family": "gpt", "case": "x", "gpu": "a100", "n_gpus": "", "test_type": "regular"}
    row["model_args_json"] = json.dumps(arguments)
    (judged,) = judge(megatron_ci.TABLE, write(tmp_path, megatron_ci.TABLE.file, row)).rows
    model, layout = judged.case.spec.transformer, judged.case.layout
    assert (model.vocab_size, model.intermediate_size, model.hidden_dropout) == (50688, 2048, 0.1)
    assert (layout.data_parallel, layout.tensor_parallel, layout.zero_stage) == (2, 4, 0)


def test_bigscience_layers_follow_the_pipeline() -> None:
    assert [bigscience._layers(size, 14400, stages) for size, stages in (("194B", 6), ("183B", 12))] == [78, 72]
    with pytest.raises(Unmapped):
        bigscience._layers("large", 14400, 6)


def test_the_local_batch_of_torchtitan_is_cut_by_a_pipeline_into_single_sequences() -> None:
    row = {"model": "Llama3.1-8B", "gpu": "H100 (96GB HBM2e, 500W)", "n_gpus": "64", "gbs_samples": "128", "mbs": "16"}
    row |= {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
    row |= {"seq_len": "8192", "tp": "1", "precision": "bf16", "notes": "", "act_recompute": "full", "compile": "1"}
    piped = fsdp_runs.build_titan(row | {"dp": "8", "pp": "8"}).layout
    assert (piped.micro_batch_size, piped.gradient_accumulation_steps) == (1, 16)
    flat = fsdp_runs.build_titan(row | {"dp": "64", "pp": "1", "mbs": "2"}).layout
    assert (flat.micro_batch_size, flat.gradient_accumulation_steps) == (2, 1)


def test_the_script_prints_its_usage_and_exits_with_0(monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import planner_accuracy

    monkeypatch.delenv(planner_accuracy.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py"])
    assert planner_accuracy.main() == 0
    assert "make bench-planner TRUTH=DIR" in capsys.readouterr().out


def test_the_script_prints_json_for_a_directory_with_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import planner_accuracy

    write(tmp_path, nanotron.TABLE.file, GIVEN)
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py", "--truth", str(tmp_path), "--json"])
    assert planner_accuracy.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sets"]["nanotron-memory"]["n"] == 1
    assert found["files"]["train_runs.csv"]["missing"]
