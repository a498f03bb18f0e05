"""Untrusted text cannot control a terminal: no colors, titles, clipboard, links or text direction."""

import ast
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scaletrain_cli.errors import Place, Problem, UsageError
from scaletrain_cli.text import visible
from scaletrain_cli.ui.console import document, say, show_error
from tests.cli.command_line import scaletrain
from tests.launch.conftest import make_plan, make_spec
from tests.source_trees import nodes_of

PACKAGE = Path(__file__).parent.parent.parent / "scaletrain_cli"
ATTACKS = {
    "colour": "\x1b[31mred",
    "cursor": "\x1b[2J\x1b[H$ rm -rf ~",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\",
    "title": "\x1b]0;owned\x07",
    "C1 control": "\x9b31mred \x9d52;c;eA==\x9c",
    "device string": '\x1bP$q"p\x1b\\ \x90',
    "carriage return": "loss nan\rloss 1.0",
    "backspace": "bad\x08\x08\x08ok",
    "form feed": "a\x0bb\x0cc",
    "direction": "\u202etxt.exe\u202c \u2066a\u2069 \u061c",
    "invisible": "a\u200bb\ufeffc\u2060d\xade",
    "separators": "a\u2028b\u2029c\x85d",
    "tags": "\U000e0041\U000e007f",
    "half a character": "\ud83d",
    "null": "a\x00b",
}
HARMLESS = "step 1\tloss 2.5 µs – 漢字　ÅÄÖ שלום مرحبا 👩‍👩‍👧 ñ \n"


def obeyed(text: str) -> list[str]:
    """The characters that a terminal may act on."""
    kept = "\u200c\u200d"
    visible_formats = {c for c in text if unicodedata.category(c) == "Cf" and unicodedata.bidirectional(c) == "AN"}
    odd = {"Cc", "Cf", "Zl", "Zp", "Cs"}
    # Kaithi and other scripts have number signs of category Cf, which are drawn.
    drawn = visible_formats | {
        c for c in text if unicodedata.name(c, "").endswith(("NUMBER SIGN", "NUMBER SIGN ABOVE", "MARK ABOVE"))
    }
    drawn |= {c for c in text if unicodedata.name(c, "").startswith(("SYRIAC ABBREVIATION", "ARABIC "))} - {"\u061c"}
    return [c for c in text if unicodedata.category(c) in odd and c not in "\n\t" and c not in kept and c not in drawn]


@given(st.text(st.characters()))
@example("".join(map(chr, range(0x300))))
@example("".join(ATTACKS.values()))
def test_visible_escapes_all_control_sequences(text: str) -> None:
    assert obeyed(visible(text)) == []
    assert visible(visible(text)) == visible(text)


def test_every_unicode_control_character_is_escaped() -> None:
    assert obeyed(visible("".join(map(chr, range(sys.maxunicode + 1))))) == []


def test_letters_of_all_scripts_line_ends_and_tabs_are_kept() -> None:
    assert visible(HARMLESS) == HARMLESS


@pytest.mark.parametrize("name", ATTACKS)
def test_logs_escape_control_sequences(name: str) -> None:
    from scaletrain_cli.launch.attempts import begin_attempt
    from scaletrain_cli.launch.submit import create_run

    spec = make_spec("cluster.gpus_per_node=1")
    run = create_run(spec, make_plan(spec), "r1").run
    begin_attempt(run, spec, scheduler="local", job_id="1", nodes=("n",))
    log = run.attempt(1) / "logs" / "n-00000.log"
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(f"before {ATTACKS[name]} after\n{HARMLESS}".encode("utf-8", "surrogatepass"))
    for words in (["logs", "r1"], ["logs", "r1", "--tail", "3"], ["status", "r1"], ["explain", "r1"]):
        ended = scaletrain(*words)
        assert obeyed(ended.out) == [], words
        assert obeyed(ended.err) == [], words
    assert HARMLESS in scaletrain("logs", "r1").out


@pytest.mark.parametrize("name", ATTACKS)
def test_errors_and_notes_escape_control_sequences(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    attack = ATTACKS[name]
    problem = Problem(Place(f"{attack}.yaml", 3), attack, attack, attack, attack)
    show_error(UsageError(attack, (problem,), remedy=attack))
    say(attack)
    shown = capsys.readouterr()
    assert obeyed(shown.out + shown.err) == []


def test_a_document_is_unchanged_in_a_pipe_and_escaped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert document("\x1b[31m") == "\x1b[31m"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert document("\x1b[31m") == "\\x1b[31m"


def test_a_line_of_kilobytes_hides_no_other_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = f"data:\n  run.json: {'x' * 31_000}\n---\nkind: JobSet\n"
    assert document(manifest) == manifest, "which kubectl applies"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    first, cut, *rest = document(manifest).split("\n")
    assert (first, rest) == ("data:", ["---", "kind: JobSet", ""])
    assert cut.startswith("  run.json: xxx")
    assert cut.endswith("... (31.0 kB; whole in a pipe or a file)")


def test_every_verb_prints_through_visible_or_document() -> None:
    wrong = []
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        for node in nodes_of(path):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="typer"), attr="echo" | "secho"), args=[what, *_]):
                    safe = isinstance(what, ast.Constant) or (
                        isinstance(what, ast.Call)
                        and isinstance(what.func, ast.Name)
                        and what.func.id in ("visible", "document")
                    )
                    wrong += [] if safe else [f"{path.name}:{node.lineno}"]
                case ast.Call(func=ast.Name(id="print")):
                    wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []
