import json
import random
from pathlib import Path

import pytest

from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import parse_spec
from tests.engine.parity.comparison import assert_same
from tests.engine.parity.layouts import train_in_layout

SPEC = """
schema: scaletrain/v1
name: resumed
model: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 48,
        vocab_size: 300, seq_len: 64}
data: {source: SOURCE, tokenizer: {vocab_size: 300}}
training: {global_batch_size: 8, micro_batch_size: 2, steps: 4, precision: fp32, optimizer: {lr: 1.0e-3}}
evaluation: {every: 2, batches: 1}
cluster: {gpu: cpu}
checkpoint: {every: 1000}
"""
_WORDS = "the model of a run is cut over ranks and each rank holds its own part".split()
CASES = {
    "dpo zero2 dp2": ("dpo", "layout.zero_stage=2", "layout.data_parallel=2"),
    "dpo pp2": ("dpo", "layout.zero_stage=1", "layout.pipeline_parallel=2"),
    "sft packed zero3 dp2": ("sft", "layout.zero_stage=3", "layout.data_parallel=2", "data.packing=best_fit"),
    "dpo cp2": ("dpo", "layout.zero_stage=2", "layout.context_parallel=2"),
    "sft packed sp2": ("sft", "layout.zero_stage=1", "layout.sequence_parallel=2", "data.packing=best_fit"),
}
_QUICK = "dpo zero2 dp2"


def rows_file(folder: Path) -> Path:
    draw = random.Random(0)

    def text(longest: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(2, longest)))

    rows = [
        {"prompt": text(4), **{name: " " + text(8) for name in ("chosen", "rejected", "completion")}}
        for _ in range(300)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    "case", [_QUICK, *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != _QUICK)]
)
def test_interrupted_fine_tuning_continues_to_the_bit(case: str, tmp_path: Path) -> None:
    objective, *overrides = CASES[case]
    kind = "preference" if objective == "dpo" else "prompt_completion"
    text = SPEC.replace("SOURCE", str(rows_file(tmp_path)))
    sets = [f"training.objective={objective}", f"data.format={kind}", "cluster.gpus_per_node=2", *overrides]
    spec = parse_spec(text, file="resumed.yaml", base_dir=tmp_path, overrides=sets)
    prepare_rows(spec, runs_root())
    whole = train_in_layout(spec).trained
    resumed = train_in_layout(spec, 1).trained
    assert_same(resumed, whole)
    if objective == "dpo":
        assert whole.losses[0] == pytest.approx(0.6931, abs=1e-4)
        files = sorted(runs_root().glob("*/reference/train"))
        assert files[0].read_bytes() == files[1].read_bytes()
