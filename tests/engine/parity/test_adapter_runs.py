"""Runs with adapters are resumed to the bit and in other layouts, and exported so that PEFT and transformers agree."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.checkpoint.export import export, export_adapter
from scaletrain_cli.engine.checkpoint.tokenizer_export import TextFiles
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.submit import make_record
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.checkpoints import checkpoint_path
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import write_record
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.engine.model.adapted_models import NoBase, ours
from tests.engine.parity.comparison import assert_same, difference
from tests.engine.parity.layouts import RankReport, train_in_layout, train_rank, whole_weights
from tests.engine.parity.reference import Trained
from tests.engine.parity.rows import Row
from tests.engine.parity.test_adapters import (
    DORA,
    FP32,
    GPT,
    LORA,
    ON_TWO,
    TIED,
    save_hugging_face,
    train_with_peft,
    with_weights,
)
from tests.engine.ranks import on_ranks

STEPS = 3  # in each layout
NO_TEXT = TextFiles({}, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
ROUND = [Row(3, data=2, overrides=DORA), Row(1, tensor=2, pipeline=2, accumulation=4, overrides=DORA)]
LONG = pytest.mark.long
MOVED = [
    pytest.param([Row(2, data=2, overrides=LORA), Row(1, pipeline=2, accumulation=4, overrides=LORA)], id="lora"),
    pytest.param(ROUND, id="dora", marks=LONG),
    pytest.param(
        [Row(2, data=2, overrides=ON_TWO), Row(1, tensor=2, pipeline=2, overrides=ON_TWO[:-1])],
        id="experts",
        marks=LONG,
    ),
    *(
        pytest.param([Row(2, sequence=2, overrides=each), Row(3, data=2, overrides=each)], id=name, marks=LONG)
        for name, each in (("tied", TIED), ("gpt", GPT))
    ),
]


@pytest.mark.parametrize("rows", MOVED)
def test_a_resumed_run_trains_what_peft_trains_and_is_exported(rows: list[Row], dataset: Path, tmp_path: Path) -> None:
    base, checkpoints, steps = tmp_path / "base", tmp_path / "checkpoints", STEPS * (len(rows) + 1)
    losses, norms = [], []
    for attempt, row in enumerate([*rows, rows[0]], start=1):
        spec = with_weights(row, base).spec(dataset, steps)
        if attempt == 1:
            save_hugging_face(spec.transformer, base)
        run = RunDir(tmp_path / f"attempt-{attempt}")
        run.path.mkdir()
        run.checkpoints.symlink_to(checkpoints)
        write_record(run, make_record(spec, make_plan(spec)))
        run.attempt(attempt).mkdir(parents=True)
        open_attempt(checkpoints, attempt)
        place = (run.path, attempt, STEPS * attempt)
        reports: list[RankReport] = on_ranks(row.ranks, train_rank, *place, connected=False)
        losses += reports[0].losses
        norms += reports[0].norms
    weights = whole_weights([report.pieces for report in reports])
    moved = Trained(losses, norms, {name: values for name, values in weights.items() if "lora_" in name})

    expected = train_with_peft(spec, base)

    found = difference(moved, expected)
    assert found.within(FP32), found
    last = checkpoint_path(checkpoints, STEPS * len(rows))
    check_export(spec, last, base, tmp_path)
    check_size(spec, last, base)


def check_export(spec: RunSpec, checkpoint: Path, base: Path, folder: Path) -> None:
    """Compare the loss of the exported adapter in PEFT, of the merged model, and of ours with that adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, adapter = spec.transformer, spec.transformer.adapter
    export_adapter(checkpoint, spec, folder / "peft", NO_TEXT)
    export([checkpoint], spec, folder / "merged", torch.float32, NO_TEXT)
    tokens = torch.randint(0, model.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        untrained = plain(input_ids=tokens).logits.clone()
        theirs: Any = PeftModel.from_pretrained(plain, folder / "peft").eval()
        merged: Any = AutoModelForCausalLM.from_pretrained(folder / "merged", attn_implementation="eager")
        logits = theirs(input_ids=tokens).logits
        assert (logits - untrained).abs().max() > 1e-3
        assert (merged(input_ids=tokens).logits - logits).abs().max() <= 1e-5
        started = adapter.model_copy(update={"weights": str(folder / "peft")})
        again = ours(model.model_copy(update={"adapter": started}), started, base)
        labels = torch.cat((tokens[:, 1:], torch.full((4, 1), -100)), dim=1)
        assert again(tokens, labels).item() == pytest.approx(
            theirs(input_ids=tokens, labels=tokens).loss.item(), abs=1e-5
        )


def check_size(spec: RunSpec, checkpoint: Path, base: Path) -> None:
    """A checkpoint has no more than the factors and their two moments, and the overhead of small files."""
    from scaletrain_cli.plan.parameters import model_parameters

    factors = sum(parameter.numel for parameter in model_parameters(spec.transformer) if parameter.adapter)
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    everything = sum(parameter.numel for parameter in model_parameters(spec.transformer))
    assert 3 * 4 * factors <= stored < 3 * 4 * factors + 0.25 * 12 * everything


def test_an_interrupted_run_continues_bit_exactly(dataset: Path, tmp_path: Path) -> None:
    row = with_weights(
        Row(2, data=2, overrides=(LORA[0].replace("alpha: 16", "dropout: 0.1"), LORA[1])), tmp_path / "b"
    )
    spec = row.spec(dataset, 4)
    save_hugging_face(spec.transformer, tmp_path / "b")

    # Of the factors, B is 0 until after the first step, and until then A has no gradient and no moments.
    whole, resumed = train_in_layout(spec).trained, train_in_layout(spec, 3).trained

    assert_same(resumed, whole)


def test_a_run_starts_from_an_adapter_of_peft(dataset: Path, tmp_path: Path) -> None:
    """With a learning rate near zero, its loss on a batch is what the run that trained the adapter had on it."""
    spec = with_weights(Row(0, overrides=LORA), tmp_path / "base").spec(dataset, 6)
    save_hugging_face(spec.transformer, tmp_path / "base")
    first = train_in_layout(spec, 5)
    adapter = tmp_path / "adapter"
    [checkpoint] = runs_root().glob("*/checkpoints/step-*")
    export_adapter(checkpoint, first.record.spec, adapter, NO_TEXT)
    begun = (LORA[0].replace("alpha: 16", f"alpha: 16, weights: {adapter}"), LORA[1], "training.optimizer.lr=1.0e-9")
    again = with_weights(Row(2, data=2, overrides=begun), tmp_path / "base").spec(dataset, 6)

    assert train_in_layout(again).trained.losses[5] == pytest.approx(first.trained.losses[5], abs=1e-6)


def test_a_run_without_a_base_or_an_adapter_has_no_peft_form(dataset: Path) -> None:
    from scaletrain_cli.engine.checkpoint.adapter_export import peft_files

    for overrides, code in (((), "engine.peft-without-adapter"), (LORA, "engine.peft-without-base")):
        spec = Row(0, overrides=overrides).spec(dataset, 6)
        with pytest.raises(UsageError) as refused:
            peft_files(spec, NoBase())
        assert refused.value.reason.code == code
