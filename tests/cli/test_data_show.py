"""data show: rows with the part in the loss marked, from the first rows and without preparing anything."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.ui.data_images import show_rows
from tests.cli.command_line import PROJECT, SMALL, Ended, scaletrain
from tests.cli.forked_command_line import forked_scaletrain

pytestmark = pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizing needs the extra train")

ROWS = [
    {"messages": [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": f"Answer {n}."}]}
    for n in range(20)
]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def show(*more: str) -> Ended:
    settings = ("data.source=rows.jsonl", "data.tokenizer.vocab_size=300", "training.objective=sft")
    return forked_scaletrain("data", "show", SMALL, *(word for each in settings for word in ("--set", each)), *more)


def test_what_is_in_the_loss_stands_in_brackets_and_nothing_is_prepared() -> None:
    shown = show("--row", "3", "--count", "1")
    assert shown.code == 0, shown.err
    assert "row 3  rows.jsonl:3" in shown.out
    assert "<|im_start|>user\nQuestion 2?<|im_end|>\n<|im_start|>assistant\n[[Answer 2.<|im_end|>\n]]" in shown.out
    assert "format messages; of the first 20 rows:" in shown.out
    assert not Path("runs").exists()
    beyond = show("--row", "21")
    assert beyond.code == ExitCode.USAGE
    assert "data.source has 20 rows; there is no row 21" in beyond.err


def test_the_answer_as_json_has_rows_parts_and_counts() -> None:
    answer = show("--json", "--set", "data.packing=best_fit", "--set", "data.loss_on=all").data
    assert [row["row"] for row in answer["rows"]] == [1, 2, 3]
    (document,) = answer["rows"][0]["documents"]
    assert [part["weight"] for part in document["parts"]] == [0, 1], "the first token is no label"
    assert "".join(part["text"] for part in document["parts"]).count("<|im_end|>") == 2
    counted = answer["counted"]
    assert counted["rows"] == 20
    assert counted["sequences"] < 20
    assert 0.5 < counted["filled"] <= 1


def test_a_row_that_cannot_be_used_ends_with_2_and_its_line() -> None:
    Path("rows.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"messages": [{"role": "user"}]}\n')
    ended = show()
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert "rows.jsonl:2: message 0 of the column messages must have a role and content" in " ".join(ended.err.split())


def test_prepared_data_are_shown_from_their_files() -> None:
    Path("made").mkdir()
    Path("made/dataset.json").write_text("{}")
    ended = show("--set", "data.source=made")
    assert ended.code == ExitCode.USAGE
    assert "Set data.source to these files." in " ".join(ended.err.split())


def test_text_for_pretraining_has_no_rows_to_show() -> None:
    assert "reads text as it is and not rows" in scaletrain("data", "show", SMALL, code=ExitCode.USAGE).err


def test_colors_replace_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    part = [{"text": "ask \x1b", "weight": 0.0}, {"text": "answer", "weight": 1.0}, {"text": "half", "weight": 0.5}]
    document = {"name": "text", "tokens": 3, "target_tokens": 2, "parts": part}
    counted = dict.fromkeys(
        ("rows", "truncated", "without_target", "too_long", "unusable", "target_tokens", "sequences"), 1
    )
    show_rows(
        {
            "rows": [{"row": 1, "where": "a:1", "state": "truncated", "documents": [document]}],
            "counted": {**counted, "tokens": 3, "filled": 0.5, "lost": {"reasoning": 1}},
            **{"format": "messages", "packing": "none", "seq_len": 8, "tokenizer_trained_on_rows": None},
        }
    )
    out = capsys.readouterr().out
    assert "[[" not in out
    assert "\x1b[32manswer" in out
    assert "\x1b[33mhalf" in out
    assert "ask \\x1b" in out, "control characters of the data do not reach the terminal"
    assert "truncated" in out
    assert "not in tokens  reasoning of 1 row" in out
