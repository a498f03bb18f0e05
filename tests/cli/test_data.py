"""data prepare: a separate process tokenizes; its last line is the result and its exit code is kept."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode
from tests.cli.command_line import PROJECT, SMALL, Ended
from tests.cli.forked_command_line import forked_scaletrain
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizing needs the extra train")


@pytest.fixture(autouse=True)
def find_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.chdir(tmp_path)


def prepare(source: str, *more: str) -> Ended:
    small = ["--set", "data.tokenizer.vocab_size=300", "--set", "model.seq_len=8"]
    return forked_scaletrain("data", "prepare", SMALL, *small, "--set", f"data.source={source}", *more)


def test_text_is_tokenized_once() -> None:
    text = Path("a b $(x).jsonl")
    rows = "".join(f'{{"text": "It was the best of times, it was the worst of {n}."}}\n' for n in range(400))
    text.write_text(f'{rows}{{"text": "short"}}\n{{}}\n{{"text": ""}}\n')
    step = "{step: quality, rules: gopher_quality, min_words: 5, min_stop_words: 0}"
    steps = ("--set", f"data.prepare=[{step}]", "--set", "data.on_bad=skip", "--set", "data.validation_split=0.0001")
    first = prepare(text.name, "--json", *steps)
    assert first.code == 0, first.err
    assert first.data["train_tokens"] > 1000
    assert Path(first.data["path"]).is_dir()
    read = {"documents_read": 403, "documents_removed": 1, "documents_unusable": 2, "documents": 400}
    assert {name: first.data[name] for name in read} == read
    assert {name: first.data["sources"][0][name] for name in read} == read
    again = prepare(text.name, *steps)
    assert (again.code, again.out) == (0, f"{first.data['path']}\n")
    said = "source: 403 documents read, 1 removed by data.prepare, 2 that cannot be used, 400 left; "
    for shown in (
        said,
        "source: the validation split is shorter than one sequence of 8 tokens",
        "scaletrain data stats",
    ):
        assert shown in first.err
        assert shown in again.err


def test_a_missing_source_ends_with_2_and_the_reason() -> None:
    ended = prepare("nowhere/*.txt")
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert "\nerror: " in ended.err, "after what the process said"
    assert "nowhere" in ended.err
    as_json = prepare("nowhere/*.txt", "--json")
    assert (as_json.code, as_json.data["error"]["code"]) == (ExitCode.USAGE, "usage")
    assert "nowhere" in as_json.data["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_processes_without_a_trace_of_files(number: signal.Signals, tmp_path: Path) -> None:
    Path("text.jsonl").write_text("".join(f'{{"text": "It was the worst of times, {n}."}}\n' for n in range(300_000)))
    small = ["--set", "data.tokenizer.vocab_size=300", "--set", "data.source=text.jsonl", "--json"]
    command = [sys.executable, "-m", "scaletrain_cli", "data", "prepare", str(SMALL), *small]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        said = process.stderr.readline()
        assert "preparing" in said
        try:
            # os.walk, unlike rglob, passes over folders that are renamed meanwhile.
            wait_until(
                lambda: any(names for folder, _, names in os.walk(tmp_path) if folder.endswith("/workers")),
                "the preparation has begun",
            )
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                process.send_signal(number)  # as `kill` does: to the command alone
            out, rest = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 128 + number, rest
    assert "Traceback" not in rest
    if number == signal.SIGINT:
        assert json.loads(out)["error"]["code"] == "interrupted"
    left = [path for path in (tmp_path / "runs").rglob("*") if path.suffix in (".bin", ".tmp", ".draft")]
    assert [*left, *tmp_path.rglob("workers/*")] == []
