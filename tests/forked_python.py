"""Fork the Python programs that a process starts or becomes: with FORKS_PYTHON in its environment (tests/forked.py).

What a test sees of them is what a new interpreter would have: the parent, the session, the open files, the signals, the
variables, the search path and the end. Not its modules, which are there already, and not /proc/PID/cmdline.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

FORKS_PYTHON = "TESTS_FORK_PYTHON"


def python_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def run_module(module: str) -> None:
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it runs as __main__, from the beginning
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(run: Callable[[], None]) -> NoReturn:
    """Run a program, and end this process as the interpreter would."""
    code: Any = 1
    interrupted = False
    try:
        try:
            run()
            code = 0
        except SystemExit as end:
            code = 0 if end.code is None else end.code
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException as error:
            traceback.print_exc()
            interrupted = isinstance(error, KeyboardInterrupt)
        # As the interpreter ends: it waits for threads, and 120 is its code for output that was lost.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def fork_python(installed: list[str]) -> None:
    """From now on fork the Python programs that this process starts. ``installed``: the end of their search path."""
    loaded = [vars(module) for name, module in sys.modules.items() if name.startswith("scaletrain_cli")]
    caches = [value for names in loaded for value in names.values() if isinstance(value, functools._lru_cache_wrapper)]
    empty = [function for function in caches if not function.cache_info().currsize]
    popen, spawn, execute = subprocess.Popen.__init__, os.posix_spawn, os.execv

    def become(
        words: list[str],
        environment: Mapping[str, str] | None,
        kept: Iterable[int] | None,
        setsigmask: Iterable[int],
        setsigdef: Iterable[int] = (),
    ) -> NoReturn:
        for function in empty:
            function.cache_clear()
        _be_interpreter(environment, kept, setsigmask, setsigdef)
        end_with(functools.partial(_run_python, words, installed))

    def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
        environment, prepare = options.get("env"), options.get("preexec_fn")
        if (words := _python_words(args, environment)) is None:
            popen(process, args, *more, **options)
            return

        def child() -> None:
            if prepare is not None:
                prepare()
            become(words, environment, options.get("pass_fds", ()), setsigmask=mask)

        with _no_signals() as mask:
            popen(process, args, *more, **{**options, "preexec_fn": child})

    def fork(path: str, command: list[str], environment: Mapping[str, str], **options: Any) -> int:
        if (words := _python_words(command, environment)) is None:
            return spawn(path, command, environment, **options)

        def child() -> None:
            if options.get("setsid"):
                os.setsid()
            for action, first, *rest in options.get("file_actions", ()):
                if action == os.POSIX_SPAWN_OPEN:
                    os.dup2(os.open(*rest), first)
                elif action == os.POSIX_SPAWN_CLOSE:
                    os.close(first)
                else:
                    os.dup2(first, *rest)
            signals = (options.get("setsigmask", mask), options.get("setsigdef", ()))
            become(words, environment, None, *signals)

        with _no_signals() as mask:
            if (pid := os.fork()) == 0:
                end_with(child)
        return pid

    def replace(path: str, command: list[str]) -> None:
        if (words := _python_words(command, None)) is not None:
            become(words, None, None, signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()))
        execute(path, command)

    subprocess.Popen.__init__ = start  # type: ignore[assignment]
    os.posix_spawn, os.execv = fork, replace  # type: ignore[assignment]


def _python_words(command: Any, environment: Mapping[str, str] | None) -> list[str] | None:
    """Return the words after the interpreter; None for another program."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    program, *words = map(os.fsdecode, command)
    if program == sys.executable:
        return words
    script = shutil.which(program, path=(os.environ if environment is None else environment).get("PATH"))
    if script is None:
        return None
    with open(script, "rb") as file:
        is_python = file.readline() == f"#!{sys.executable}\n".encode()
    return [script, *words] if is_python else None


@contextlib.contextmanager
def _no_signals() -> Iterator[set[signal.Signals]]:
    """Block all signals, which would run the handlers of the parent in a new process. Gives those blocked before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_interpreter(
    environment: Mapping[str, str] | None, kept: Iterable[int] | None, mask: Iterable[int], default: Iterable[int]
) -> None:
    """Have the signals, the open files and the variables of a new interpreter.

    ``kept``: open files that it inherits; None: as they say. ``mask``: the signals blocked. ``default``: those that are
    ignored no more.
    """
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    atexit._clear()
    logging.root.handlers.clear()
    atexit.register(logging.shutdown)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in default:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing
            if descriptor > 2 and not (os.get_inheritable(descriptor) if kept is None else descriptor in kept):
                os.close(descriptor)
    if environment is not None:
        given = dict(environment)
        os.environ.clear()
        os.environ.update(given)


def _run_python(words: list[str], installed: list[str]) -> None:
    flags = list(itertools.takewhile(("-I", "-S", "-s", "-u").__contains__, words))
    kind, *arguments = words[len(flags) :]
    open_streams("-u" in flags)
    sys.path[:] = [] if "-I" in flags else ["" if kind == "-c" else str(Path.cwd()), *python_path()]
    sys.path += [path for path in installed if "-S" not in flags or "site-packages" not in path]
    importlib.invalidate_caches()
    if kind == "-m":
        module, *sys.argv[1:] = arguments
        run_module(module)
    elif kind == "-c":
        code, *arguments = arguments
        sys.argv[:] = [kind, *arguments]
        if arguments and not hasattr(sys.modules.get(arguments[0]), "__path__"):
            sys.modules.pop(arguments[0], None)  # as the module that own_processes.START runs
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(main))
    else:
        sys.argv[:] = [kind, *arguments]
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def open_streams(unbuffered: bool = False) -> None:
    """Open the standard streams as an interpreter does at its start."""
    _left.extend((sys.stdin, sys.stdout, sys.stderr))
    buffering = 1 if unbuffered or "PYTHONUNBUFFERED" in os.environ else -1
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


_left: list[Any] = []  # streams whose buffers are of another program
