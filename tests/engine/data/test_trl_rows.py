"""The tokens and the labels of prepared rows are those of TRL's trainers, from the same files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.row_dataset import rows_folder
from scaletrain_cli.engine.data.rows import NOT_COUNTED, RowSequences
from scaletrain_cli.spec import RunSpec
from tests.spec.samples import SPEC, load

# Long, because the trainers' imports take long; tests/engine/objectives/test_trl.py compares the losses of training.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]  # TRL's own
LENGTH = 32
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": role, "content": f"{role} {n} of {turn}" + " more" * (n % 4)}
            for turn in range(1 + n % 3)
            for role in ("user", "assistant")
        ]
    }
    for n in range(30)
]
COMPLETIONS = [{"prompt": f"ask {n}" + " and" * (n % 5), "completion": f" {n}." * (1 + n % 7)} for n in range(30)]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"ask {n}"}],
        "chosen": [{"role": "assistant", "content": f"yes {n}" * (1 + n % 9)}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    for n in range(30)
]
Labelled = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def prepared(folder: Path, rows: list[dict[str, Any]], *settings: str) -> tuple[RunSpec, RowSequences, Path]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = load(
        SPEC,
        f"data.source={folder}/rows.jsonl",
        "data.tokenizer.vocab_size=300",
        "data.validation_split=0",
        f"model.seq_len={LENGTH}",
        *settings,
    )
    train = open_data_of(spec, prepare_rows(spec, folder / "runs"))[1]
    assert isinstance(train, RowSequences)
    return spec, train, rows_folder(spec, folder / "runs")


def ours(train: RowSequences) -> Labelled:
    read, found = train.read(range(len(train))), Labelled()
    for row, stop in enumerate(train.row_ends):
        start = int(train.row_ends[row - 1]) if row else 0
        length = int(train.document_ends[stop - 1]) - (int(train.document_ends[start - 1]) if start else 0)
        labels = [NOT_COUNTED, *read.labels[row, : length - 1].tolist()]
        found[tuple(read.tokens[row, :length].tolist()), tuple(labels)] += 1
    return found


def tiny_model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("rows", "settings", "options"),
    [
        (CHATS, (), {"assistant_only_loss": True}),
        (CHATS, ("data.packing=best_fit",), {"assistant_only_loss": True, "packing": True}),
        (CHATS, ("data.loss_on=all", "data.truncation=keep_end"), {"truncation_mode": "keep_end"}),
        (COMPLETIONS, (), {}),
    ],
    ids=["chats", "packed", "everything", "completions"],
)
def test_rows_for_sft_have_the_tokens_and_labels_of_trl(
    rows: list[dict[str, Any]], settings: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    _, train, folder = prepared(tmp_path, rows, "training.objective=sft", *settings)
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), max_length=LENGTH, report_to=[], use_cpu=True, bf16=False, **options
    )
    theirs = trl.SFTTrainer(
        model=tiny_model(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
    ).train_dataset
    expected = Labelled()
    for row in theirs:
        labels = list(row["labels"])
        place = 0
        for length in row.get("seq_lengths") or [len(labels)]:  # their collator masks the first of each document
            labels[place] = NOT_COUNTED
            place += length
        expected[tuple(row["input_ids"]), tuple(labels)] += 1
    assert ours(train) == expected


def test_pairs_have_the_tokens_of_trl(tmp_path: Path) -> None:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    _, train, folder = prepared(tmp_path, PAIRS, "training.objective=dpo", "model.seq_len=200")
    theirs = trl.DPOTrainer(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=trl.DPOConfig(output_dir=str(tmp_path / "trl"), max_length=200, report_to=[], use_cpu=True, bf16=False),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
    ).train_dataset
    expected = Labelled()
    for row in theirs:
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            labels = [NOT_COUNTED] * len(row["prompt_ids"]) + answer
            expected[tuple(row["prompt_ids"] + answer), tuple(labels)] += 1
    found = Labelled()
    for number in range(len(train)):
        read = train.read([number])
        for tokens, labels in zip(read.tokens.tolist(), read.labels.tolist(), strict=True):
            length = 2 + max(i for i, label in enumerate(labels) if label != NOT_COUNTED)
            found[tuple(tokens[:length]), (NOT_COUNTED, *labels[: length - 1])] += 1
    assert found == expected
