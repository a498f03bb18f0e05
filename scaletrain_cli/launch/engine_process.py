"""Run the engine in a separate process, which keeps torch, numpy and the tokenizer out of the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import ExitCode, MissingPackageError, Place, PreemptedError, Problem, ScaletrainError
from scaletrain_cli.extras import extra_of, install_command
from scaletrain_cli.own_processes import SAFE_CHILDREN, absolute_paths, python_command
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.text import signal_text, visible

if TYPE_CHECKING:
    from scaletrain_cli.spec import RunSpec

_TERMINATED = 143  # 128 + SIGTERM, the shell convention
_CTRL_C_SECONDS = 0.5  # for the process to end by itself, if the terminal has sent the signal to it as well
_PATIENCE_SECONDS = 10.0  # after it was asked to end, for the process to remove partial files
_SIGNAL_SECONDS = 1.0  # within which a signal is handled


class EngineProcessError(ScaletrainError):
    """The engine process failed; carries the error that it returned, if any."""

    def __init__(self, exit_code: int, answer: Mapping[str, Any]) -> None:
        end = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was killed by {signal_text(-exit_code)}"
        message = answer.get("message") or f"the engine process {end}; its output is above."
        problems = tuple(
            Problem(
                Place(problem["file"], problem["line"], problem["where"]) if problem["file"] else problem["where"],
                *(problem[key] for key in ("key", "message", "given", "hint")),
            )
            for problem in answer.get("problems", ())
        )
        super().__init__(message, problems, remedy=None if problems else answer.get("remedy"), file=answer.get("file"))
        self.exit_code = exit_code if exit_code in set(ExitCode) else ExitCode.CRASHED
        self.code = answer.get("code") or "failed"


def require_installed(names: Sequence[str]) -> None:
    """Raise MissingPackageError, with the extra to install, if one of these packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        extra = extra_of(missing[0]) or "train"
        raise MissingPackageError(
            f"{', '.join(missing)} not installed: this command requires the extra {extra}.", install_command(extra)
        )


def spec_document(spec: RunSpec) -> str:
    """Return the document of a spec that the engine reads."""
    return json.dumps(spec.model_dump(mode="json", by_alias=True))


@contextlib.contextmanager
def spec_file(spec: RunSpec) -> Iterator[Path]:
    """Yield a file with the document of the spec, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        path = Path(folder) / "spec.json"
        create_file(path, spec_document(spec))
        yield path


def run_engine_command(
    *words: str, needs: Sequence[str], cwd: str | Path | None = None, on_line: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run ``engine/commands.py`` with these arguments and return the JSON object that it prints.

    Its stderr is passed on, to ``on_line`` if that is given. ``needs`` are the packages that it imports. Raises
    MissingPackageError if one is not installed, and EngineProcessError.
    """
    require_installed(needs)
    command = python_command("scaletrain_cli.engine.commands", *words)
    with subprocess.Popen(
        command,
        env=absolute_paths(os.environ) | SAFE_CHILDREN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        cwd=cwd,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed: list[str] = []
        readers = [
            threading.Thread(target=_pass_on, args=(process.stderr, on_line), daemon=True),
            threading.Thread(target=printed.extend, args=(process.stdout,), daemon=True),
        ]
        try:
            with _passing_on_termination(process):
                for reader in readers:
                    reader.start()
                for reader in readers:
                    while reader.is_alive():  # without a limit, a signal that comes just before the wait would be lost
                        reader.join(_SIGNAL_SECONDS)
                process.wait()
        except BaseException as error:
            # Ctrl-C in a terminal reaches the process as well; a signal to this process alone does not.
            if not isinstance(error, PreemptedError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CTRL_C_SECONDS)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
            process.kill()
            for reader in filter(threading.Thread.is_alive, readers):  # which hold the pipes that are closed now
                reader.join(_SIGNAL_SECONDS)
            raise
    answer: dict[str, Any] = {}
    with contextlib.suppress(IndexError, ValueError):
        document = json.loads(printed[-1])
        answer = document if isinstance(document, dict) else {}
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode != 0 or not answer:
        raise EngineProcessError(process.returncode, answer.get("error", {}))
    return answer


@contextlib.contextmanager
def _passing_on_termination(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass SIGTERM on to the process, and raise SystemExit for it; unchanged where the caller handles the signal.

    Without it the process would be left at work after the end of this one.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        process.terminate()
        sys.exit(_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _pass_on(lines: Iterable[str], take: Callable[[str], None] | None) -> None:
    with contextlib.suppress(ValueError):  # the pipe was closed: this process was interrupted
        for line in lines:
            shown = visible(line.rstrip("\n"))
            if take is not None:
                take(shown)
            else:
                print(shown, file=sys.stderr, flush=True)
