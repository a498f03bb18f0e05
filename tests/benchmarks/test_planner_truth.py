import csv
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from planner_truth import (
    bigscience,
    deepspeed_runs,
    fsdp_runs,
    left_out,
    megatron_ci,
    mlperf,
    nanotron,
    train_runs,
    vision,
    vtrain,
)
from planner_truth.evaluation import judge, score
from planner_truth.mapping import Unmapped
from planner_truth.sets import SETS
from planner_truth.table import Table

from scaletrain_cli.plan.architecture import parameter_count
from scaletrain_cli.plan.catalogue.hardware import find_accelerator, rank_cores
from scaletrain_cli.plan.ranges import regime_of
from scaletrain_cli.plan.speed.offload import host_update_seconds

TABLES = [nanotron.TABLE, vtrain.TABLE, train_runs.TABLE, megatron_ci.TABLE, mlperf.TABLE, deepspeed_runs.TABLE]
MEASURED = "time mem oom tokens_per_s tflops mfu hfu throughput status raw_json _last _first iter_ samples_s".split()


def fields(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


# One row of the layout sweep.
GIVEN = fields(
    "row_id=a model=1B layers=16 hidden=2048 heads=32 kv_heads=32 ffn=8192 vocab=131072 tie_embeddings=1 "
    "seq_len=4096 gpu=H100 gpus_per_node=8 n_nodes=1 n_gpus=8 mbs=1 gbs_samples=256 dp=8 tp=1 pp=1 zero_stage=1 "
    "status=ok mfu_pct=40.0 gpu_memory_gb=24.0 step_time_s=3.2"
)


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
        **{"dp": "1", "pp": "32", "n_gpus": "32", "n_nodes": "4", "status": "crashed_or_oom", "step_time_s": ""}
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


def test_the_runs_of_openclip_are_a_part_of_the_project_and_decode_images_on_six_cores_each(tmp_path: Path) -> None:
    outcome = judge(vision.OPENCLIP, tmp_path)
    assert (len(outcome.rows), outcome.skipped) == (29, {})
    assert {regime_of(row.case.spec, row.case.layout) for row in outcome.rows} == {"decoded images"}
    assert {rank_cores(row.case.spec) for row in outcome.rows} == {6}
    small, large = (next(row for row in outcome.rows if row.row.inputs["arch"] == arch) for arch in ("B/32", "g/14"))
    assert small.time.data_wait > 0
    assert large.time.data_wait == 0


def test_a_pipeline_of_torchtitan_cuts_its_local_batch_into_single_sequences_and_in_2024_by_its_stages() -> None:
    row = {"model": "Llama3.1-8B", "gpu": "H100 (96GB HBM2e, 500W)", "n_gpus": "64", "gbs_samples": "128", "mbs": "16"}
    row |= {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
    row |= {"seq_len": "8192", "tp": "1", "precision": "bf16", "notes": "", "act_recompute": "full", "compile": "1"}
    row["source"] = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    piped = fsdp_runs.build_titan(row | {"dp": "8", "pp": "8"}).layout
    assert (piped.micro_batch_size, piped.gradient_accumulation_steps) == (1, 16)
    old = fsdp_runs.build_titan(row | {"dp": "8", "pp": "8", "source": "llama3_h100_202412_torchtitan.md"}).layout
    assert (old.micro_batch_size, old.gradient_accumulation_steps) == (2, 8)
    flat = fsdp_runs.build_titan(row | {"dp": "64", "pp": "1", "mbs": "2"})
    assert (flat.layout.micro_batch_size, flat.layout.gradient_accumulation_steps) == (2, 1)
    assert isinstance(flat.program, fsdp_runs.CompiledLoss)  # of runs that torch.compile compiled in 2025


def test_runs_of_internevo_shard_their_optimizer_within_the_group_of_the_row() -> None:
    row = {"model": "InternLM 7B", "gpu": "A100", "n_gpus": "16", "mbs": "2", "grad_accum": "2", "pp": "1"}
    row |= {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": "", "seq_len": "2048"}
    row |= {"act_recompute": "none", "dp_sharding": "ZeRO-1 within groups of 8"}
    grouped = fsdp_runs.build_intern(row | {"dp": "16", "tp": "1", "gbs_samples": "64"}).layout
    assert (grouped.zero_stage, grouped.zero_shard_size) == (1, 8)
    whole = fsdp_runs.build_intern(row | {"dp": "8", "tp": "2", "gbs_samples": "32"}).layout
    assert (whole.zero_stage, whole.zero_shard_size) == (1, 0)


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


DEEPSPEED = fields(
    "row_id=a set=one model=llama2-7b layers=32 hidden=4096 heads=32 ffn=11008 vocab=32000 seq_len=4096 gpu=A100 "
    "gpu_mem_gb=80 gpus_per_node=8 n_gpus=8 precision=bf16 gbs_samples=64 mbs=1 grad_accum=8 dp=8 "
    "dp_sharding=ZeRO-3 act_recompute=full step_time_s=12 peak_mem_gib=20"
)
DEEPSPEED |= {"mem_unit_note": "torch.cuda.max_memory_allocated, GiB"}


def test_a_run_of_deepspeed_gets_its_sequence_ranks_offload_and_threads(tmp_path: Path) -> None:
    row = DEEPSPEED | {"dp": "2", "sp": "4", "cpu_offload": "optimizer", "notes": "CUDA_LAUNCH_BLOCKING=1 is set"}
    (judged,) = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, row)).rows
    layout, spec = judged.case.layout, judged.case.spec
    assert (layout.data_parallel, layout.sequence_parallel, layout.zero_stage) == (2, 4, 3)
    assert (layout.offload, spec.cluster.cpus_per_gpu) == ("optimizer", 1)
    assert spec.env == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert (judged.measured.memory_kind, judged.measured.memory_bytes) == ("allocated", 20 * 2**30)
    assert spec.planner.framework == "deepspeed"


def test_rows_whose_other_figure_of_memory_contradicts_them_are_read_by_it(tmp_path: Path) -> None:
    row = DEEPSPEED | {"set": "chenyaofo-deepspeed", "mbs": "8", "gbs_samples": "128", "grad_accum": "2"}
    offloaded = row | {"mbs": "4", "gbs_samples": "64", "cpu_offload": "optimizer+params"}
    before_the_update = row | {"mbs": "1", "gbs_samples": "64", "dp_sharding": "ZeRO-2"}
    usual = row | {"mbs": "2", "gbs_samples": "64"}
    rows = (row, offloaded, before_the_update, usual, row | {"set": "other"})
    judged = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, *rows)).rows
    sizes = [(each.case.layout.micro_batch_size, each.case.layout.gradient_accumulation_steps) for each in judged]
    assert sizes == [(16, 1), (2, 4), (1, 8), (2, 4), (8, 2)]
    assert [each.measured.memory_bytes is None for each in judged] == [False, False, True, False, False]
    assert all(each.measured.step_seconds == 12 for each in judged)


