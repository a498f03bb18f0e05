"""Preference pairs of several sources: a plain loop over the same samples has the same losses, also after a resume."""

import contextlib
import io
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaletrain_cli.data.mixture import Stage
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.rows import JoinedRows, RowSequences
from scaletrain_cli.engine.data.sample_order import SampleOrder
from scaletrain_cli.engine.data.step_view import run_command as step_view
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.objectives.rows import largest_difference
from tests.engine.objectives.test_resuming import SPEC, rows_file
from tests.engine.parity.layouts import assembled, begun_run, train_in_layout
from tests.engine.parity.reference import first_weights
from tests.engine.ranks import on_ranks
from tests.tokenizer_kinds import tokenizer_json, write_tokenizer

NAMES = ("chats", "code")


def mixed(folder: Path, *settings: str) -> RunSpec:
    """Two sources with shares of 3 to 1, and rows of different lengths."""
    rows = rows_file(folder).read_text().splitlines(keepends=True)
    for name, part in zip(NAMES, (rows[:60], rows[60:100]), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(part))
    write_tokenizer(folder, tokenizer_json("bytes", ("<|endoftext|>",)), {"eos_token": "<|endoftext|>"})
    sources = ", ".join(
        f"{{name: {name}, path: {folder}/{name}.jsonl, weight: {weight}}}"
        for name, weight in zip(NAMES, (3, 1), strict=True)
    )
    return parse_spec(
        SPEC.replace("data: {source: SOURCE, tokenizer: {vocab_size: 300}}", f"data: {{sources: [{sources}]}}"),
        file="mixed.yaml",
        base_dir=folder,
        overrides=[
            f"data.tokenizer={{kind: file, path: {folder}/tokenizer.json}}",
            *("training.objective=dpo", "data.format=preference", "data.validation_split=0.25"),
            *("model.vocab_size=512", "cluster.gpus_per_node=2"),
            *settings,
        ],
    )


def fit(path: Path) -> None:
    """A rank's part of the whole run in ``path``, with its validations."""
    with contextlib.redirect_stdout(io.StringIO()):
        assembled(path).fit()


def training_pairs(spec: RunSpec) -> list[RowSequences]:
    """The pairs of each source to train on, prepared alone."""
    found = []
    for alone in spec.of_sources().values():
        pairs = open_data_of(alone, prepare_rows(alone, runs_root()))[1]
        assert isinstance(pairs, RowSequences)
        found.append(pairs)
    return found


def answers(rows: RowSequences, number: int) -> list[tuple[Tensor, Tensor]]:
    read = rows.read([number])
    return [
        (torch.from_numpy(tokens)[None], torch.from_numpy(labels))
        for tokens, labels in zip(read.tokens, read.labels, strict=True)
    ]


def log_probabilities(model: nn.Module, pair: list[tuple[Tensor, Tensor]]) -> Tensor:
    found = []
    for tokens, labels in pair:
        logits = model(tokens, labels, output=lambda model, hidden: model.logits(hidden))[0]
        found.append(-F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    return torch.stack(found)


def plain_losses(spec: RunSpec, batches: list[list[tuple[RowSequences, int]]]) -> list[float]:
    """Train on one pair after another, with a copy of the first model as the reference."""
    model, reference = first_weights(spec), first_weights(spec)
    settings, losses = spec.training.optimizer, []
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )
    for batch in batches:
        total = torch.zeros(())
        for rows, number in batch:
            pair = answers(rows, number)
            with torch.no_grad():
                of_reference = log_probabilities(reference, pair)
            chosen, rejected = log_probabilities(model, pair) - of_reference
            total = total - F.logsigmoid(spec.training.dpo.beta * (chosen - rejected)) / len(batch)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.training.gradient_clipping)
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize(
    "layout", ["layout.data_parallel=2", pytest.param("layout.pipeline_parallel=2", marks=pytest.mark.long)]
)
def test_pairs_of_several_sources_train_as_in_a_plain_loop(layout: str, tmp_path: Path) -> None:
    spec = mixed(tmp_path, layout, "training.schedule={name: constant, warmup_steps: 0}")
    train = training_pairs(spec)
    order = SampleOrder(spec.training.seed, tuple(map(len, train)), (Stage(0, (0.75, 0.25)),))
    starts = JoinedRows.of(train).starts
    batches = []
    for step in range(spec.total_steps):
        drawn = [order(8 * step + place) for place in range(8)]
        batches.append([(train[n >= starts[1]], n - starts[int(n >= starts[1])]) for n in drawn])
        assert sum(rows is train[1] for rows, _ in batches[-1]) == 2, "a quarter of each batch"
    whole = train_in_layout(spec).trained
    (expected,) = on_ranks(1, plain_losses, spec, batches)
    assert largest_difference(whole.losses, expected) < 1e-5
    resumed = train_in_layout(spec, 1).trained
    assert (resumed.losses, resumed.norms) == (whole.losses, whole.norms)


def test_a_run_with_pairs_of_several_sources_measures_each(tmp_path: Path) -> None:
    spec = mixed(tmp_path, "layout.data_parallel=2", "training.steps=2", "training.optimizer.lr=1.0e-9")
    training_pairs(spec)
    run = begun_run(spec)
    on_ranks(2, fit, run.path, connected=False)
    steps = [line for line in read_metrics(run) if "loss" in line]
    (validation,) = [line for line in read_metrics(run) if "validation_loss" in line]
    losses = [line[name] for line in steps for name in ("loss", "loss/chats", "loss/code")]
    losses += [validation[f"validation_{name}"] for name in ("loss", "loss/chats", "loss/code")]
    assert losses == pytest.approx([math.log(2)] * 9, abs=1e-4), "of a model that equals its reference"
    assert validation["validation_logps/chosen"] < -1
    names = {f"{split}-{name}" for split in ("train", "validation") for name in NAMES}
    assert {path.name for path in run.reference.iterdir()} == names
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    shown = step_view([str(tmp_path / "spec.json"), str(runs_root()), str(run.path), "1", "", "", "8", ""])["samples"]
    assert sorted(sample["source"] for sample in shown) == ["chats"] * 6 + ["code"] * 2
    assert {text["name"] for sample in shown for text in sample["texts"]} == {"chosen", "rejected"}
