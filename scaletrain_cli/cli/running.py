"""Run one command line: exceptions become error messages, the envelope of ``--json`` and exit codes.

An unexpected exception is a bug: its traceback is written to a file of the user, or to stderr if SCALETRAIN_TRACEBACK
is set.
"""

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from scaletrain_cli.cli.app import app, verb_words
from scaletrain_cli.cli.elsewhere import NowReachableError, run_on_login_node, run_on_volume
from scaletrain_cli.cli.options import MEANINGS
from scaletrain_cli.errors import DeclinedError, ExitCode, Problem, ScaletrainError
from scaletrain_cli.full_disk import is_full
from scaletrain_cli.ui.json import envelope_text, forget_answer
from scaletrain_cli.unexpected import error_of_bug, error_of_system, known_error

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_TIMED_OUT = 124  # as timeout(1)
_ClickUsageError: Any = typer.BadParameter.__base__  # typer includes its own copy of click from 0.26 on
# Code and meaning of a verb that only returned an exit code.
_ENDS = {code.value: (code.name.lower().replace("_", "-"), text) for code, text in MEANINGS.items()} | {
    ExitCode.CRASHED.value: ("failed", MEANINGS[ExitCode.CRASHED]),
    _TIMED_OUT: ("timeout", "timed out"),
    INTERRUPTED: ("interrupted", "interrupted"),
}
# Schemas whose names differ from the verb.
_SCHEMAS = {"preflight": "scaletrain.preflight-report/v1"}


class EndedError(ScaletrainError):
    """A verb ended with this exit code and has already printed the reason."""

    def __init__(self, exit_code: int, message: str | None = None, *, code: str | None = None, **more: Any) -> None:
        word, meaning = _ENDS.get(exit_code, ("failed", f"ended with exit code {exit_code}"))
        super().__init__(message or meaning, **more)
        self.exit_code, self.code = exit_code, code or word


def run(words: Sequence[str]) -> int:
    """Run one command line, print its answer and its error, and return the exit code."""
    if os.environ.get("SCALETRAIN_LOG"):
        from scaletrain_cli.log_setup import set_up_logging

        set_up_logging("scaletrain")
    # Even if the rest of the command line is invalid.
    as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    if as_json:
        forget_answer()
    if (there := _elsewhere(words, run_on_login_node)) is None:
        there = _elsewhere(words, run_on_volume)
    if isinstance(there, int):
        return there
    error = there or _invoked(words)
    while isinstance(error, NowReachableError):
        there = _elsewhere(words, functools.partial(run_on_volume, before=error))
        if isinstance(there, int):
            return there
        error = there or _invoked(words)
    code = ExitCode.DONE if error is None else error.exit_code
    try:
        if error is not None and not isinstance(error, EndedError | DeclinedError):
            _show(error)  # text on stderr, even with --json
        if as_json and (error is not None or not bool({"--help", "-h", "--version"} & set(words))):
            code = _write_envelope(words, error)
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed, as by `| head`
        _drop_stdout()
    except OSError as full:
        _drop_stdout()
        if code == ExitCode.DONE:
            code = ExitCode.CRASHED
            _show(error_of_system(full, "the answer could not be written"))
    return int(code)


def schema_of(words: Sequence[str]) -> str:
    """Return the schema of a command line's envelope: ``scaletrain.checkpoint-list/v1``."""
    verb = "-".join(verb_words(words))
    return _SCHEMAS.get(verb, f"scaletrain.{verb or 'error'}/v1")


def _elsewhere(words: Sequence[str], run_there: Callable[[Sequence[str]], int | None]) -> int | ScaletrainError | None:
    """Return the exit code of a verb that ran elsewhere, an error before or meanwhile, or None where it runs here."""
    try:
        return run_there(words)
    except ScaletrainError as error:
        return error
    except KeyboardInterrupt:
        return EndedError(INTERRUPTED)
    except _ClickUsageError:
        return None  # the verb reports it
    except Exception as error:
        return known_error(error, _failed_action(error, words))


def _invoked(words: Sequence[str]) -> ScaletrainError | None:
    """Run the verb and return its error, or None on success. Raises nothing."""
    try:
        code = app(list(words), prog_name="scaletrain", standalone_mode=False)
    except ScaletrainError as error:
        return error
    except SystemExit as end:
        return EndedError(end.code) if isinstance(end.code, int) and end.code else None
    except KeyboardInterrupt:
        return EndedError(INTERRUPTED)
    except typer.Abort:  # end of stdin at a prompt
        return EndedError(INTERRUPTED, "no answer was given", code="declined")
    except _ClickUsageError as error:
        return _usage_error(error, words)
    except BrokenPipeError:
        _drop_stdout()
        return EndedError(ExitCode.CRASHED, "the reader closed stdout", code="io")
    except Exception as error:
        return known_error(error, _failed_action(error, words))
    return EndedError(code) if isinstance(code, int) and code else None


def _failed_action(error: Exception, words: Sequence[str]) -> str:
    """Return what failed; a full disk without a file name means that stdout could not be written."""
    if isinstance(error, OSError) and error.filename is None and (is_full(error) or error.errno == errno.EIO):
        return "the answer could not be written"
    return " ".join(verb_words(words))


def _usage_error(error: Any, words: Sequence[str]) -> ScaletrainError:
    """Print the parser's message with the usage, and return it as an error."""
    error.show()
    option = getattr(error, "option_name", None) or next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    verb = " ".join(("scaletrain", *verb_words(words)))
    message = error.format_message() if error.message else "missing command."
    problem = Problem("command line", option, message, hint=f"See `{verb} --help`.")
    return EndedError(error.exit_code, message, code="usage", problems=(problem,))


def _write_envelope(words: Sequence[str], error: ScaletrainError | None) -> int:
    """Write the envelope in one piece and return the exit code. Raises OSError."""
    try:
        text = envelope_text(schema_of(words), error)
    except (TypeError, ValueError) as bug:  # not representable as JSON
        forget_answer()
        error = error_of_bug(bug)
        text = envelope_text(schema_of(words), error)
    sys.stdout.write(text + "\n")
    return ExitCode.DONE if error is None else error.exit_code


def _show(error: ScaletrainError) -> None:
    """Print the error to stderr, ignoring errors of stderr."""
    from scaletrain_cli.ui.console import show_error

    with contextlib.suppress(OSError):
        show_error(error)


def _drop_stdout() -> None:
    from scaletrain_cli.ui.console import drop_output

    drop_output(sys.stdout)