def test_steps_that_the_loss_scaler_skips_have_no_update(tmp_path: Path) -> None:
    row = DEEPSPEED | {"cpu_offload": "optimizer", "dp_sharding": "ZeRO-3"}
    early = row | {"row_id": "early", "notes": "early steps, optimizer steps may be skipped by the loss scaler"}
    updated, skipped = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, row, early)).rows
    spec, layout = updated.case.spec, updated.case.layout
    update = host_update_seconds(spec, find_accelerator(spec.cluster), parameter_count(spec.transformer) // 8)
    assert layout.world_size == 8
    assert updated.step_seconds - skipped.step_seconds == pytest.approx(update, rel=1e-3)
    assert updated.time.optimizer - skipped.time.optimizer == pytest.approx(update, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "attention"),
    [
        ({}, "flash"),
        ({"source": "a page (DeepSpeed 0.14.2)"}, "masked"),
        ({"notes": "transformers 4.39.3"}, "masked"),
        ({"notes": "transformers 4.41.0"}, "flash"),
        ({"notes": "transformers 4.39.3, flash-attn 2"}, "flash"),
        ({"notes": "flash-attn 3"}, "flash3"),
        ({"notes": "FA3 on Hopper"}, "flash3"),
        ({"notes": "flash attention 2.3"}, "flash"),
        ({"notes": "Megatron-DeepSpeed", "source": "a page (DeepSpeed 0.14.2)"}, "flash"),
        ({"notes": "transformers 4.39.3 without flash attention"}, "materialised"),
        ({"source": "https://a.mirror/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a"}, "masked"),
    ],
)
def test_versions_that_pass_a_mask_get_the_kernel_that_takes_one(change: dict[str, str], attention: str) -> None:
    row = dict.fromkeys(deepspeed_runs.TABLE.input_columns, "") | change
    assert deepspeed_runs._attention(row) == attention


