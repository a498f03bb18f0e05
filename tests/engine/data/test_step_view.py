"""`data show --step`, against the batches that the ranks of a real run have read."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from scaletrain_cli.data.prepared import prepare_data
from scaletrain_cli.engine.data import stats, step_view
from scaletrain_cli.engine.data.batches import BatchReader, StepBatch
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.cli.command_line import scaletrain
from tests.drills.campaign.forked_attempts import ForkedRun, be_rank

_SPEC = """
schema: scaletrain/v1
name: shown
model: {{family: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
        intermediate_size: 64, vocab_size: 300, seq_len: 32, tie_word_embeddings: true}}
data:
  sources: [{{name: web, path: {folder}/web.jsonl, weight: 3}}, {{name: code, path: {folder}/code.jsonl, weight: 1}}]
  stages: [{{start: 4, weights: {{web: 1, code: 1}}}}]
  skip: [[2, 2]]
  packing: documents
  validation_split: 0.2
  tokenizer: {{vocab_size: 300}}
training: {{global_batch_size: 8, micro_batch_size: 2, steps: 5, precision: fp32}}
evaluation: {{every: 5, batches: 1}}
layout: {{zero_stage: 1}}
cluster: {{gpu: cpu, gpus_per_node: 2, grace_seconds: 60}}
checkpoint: {{every: 5}}
"""


def recording_rank(path: Path, number: int) -> int:
    """Be a rank that keeps the numbers of the batches that it takes, and the batches that it reads."""
    taken: list[int] = []
    read: dict[int, list[Any]] = {}
    take, batch = Loader.take, BatchReader.batch

    def take_and_note(self: Any, number: int, following: Any = ()) -> Any:
        taken.append(number)
        return take(self, number, following)

    def read_and_note(self: BatchReader, number: int) -> StepBatch:
        found = batch(self, number)
        read[number] = [[micro.tokens, micro.labels, micro.positions, micro.samples] for micro in found.micro_batches()]
        return found

    with patch.object(Loader, "take", take_and_note), patch.object(BatchReader, "batch", read_and_note):
        code = be_rank(path, number)
    torch.save({"taken": taken, "read": read}, path / f"read-{os.environ['RANK']}.pt")
    return code


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("shown")
    for name, word in (("web", "page"), ("code", "function")):
        rows = (f"The {word} {n} has {n % 7 * ' more'} words, and ends." for n in range(600))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    spec = parse_spec(_SPEC.format(folder=folder), file="shown.yaml", base_dir=folder)
    with patch.dict(os.environ, {"SCALETRAIN_RUNS": str(folder / "runs")}):
        prepare_data(spec.data, folder / "runs", 1, lambda *_: None)
        forked = ForkedRun.create(spec, recording_rank)
        assert forked.attempt().exit_codes == [0, 0], forked.log()
    return forked.run


def shown(run: RunDir, step: int, rank: int | None, count: int = 100) -> dict[str, Any]:
    spec = run.path / "spec.json"
    spec.write_text(read_record(run).spec.model_dump_json(by_alias=True))
    words = (
        str(spec),
        str(run.path.parent),
        str(run.path),
        str(step),
        "" if rank is None else str(rank),
        "",
        str(count),
    )
    return step_view.run_command(words)


def test_the_samples_of_a_step_are_those_that_the_ranks_of_a_run_have_read(run: RunDir) -> None:
    for rank in range(2):
        recorded = torch.load(run.path / f"read-{rank}.pt")
        assert recorded["taken"] == [1, 3, 4, 5, 6]  # batch 2 is skipped
        for step, number in enumerate(recorded["taken"], start=1):
            answer = shown(run, step, rank)
            assert answer["batch"] == number
            samples = iter(answer["samples"])
            for micro, (tokens, labels, positions, numbers) in enumerate(recorded["read"][number], start=1):
                for row in range(2):
                    sample = next(samples)
                    (text,) = sample["texts"]
                    assert (text["tokens"], text["labels"]) == (tokens[row].tolist(), labels[row].tolist())
                    assert text["positions"] == positions[row].tolist()
                    assert (sample["sample"], sample["micro_batch"]) == (int(numbers[row]), micro)
            assert next(samples, None) is None


def test_samples_of_all_ranks_are_in_the_order_of_the_global_batch_with_source_and_documents(run: RunDir) -> None:
    answer = shown(run, 4, None)
    assert [sample["sample"] for sample in answer["samples"]] == list(range(4 * 8, 5 * 8))
    assert [sample["replica"] for sample in answer["samples"]] == [0, 0, 1, 1] * 2
    sources = [sample["source"] for sample in answer["samples"]]
    assert sorted(sources) == ["code"] * 4 + ["web"] * 4
    for sample, source in zip(answer["samples"], sources, strict=True):
        (text,) = sample["texts"]
        other = {"web": "function", "code": "page"}[source]
        written = "".join(part["text"] for document in text["documents"] for part in document["parts"])
        assert {"web": "page", "code": "function"}[source] in written
        assert other not in written
        assert sum(document["tokens"] for document in text["documents"]) == 32
        for document in text["documents"][1:]:
            assert document["positions"][0] == 0
            assert document["parts"][0]["weight"] == 0, "the first token of a document is not in the loss"
        for document in text["documents"][:-1]:
            assert document["parts"][-1]["text"].endswith("<|endoftext|>")


def test_a_spec_shows_what_its_run_has_read(run: RunDir) -> None:
    record = read_record(run)
    assert isinstance(record.spec, RunSpec)
    words = (str(run.path / "spec.json"), str(run.path.parent), "", "3", "", "2", "4")
    of_run = [sample for sample in shown(run, 3, None)["samples"] if sample["micro_batch"] == 2]
    assert step_view.run_command(words)["samples"] == of_run


def test_rows_for_sft_show_the_completion_alone_in_the_loss(tmp_path: Path) -> None:
    rows = [{"prompt": f"How many are {n}?", "completion": f"There are {n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = _SPEC.format(folder=tmp_path).partition("data:")
    after = "training: " + text[2].partition("training: ")[2]
    data = f"data:\n  source: {tmp_path}/rows.jsonl\n  tokenizer: {{vocab_size: 300}}\n"
    after = after.replace("training: {", "training: {objective: sft, ", 1)
    spec = parse_spec(text[0] + data + after, file="rows.yaml", base_dir=tmp_path)
    (tmp_path / "spec.json").write_text(spec.model_dump_json(by_alias=True))
    prepare_rows(spec, tmp_path / "runs")
    answer = step_view.run_command((str(tmp_path / "spec.json"), str(tmp_path / "runs"), "", "2", "", "", "100"))
    assert [sample["sample"] for sample in answer["samples"]] == list(range(8, 16))
    for sample in answer["samples"]:
        (shown_text,) = sample["texts"]
        (document,) = shown_text["documents"]
        in_loss = "".join(part["text"] for part in document["parts"] if part["weight"])
        whole = "".join(part["text"] for part in document["parts"])
        (row,) = [row for row in rows if row["prompt"] in whole]
        assert row["completion"].strip() in in_loss
        assert row["prompt"] not in in_loss
        assert len(shown_text["tokens"]) == document["tokens"] + shown_text["padding"]


def test_the_report_of_a_run_counts_the_samples_that_its_stages_give(run: RunDir) -> None:
    shown(run, 1, None, 1)  # writes the spec
    answer = stats.run_command((str(run.path / "spec.json"), str(run.path.parent), str(run.path)))
    mixture = answer["mixture"]
    assert mixture["stages"] == [
        {"first_step": 1, "last_step": 3, "shares": [0.75, 0.25]},
        {"first_step": 4, "last_step": 5, "shares": [0.5, 0.5]},
    ]
    assert [each["samples"] for each in mixture["sources"]] == [18 + 8, 6 + 8]
    for each, source in zip(mixture["sources"], answer["sources"], strict=True):
        assert each["epochs"] == each["samples"] / ((source["tokens"]["train"] - 1) // 32)


def test_sequence_parallel_ranks_show_their_parts_of_the_same_samples(run: RunDir) -> None:
    text = _SPEC.format(folder=run.path.parent.parent).replace("zero_stage: 1", "zero_stage: 1, sequence_parallel: 2")
    spec = run.path / "parallel.json"
    spec.write_text(parse_spec(text, file="shown.yaml", base_dir=run.path).model_dump_json(by_alias=True))
    whole, *parts = (
        step_view.run_command((str(spec), str(run.path.parent), "", "3", rank, "", "100"))["samples"]
        for rank in ("", "0", "1")
    )
    assert [len(each) for each in (whole, *parts)] == [8, 8, 8]
    for sample, *of_ranks in zip(whole, *parts, strict=True):
        (text_of_all,), *texts = (each["texts"] for each in (sample, *of_ranks))
        for name in ("tokens", "labels", "positions"):
            assert [value for (each,) in texts for value in each[name]] == text_of_all[name]
        assert [each["start"] for (each,) in texts] == [0, 16]
        written = [
            "".join(part["text"] for document in each["documents"] for part in document["parts"])
            for each in (text_of_all, *(each for (each,) in texts))
        ]
        assert written[0] == written[1] + written[2]


def test_the_screen_of_a_run_has_sources_documents_and_the_part_in_the_loss(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(command: str, *words: str, **_: object) -> dict[str, Any]:
        assert command == "step"
        return step_view.run_command(words)

    monkeypatch.setattr("scaletrain_cli.launch.engine_process.run_engine_command", here)
    ended = scaletrain("data", "show", run.path, "--step", "2", "--rank", "1", "--count", "1", code=0)
    assert ended.out.startswith("step 2 (batch 3 of the data): 1 of 4 samples of rank 1\n")
    assert re.search(r"\nsample 18  (web|code), sequence \d+; micro-batch 1, replica 1\n", ended.out)
    assert "<|endoftext|>]]\ntokens " in ended.out
    assert ", positions 0 to " in ended.out
    for words, named in ((("--step", "6"), "step 6"), (("--step", "1", "--rank", "2"), "rank 2")):
        refused = scaletrain("data", "show", run.path, *words)
        assert (refused.code, named in refused.err) == (ExitCode.USAGE, True)
    refused = scaletrain("data", "show", run.path, "--step", "1", "--micro-batch", "3")
    assert (refused.code, "micro-batch 3" in refused.err) == (ExitCode.USAGE, True)
