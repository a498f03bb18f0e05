"""A real run with training.epochs: it trains the steps that its prepared rows fill, also when it is interrupted."""

import json
from pathlib import Path

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import read_record
from tests.cli.command_line import scaletrain
from tests.drills.training_runs import Drill, slowed

pytestmark = [pytest.mark.drill, pytest.mark.long]
SPEC = """
schema: scaletrain/v1
name: epochs
model: {family: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64,
        vocab_size: 300, seq_len: 64}
data: {source: rows.jsonl, tokenizer: {kind: bpe, vocab_size: 300}, packing: best_fit}
training: {objective: sft, global_batch_size: 8, micro_batch_size: 4, epochs: 2.5, precision: fp32}
evaluation: {every: 5, batches: 1}
cluster: {scheduler: local, gpus_per_node: 2, gpu: cpu}
checkpoint: {every: 5}
"""


def test_a_run_of_epochs_trains_its_steps_after_a_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, slowed({1: 8}))
    turns = [[("user", f"ask {n}"), ("assistant", f"answer {n}" + " again" * (n % 7))] for n in range(300)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(SPEC)
    submitted = scaletrain("submit", "run.yaml", "--run-id", "r1", "--yes", code=0)
    drill = Drill(RunDir(runs_root() / "r1"), LocalBackend())
    drill.wait_for_step(7)
    assert scaletrain("cancel", "r1").code == 0
    drill.wait_for_end()
    assert scaletrain("resume", "r1", "--yes").code == 0
    drill.wait_for_end()
    (dataset,) = {path.parent for path in (runs_root() / "datasets").glob("*/dataset.json")}
    count = (dataset / "train.totals.bin").stat().st_size // 8
    steps = -(-5 * count // 2 // 8)
    assert f"2.5 epochs of {count} sequences = {steps} steps of 8" in submitted.err
    assert (read_record(drill.run).spec.total_steps, drill.step(), len(drill.losses())) == (steps, steps, steps)
    assert [event["step"] for event in drill.events("finished")] == [steps]
    assert len(drill.events("epochs-counted")) == 1
    again = scaletrain("submit", "run.yaml", "--run-id", "r1", "--yes")
    assert "already submitted" in again.err
