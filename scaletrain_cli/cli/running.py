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
from scaletrain_cli.cli.exit_codes import MEANINGS
from scaletrain_cli.errors import DeclinedError, ExitCode, MissingPackageError, Problem, ScaletrainError
from scaletrain_cli.extras import extra_of, install_command

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
_LONGEST_MESSAGE = 500
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, or set $SCALETRAIN_RUNS (runs) or $TMPDIR to another one.",
    errno.EDQUOT: "Your quota is used up: delete something, or set $SCALETRAIN_RUNS (runs) to another disk.",
    errno.EFBIG: "A limit on the size of files is set (ulimit -f): raise it.",
    errno.EACCES: "Check its owner and permissions, or set $SCALETRAIN_RUNS (runs) to a folder that you can write.",
    errno.EPERM: "Check its owner and permissions, or set $SCALETRAIN_RUNS (runs) to a folder that you can write.",
    errno.EROFS: "Set $SCALETRAIN_RUNS (runs) or $TMPDIR to a folder on a file system that can be written.",
    errno.ENOENT: "It is not there, or was removed meanwhile: check the path and run the command again.",
    errno.ENOTDIR: "A file stands where a folder is needed: check the path, $SCALETRAIN_RUNS (runs) and $TMPDIR.",
    errno.EISDIR: "A folder stands where a file is needed: move it away.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENFILE: "The machine has no open files left: try again later.",
    errno.EIO: "The disk or the network file system fails: ask its administrator.",
    errno.ESTALE: "The network file system has lost it: run the command again.",
    errno.ENAMETOOLONG: "Give a shorter name.",
    errno.ENOMEM: "The machine has no memory left: run the command on another one.",
    errno.EAGAIN: "A limit on processes or memory was reached (ulimit -u): raise it, or try again.",
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
            _show(_of_system(full, "the answer could not be written"))
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
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None
        return _of_system(error, "the answer could not be written" if full else " ".join(verb_words(words)))
    except ImportError as error:
        return _of_import(error) or _of_bug(error)
    except Exception as error:
        return _of_bug(error)
    return EndedError(code) if isinstance(code, int) and code else None


def _of_command_line(error: Any, words: Sequence[str]) -> ScaletrainError:
    """Return an unknown option or a missing argument as an error, shown as the parser shows it, with the usage."""
    error.show()
    option = getattr(error, "option_name", None) or next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    verb = " ".join(("scaletrain", *verb_words(words)))
    message = error.format_message() if error.message else "a verb is missing."
    problem = Problem("command line", option, message, hint=f"See `{verb} --help`.")
    return EndedError(error.exit_code, message, code="usage", problems=(problem,))


def _of_system(error: OSError, doing: str) -> ScaletrainError:
    """Return what the operating system refused, and what to do: it is nobody's bug."""
    file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    reason = error.strerror or str(error) or type(error).__name__
    place = f"{file}: {reason}" if file else reason
    found = ScaletrainError(f"{doing}: {place}." if doing else f"{place}.", remedy=_REMEDIES.get(error.errno or 0))
    found.code, found.file = "io", file
    return found


def _of_import(error: ImportError) -> ScaletrainError | None:
    """Return which extra a missing package comes with; None for a package that no extra brings."""
    package = (error.name or "").partition(".")[0]
    extra = extra_of(package)
    if extra is None:
        return None
    return MissingPackageError(f"{package} is not installed.", remedy=f"Run {install_command(extra)}.")


def _of_bug(error: Exception) -> ScaletrainError:
    """Return one message about a bug; the traceback goes to stderr or to a file, and its place into the message."""
    import traceback

    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE].rstrip(": ")
    remedy = _traceback_kept(text)
    found = ScaletrainError(f"internal error: {what}{place}. This is a bug in ScaleTrain.", remedy=remedy)
    found.code = "internal"
    return found


def _traceback_kept(text: str) -> str:
    """Print or keep a traceback; return the sentence that says where it is."""
    if not os.environ.get("SCALETRAIN_TRACEBACK"):
        import tempfile

        try:
            number, path = tempfile.mkstemp(prefix="scaletrain-traceback-", suffix=".txt")  # 0600, and never a link
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return f"Report it with the traceback in {path}, or set SCALETRAIN_TRACEBACK=1 to print it."
        except OSError:  # no place for it: print it after all
            pass
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
    return "Report it with the traceback above."


def _write_envelope(words: Sequence[str], error: ScaletrainError | None) -> int:
    """Write the envelope in one piece and return the exit code. Raises OSError."""
    from scaletrain_cli.ui.json import envelope_text, forget_answer

    try:
        text = envelope_text(schema_of(words), error)
    except (TypeError, ValueError) as bug:  # an answer that JSON cannot hold
        forget_answer()
        error = _of_bug(bug)
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