def test_a_program_that_keeps_its_output_holds_the_logits_too(tmp_path: Path) -> None:
    rows = DEEPSPEED | {"mbs": "8"}, DEEPSPEED | {"mbs": "8", "set": "chenyaofo-deepspeed"}
    plain, keeps = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, *rows)).rows
    assert keeps.memory.logits - plain.memory.logits == 8 * 4096 * 32000 * 4


def test_a_program_without_memory_efficient_linear_keeps_weights_of_blocks_not_recomputed(tmp_path: Path) -> None:
    rows = [DEEPSPEED | {"mbs": "2", "set": "chenyaofo-deepspeed", "act_recompute": mode} for mode in ("none", "full")]
    keeps, releases = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, *rows)).rows
    bucket, reused = 2 * 5 * 10**8, 2 * 5 * 10**8  # half of stage3_max_reuse_distance
    assert releases.memory.communication_buffers == bucket + reused
    assert keeps.memory.communication_buffers == bucket + 2 * (6_738_415_616 - 32000 * 4096)


def test_forks_of_megatron_deepspeed_differ_by_a_copy_of_the_logits(tmp_path: Path) -> None:
    rows = [
        DEEPSPEED | {"mbs": "8", "source": f"{owner}/Megatron-DeepSpeed"} for owner in ("deepspeedai", "argonne-lcf")
    ]
    first, fork = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, *rows)).rows
    assert (first.memory.logits, fork.memory.logits) == (8 * 4096 * 32000 * 14, 8 * 4096 * 32000 * 10)


@pytest.mark.parametrize(
    ("change", "device", "network"),
    [
        ({}, "a100-sxm-80gb", None),
        ({"gpu_mem_gb": "40", "interconnect": "Polaris, Slingshot"}, "a100-sxm-40gb", "slingshot-11"),
        ({"gpu": "RTX 4090", "gpu_mem_gb": ""}, "rtx-4090-24gb", None),
        ({"gpu": "Max1550", "interconnect": "Aurora, Slingshot 11"}, "max-1550-tile-64gb", "slingshot-11"),
        ({"set": "xtuner-benchmark"}, "a100-sxm-80gb", "roce-100g"),
    ],
)
def test_machines_of_deepspeed_runs_follow_the_columns(change: dict[str, str], device: str, network: str) -> None:
    row = dict.fromkeys(deepspeed_runs.TABLE.input_columns, "") | DEEPSPEED | change
    name, per_node, (found, rate) = deepspeed_runs._machines(row)
    assert (name, per_node, found) == (device, 8, network)
    assert (rate is None) == (network is None)


def test_an_unknown_device_is_left_out_with_its_name(tmp_path: Path) -> None:
    outcome = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, DEEPSPEED | {"gpu": "TPU"}))
    assert dict(outcome.skipped) == {"no catalogue name for TPU": 1}


def test_sources_of_deepspeed_have_lines_of_their_own_and_slow_runs_a_set(tmp_path: Path) -> None:
    slow = DEEPSPEED | {"row_id": "b", "set": "two", "step_time_s": "1200"}
    outcome = judge(deepspeed_runs.TABLE, write(tmp_path, deepspeed_runs.TABLE.file, DEEPSPEED, slow))
    every = score(set_named("deepspeed-time"), outcome)
    assert every.errors.n == 2
    assert [(name, part.n) for name, part in every.parts] == [("one", 1), ("two", 1)]
    (low,) = score(set_named("deepspeed-time-low"), outcome).rows
    assert low.row.row_id == "b"
    assert score(set_named("deepspeed-time-5"), outcome).errors.n == 1
    assert score(set_named("deepspeed-memory"), outcome).errors.n == 2


def test_a_source_is_scored_with_constants_fitted_on_the_others(tmp_path: Path) -> None:
    base = DEEPSPEED | {"cpu_offload": "optimizer", "mbs": "8", "step_time_s": "20"}
    directory = write(tmp_path, deepspeed_runs.TABLE.file, base, base | {"set": "two"})
    (alone,) = {run.step_seconds for run in judge(deepspeed_runs.TABLE, directory).rows}
    scales = dict.fromkeys(left_out.CONSTANTS, 1.0) | {"thread_bandwidth": 0.7}
    with left_out.scaled(tuple(scales.values())):
        slower = judge(deepspeed_runs.TABLE, directory).rows[0].step_seconds
    assert slower > 1.1 * alone
    assert judge(deepspeed_runs.TABLE, directory).rows[0].step_seconds == alone, "the constants are as before"
    write(tmp_path, deepspeed_runs.TABLE.file, base, base | {"set": "two", "step_time_s": str(slower)})
    first, second = left_out.leave_one_out(deepspeed_runs.TABLE, directory)
    assert (first.source, second.source) == ("one", "two")
    assert first.scales == {"thread_bandwidth": 0.7}, "what source two implies, which was not left out"
    assert first.left_out > first.planner
    assert first.fitted_rows == 1


@pytest.mark.parametrize(("said", "stage"), [("printed stage 0", 0), ("stage 0 printed", 0), ("8 nodes", 1)])
def test_the_configured_stage_is_that_of_the_notes(said: str, stage: int) -> None:
    empty = dict.fromkeys(deepspeed_runs.TABLE.input_columns, "")
    case = deepspeed_runs.build(empty | DEEPSPEED | {"dp_sharding": "ZeRO-1", "notes": f"a table; {said}"})
    assert case.spec.training.grad_dtype == ("fp32" if stage == 0 else "bf16")


def test_megatron_has_no_flash_attention_on_volta() -> None:
    row = dict.fromkeys(deepspeed_runs.TABLE.input_columns, "") | DEEPSPEED | {"notes": "Megatron-DeepSpeed"}
    found = {gpu: deepspeed_runs.build({**row, "gpu": gpu}).spec.planner.attention for gpu in ("V100", "A100")}
    assert found == {"V100": "materialised", "A100": "flash"}


def test_leaving_out_prints_each_source_and_both_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import planner_accuracy

    write(tmp_path, deepspeed_runs.TABLE.file, DEEPSPEED, DEEPSPEED | {"set": "two"})
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py", "--truth", str(tmp_path), "--leave-one-out"])
    assert planner_accuracy.main() == 0
    table, _, constants = capsys.readouterr().out.partition("\n\n")
    starts = [line.split("  ")[0] for line in table.splitlines()]
    assert starts == ["source left out", "one", "two", "all rows", "mean over sources"]
    named = [line.split(" | ")[0] for line in constants.splitlines()]
    assert named == ["| all constants", *(f"| without `{name}`" for name in left_out.CONSTANTS)]
