"""One command line from its words to its exit code: what goes wrong becomes a message, or the envelope of ``--json``.

Every exception ends here. One that is not of the user's or the system's making is a bug: its traceback goes to a file
of this user, or to stderr where SCALETRAIN_TRACEBACK is set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from scaletrain_cli.cli.app import app, verb_words
from scaletrain_cli.cli.options import MEANINGS
from scaletrain_cli.errors import DeclinedError, ExitCode, Problem, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.unexpected import error_of_bug, error_of_system, known_error

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_TIMED_OUT = 124  # as timeout(1)
_ClickUsageError: Any = typer.BadParameter.__base__  # typer brings its own click from 0.26 on, and needs click before
_CODES = {_TIMED_OUT: "timeout", INTERRUPTED: "interrupted"} | {
    code.value: word
    for code, word in {
        ExitCode.CRASHED: "failed",
        ExitCode.USAGE: "usage",
        ExitCode.INFEASIBLE: "infeasible",
        ExitCode.SCHEDULER: "scheduler",
        ExitCode.WRONG_NODES: "wrong-nodes",
        ExitCode.PREEMPTED: "preempted",
        ExitCode.DO_NOT_REQUEUE: "do-not-requeue",
    }.items()
}
# Answers whose schema had its name before the envelope.
_SCHEMAS = {"preflight": "scaletrain.preflight-report/v1"}


class EndedError(ScaletrainError):
    """A verb ended with an exit code of its own and has shown why."""

    def __init__(self, exit_code: int, message: str | None = None, *, code: str | None = None, **more: Any) -> None:
        meaning = {_TIMED_OUT: "the time given was not enough", INTERRUPTED: "interrupted"} | {
            known.value: text for known, text in MEANINGS.items()
        }
        super().__init__(message or meaning.get(exit_code, f"ended with exit code {exit_code}"), **more)
        self.exit_code = exit_code
        self.code = code or _CODES.get(exit_code, "failed")


def run(words: Sequence[str]) -> int:
    """Run one command line, print its answer and its error, and return the exit code."""
    as_json = asks_for_json(words)
    if as_json:
        from scaletrain_cli.ui.json import forget_answer

        forget_answer()
    error = _invoked(words)
    code = ExitCode.DONE if error is None else error.exit_code
    try:
        if error is not None and not isinstance(error, EndedError | DeclinedError):
            _show(error)  # in words, also beside the envelope
        if as_json and (error is not None or not _shows_help(words)):
            code = _write_envelope(words, error)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has left, as in `| head`
        _drop_stdout()
    except OSError as full:
        _drop_stdout()
        if code == ExitCode.DONE:
            code = ExitCode.CRASHED
            _show(error_of_system(full, "the answer could not be written"))
    return int(code)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether ``--json`` is among the options, however wrong the rest of the command line is."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def _shows_help(words: Sequence[str]) -> bool:
    """Return whether a command line that went well printed help or the version, which are text in any case."""
    return bool({"--help", "-h", "--version"} & set(words))


def schema_of(words: Sequence[str]) -> str:
    """Return the schema of a command line's envelope: ``scaletrain.checkpoint-list/v1``."""
    verb = "-".join(verb_words(words))
    return _SCHEMAS.get(verb, f"scaletrain.{verb or 'error'}/v1")


def _invoked(words: Sequence[str]) -> ScaletrainError | None:
    """Run the verb; return what it ended with, None where all went well. Raises nothing."""
    try:
        code = app(list(words), prog_name="scaletrain", standalone_mode=False)
    except ScaletrainError as error:
        return error
    except SystemExit as end:
        return EndedError(end.code) if isinstance(end.code, int) and end.code else None
    except KeyboardInterrupt:
        return EndedError(INTERRUPTED)
    except typer.Abort:  # the end of stdin, where an answer was asked for
        return EndedError(INTERRUPTED, "no answer was given", code="declined")
    except _ClickUsageError as error:
        return _of_command_line(error, words)
    except BrokenPipeError:
        _drop_stdout()
        return EndedError(ExitCode.CRASHED, "the reader of the output has left", code="io")
    except Exception as error:
        return known_error(error, _doing(error, words))
    return EndedError(code) if isinstance(code, int) and code else None


def _doing(error: Exception, words: Sequence[str]) -> str:
    """Return what was being done; a full disk without a file's name is that behind stdout."""
    if isinstance(error, OSError) and error.filename is None and (is_full(error) or error.errno == errno.EIO):
        return "the answer could not be written"
    return " ".join(verb_words(words))


def _of_command_line(error: Any, words: Sequence[str]) -> ScaletrainError:
    """Return an unknown option or a missing argument as an error, shown as the parser shows it, with the usage."""
    error.show()
    option = getattr(error, "option_name", None) or next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    verb = " ".join(("scaletrain", *verb_words(words)))
    message = error.format_message() if error.message else "a verb is missing."
    problem = Problem("command line", option, message, hint=f"See `{verb} --help`.")
    return EndedError(error.exit_code, message, code="usage", problems=(problem,))


def _write_envelope(words: Sequence[str], error: ScaletrainError | None) -> int:
    """Write the envelope in one piece and return the exit code. Raises OSError."""
    from scaletrain_cli.ui.json import envelope_text, forget_answer

    try:
        text = envelope_text(schema_of(words), error)
    except (TypeError, ValueError) as bug:  # an answer that JSON cannot hold
        forget_answer()
        error = error_of_bug(bug)
        text = envelope_text(schema_of(words), error)
    sys.stdout.write(text + "\n")
    return ExitCode.DONE if error is None else error.exit_code


def _show(error: ScaletrainError) -> None:
    """Print the error on stderr, which may be gone or full as well."""
    from scaletrain_cli.ui.errors import show

    with contextlib.suppress(OSError):
        show(error)


def _drop_stdout() -> None:
    """Send what is still to be written to stdout nowhere; Python would complain when it closes the stream."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
