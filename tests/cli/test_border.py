"""The top level of the process: closed pipes, Ctrl-C, and kinds of terminals."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scaletrain_cli.errors import ExitCode, Problem, SpecError
from tests.cli.command_line import PROJECT, SMALL, scaletrain
from tests.cli.prepared_runs import living_process, prepare
from tests.terminals import terminal

COMMAND = [sys.executable, "-m", "scaletrain_cli"]


def test_a_closed_stdout_prints_no_error() -> None:
    line = f"{sys.executable} -m scaletrain_cli schema | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=PROJECT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("verb", ["events --follow", "logs --follow", "watch --json", "status --wait 9h", "recover"])
def test_a_verb_that_follows_ends_with_the_reader_of_its_output(verb: str) -> None:
    with living_process() as supervisor:
        prepare("running", "mine", supervisor)
        words = [*verb.split(), "--every", "9h"] if verb == "recover" else [*verb.split(), "mine"]
        reads, writes = os.pipe()
        process = subprocess.Popen([*COMMAND, *words], stdout=writes, stderr=subprocess.PIPE, text=True)
        os.close(writes)
        os.close(reads)
        _, said = process.communicate()
    assert (process.returncode, "error" in said) == (ExitCode.CRASHED, False)


def test_without_stdin_a_spec_on_it_is_refused_and_nothing_is_asked() -> None:
    prepare("finished", "mine")
    for words, said in (["validate", "-"], "a run spec is a mapping"), (["rm", "mine"], "without a terminal"):
        line = shlex.join([*COMMAND, *words]) + " <&-"
        done = subprocess.run(["bash", "-c", line], cwd=PROJECT, capture_output=True, text=True)
        assert done.returncode == ExitCode.USAGE
        assert said in done.stderr


def test_a_bug_is_one_message_with_the_traceback_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scaletrain_cli.spec.load_spec", lambda *arguments, **options: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = scaletrain("plan", SMALL, expect_bug=True, code=ExitCode.CRASHED)
    assert "ZeroDivisionError" in ended.err
    assert "This is a bug in ScaleTrain." in ended.err
    assert "Traceback" not in ended.err
    (kept,) = tmp_path.glob("scaletrain-traceback-*.txt")
    assert str(kept) in ended.err
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.read_text().startswith("Traceback (most recent call last)")
    as_json = scaletrain("plan", SMALL, "--json", expect_bug=True)
    assert (as_json.code, as_json.data["ok"], as_json.data["error"]["code"]) == (ExitCode.CRASHED, False, "internal")
    monkeypatch.setenv("SCALETRAIN_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in scaletrain("plan", SMALL, expect_bug=True).err


def test_a_piped_error_has_one_line_per_problem_that_starts_with_the_location() -> None:
    ended = scaletrain("plan", SMALL, "--set", "a=1", "--set", "b=2")
    head, *rest = ended.err.splitlines()
    assert head == f"error: {SMALL}: 2 problems in the run spec"
    assert [line[:9] for line in rest] == ["  --set a", "  --set b"]


def test_an_error_on_a_terminal_has_colors_and_does_not_wrap_the_location() -> None:
    place = f"{'deep/' * 40}run.yaml:3"
    program = (
        "from scaletrain_cli.errors import Problem, SpecError\n"
        "from scaletrain_cli.ui.console import show_error\n"
        f"show_error(SpecError('bad [red]markup[/]', (Problem({place!r}, 'a.b', 'wrong.', '\\x1b[31m', 'Stop.'),)))\n"
    )
    shown = on_a_terminal([sys.executable, "-c", program])
    assert "\x1b[1;31m" in shown
    assert "bad [red]markup[/]" in shown
    assert place in shown.replace("\r\n", "")
    assert "\\x1b[31m" in shown, "what a user gave is shown, not obeyed"


def test_a_plan_can_be_printed_on_a_terminal_without_unicode() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    done = subprocess.run([*COMMAND, "plan", str(SMALL)], cwd=PROJECT, capture_output=True, env=env)
    assert done.returncode == 0
    assert b"  activations" in done.stdout
    assert b"####" in done.stdout


def test_a_plan_is_not_wider_than_a_narrow_terminal() -> None:
    shown = on_a_terminal([*COMMAND, "plan", str(SMALL)])
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.replace("\r", ""))
    assert max(map(len, plain.split("\n"))) <= 80


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="a run on this machine needs the extra train")
def test_confirmation_is_requested_only_on_a_terminal(tmp_path: Path) -> None:
    shown = on_a_terminal([*COMMAND, "submit", str(SMALL)], answer="n\n", SCALETRAIN_RUNS=str(tmp_path))
    assert "Submit to local? [Y/n]" in shown
    assert "Nothing was done." in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_a_verb_that_changes_a_run_takes_the_newest_only_if_a_person_confirms_it(verb: str) -> None:
    with living_process() as supervisor:
        prepare("running" if verb == "cancel" else "failed", "mine", supervisor)
        missing = scaletrain(verb, code=ExitCode.USAGE)
        assert "RUN is missing. The newest run is mine: name it, or add --yes." in missing.err
        shown = on_a_terminal([*COMMAND, verb], answer="n\n")
    assert f"{verb.capitalize()} mine" in shown
    assert "Nothing was done." in shown


def on_a_terminal(command: list[str], answer: str = "", **environment: str) -> str:
    """Return the output of the command on a terminal of its own."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    known |= {"COLUMNS": "80", "LINES": "50", "TERM": "xterm-256color"} | environment
    with terminal(command, known) as opened:
        opened.type(answer)
        opened.to_the_end()
    return opened.text


def test_the_text_of_an_error_has_file_and_line() -> None:
    error = SpecError("run.yaml: 1 problem", (Problem("run.yaml:3", "a.b", "must be 1.", "2", "Use 1."),))
    assert str(error) == "run.yaml: 1 problem\n  run.yaml:3 a.b = 2: must be 1. Use 1."


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "options", [pytest.param([], id="words", marks=pytest.mark.long), pytest.param(["--json"], id="json")]
)
def test_a_full_disk_is_an_error_in_one_line(options: list[str]) -> None:
    command = [sys.executable, "-m", "scaletrain_cli", "plan", str(SMALL), *options]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=PROJECT, check=False)
    assert ended.returncode == ExitCode.CRASHED
    said = "error: the answer could not be written: No space left on device. Free some space on that disk, or set "
    assert ended.stderr == f"{said}$SCALETRAIN_RUNS (runs) or $TMPDIR to a folder on another one.\n"


def test_a_message_that_quotes_a_sentence_has_one_full_stop() -> None:
    error = SpecError("cannot read x: it is broken..", (Problem("a", "b", "said: no..", "1", "See '..'.. Stop."),))
    assert str(error) == "cannot read x: it is broken.\n  a b = 1: said: no. See '..'. Stop."
    kept = "look in .. or ../x or and so on... There are 1..3 of them"
    assert str(SpecError(kept)) == kept


def test_a_message_without_a_given_value_does_not_print_none() -> None:
    assert Problem("a", "layout.zero_stage", "is missing.").subject == "layout.zero_stage"
    assert Problem("a", "layout.zero_stage", "is wrong.", "9").subject == "layout.zero_stage = 9"
    shown = [str(Problem("run.yaml:1", "", "no.")), str(Problem("x", "k", "no.", None, None))]
    assert shown == ["run.yaml:1: no.", "x k: no."]
