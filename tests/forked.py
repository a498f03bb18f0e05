"""Processes of this package at the price of a fork: a node agent, a pod, a command line.

``Forked(MODULE, ...)`` is a process like that of ``python -m MODULE ...``, with a session, an environment, signals and
an exit code of its own. A server, started with the first of them, has imported the package and forks each process. It
ends with the test process, and kills what is left then. Some tests of each module start the real command line.

With FORKS_PYTHON in its environment, such a process also forks the Python programs that it starts or becomes: they have
the parent, the session, the open files and the signals that they would have otherwise. Its value names libraries that
the server imports for them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import logging
import os
import pickle
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import scaletrain_cli
from scaletrain_cli.launch.node import inspection
from scaletrain_cli.launch.node.processes import reap
from scaletrain_cli.rundir import record
from scaletrain_cli.sent_command import sent
from scaletrain_cli.spec import load_spec

_PROJECT = Path(__file__).parent.parent
# Not imported by the server: what needs torch, whose threads a fork would lose.
_HEAVY = ("engine", "data", "worker.hugging_face", "worker.lightning")
AUDIT_EVENT = "scaletrain.tests.forked"
FORKS_PYTHON = "TESTS_FORK_PYTHON"
_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 20


class Forked:
    """A process, with the methods of Popen that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it with these open files: None is an empty stdin, else a pipe that communicate() reads."""
        sys.audit(AUDIT_EVENT)
        self.returncode: int | None = None
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        request |= {"folder": str(folder or Path.cwd()), "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        with open(os.devnull, encoding="utf-8") as empty:
            files = [empty.fileno() if stdin is None else stdin]
            files += [output if file is None else file for file in (stdout, stderr)]
            socket.send_fds(_server(), [pickle.dumps(request)], [status, *files])
        os.close(status)
        os.close(output)
        self.pid = self._read_number()

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            return None
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; return the exit code, minus the number of a signal."""
        if self.returncode is None:
            self.returncode = self._read_number()
            os.close(self._status)
        return self.returncode

    def communicate(self) -> str:
        """Wait for the end; return what the process has written to its pipe."""
        with open(self._output, encoding="utf-8") as file:
            text = file.read()
        self.wait()
        return text

    def send_signal(self, signum: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read_number(self) -> int:
        data = os.read(self._status, _NUMBER.size)
        assert data, "the server of forked processes has ended"
        return int(_NUMBER.unpack(data)[0])


class RealProcess:
    """The same by the real command line."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, stdout: int | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.STDOUT if stdout is None else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid, self.poll, self.wait = self._process.pid, self._process.poll, self._process.wait
        self.send_signal, self.kill = self._process.send_signal, self._process.kill

    def communicate(self) -> str:
        """Wait for the end; return what the process has written to its pipe."""
        return "".join(filter(None, self._process.communicate()))


def scaletrain(
    *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None, sent: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command line, by a fork; ``sent``: its standard input."""
    environment = os.environ if environment is None else environment
    with contextlib.ExitStack() as opened:
        given, out, err = (opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3))
        given.write(sent)
        given.seek(0)
        files = {"stdin": given.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        process = Forked("scaletrain_cli", arguments, environment, folder=folder, **files)
        process.communicate()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, process.wait(), out.read(), err.read())


@functools.cache
def _server() -> socket.socket:
    """Return the channel to the server, which starts now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(_PROJECT)}
    command = [sys.executable, "-m", __name__]
    # In a session of its own, so that Ctrl-C reaches the tests alone, and they end what they have started.
    process = subprocess.Popen(command, stdin=theirs, cwd=_PROJECT, env=environment, start_new_session=True)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(channel: socket.socket) -> None:
    _import(scaletrain_cli.__path__, "")
    load_spec(_PROJECT / "recipes" / "llama-10m-cpu.yaml", [])  # builds the validators
    sent.cache_clear()  # each process has variables of its own
    record._plan_reader()
    inspection.code_hash = functools.cache(inspection.code_hash)  # type: ignore[attr-defined]
    inspection.code_hash()  # type: ignore[attr-defined]
    gc.freeze()
    wakes, wakeup = os.pipe()
    for descriptor in (wakes, wakeup):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    try:
        while True:
            ready = select.select([channel, wakes], [], [])[0]
            if wakes in ready:
                os.read(wakes, _MOST_BYTES)
                for pid, code in reap():
                    status = running.pop(pid)
                    with contextlib.suppress(OSError):  # nobody waits for it any more
                        os.write(status, _NUMBER.pack(code))
                    os.close(status)
            if channel in ready:
                data, descriptors, *_ = socket.recv_fds(channel, _MOST_BYTES, 4)
                if not data:  # the test process has ended
                    break
                status, *files = descriptors
                request = pickle.loads(data)
                for library in request["environment"].get(FORKS_PYTHON, "").split():
                    importlib.import_module(library)
                mask = signal.pthread_sigmask(signal.SIG_SETMASK, request.pop("mask"))
                if (pid := os.fork()) == 0:
                    _be(files, **request)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                for descriptor in files:
                    os.close(descriptor)
                running[pid] = status
                os.write(status, _NUMBER.pack(pid))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _import(path: Iterable[str], prefix: str) -> None:
    for module in pkgutil.iter_modules(path, prefix):
        if module.name in _HEAVY or module.name.endswith("__main__"):
            continue
        found = importlib.import_module(f"scaletrain_cli.{module.name}")
        if module.ispkg:
            _import(found.__path__, f"{module.name}.")


def _be(files: list[int], *, module: str, arguments: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    """Become the process."""

    def run() -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _open_streams()
        if FORKS_PYTHON in environment:
            _fork_python(sys.path[2:])
        # As of ``python -m``; the first two entries are those of the server.
        sys.path[:2] = [folder, *_python_path()]
        importlib.invalidate_caches()
        sys.argv[1:] = arguments
        _run_module(module)

    _end_with(run)


def _python_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _run_module(module: str) -> None:
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it runs as __main__, from the beginning
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(run: Callable[[], None]) -> NoReturn:
    """Run a program, and end this process as the interpreter would."""
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:  # as the interpreter ends: it waits for threads, and 120 is its code for output that was lost
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120
        os._exit(int(code))


def _fork_python(installed: list[str]) -> None:
    """From now on fork the Python programs that this process starts. ``installed``: the end of their search path."""
    loaded = [vars(module) for name, module in sys.modules.items() if name.startswith("scaletrain_cli")]
    caches = [value for names in loaded for value in names.values() if isinstance(value, functools._lru_cache_wrapper)]
    empty = [function for function in caches if not function.cache_info().currsize]
    popen, spawn, execute = subprocess.Popen.__init__, os.posix_spawn, os.execv

    def become(
        words: list[str], environment: Mapping[str, str] | None, kept: Iterable[int] | None, **options: Any
    ) -> NoReturn:
        for function in empty:
            function.cache_clear()
        _end_with(functools.partial(_be_python, words, environment, kept, installed, **options))

    def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
        environment, prepare = options.get("env"), options.get("preexec_fn")
        if (words := _python_words(args, environment)) is not None:

            def child() -> None:
                if prepare is not None:
                    prepare()
                become(words, environment, options.get("pass_fds", ()))

            options["preexec_fn"] = child
        popen(process, args, *more, **options)

    def fork(path: str, command: list[str], environment: Mapping[str, str], **options: Any) -> int:
        if (words := _python_words(command, environment)) is None:
            return spawn(path, command, environment, **options)
        if (pid := os.fork()) == 0:
            if options.pop("setsid", False):
                os.setsid()
            for action, first, *rest in options.pop("file_actions", ()):
                if action == os.POSIX_SPAWN_OPEN:
                    os.dup2(os.open(*rest), first)
                else:
                    os.dup2(first, *rest)
            become(words, environment, None, **options)
        return pid

    def replace(path: str, command: list[str]) -> None:
        if (words := _python_words(command, None)) is not None:
            become(words, None, None)
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


def _be_python(
    words: list[str],
    environment: Mapping[str, str] | None,
    kept: Iterable[int] | None,
    installed: list[str],
    *,
    setsigdef: Iterable[int] = (),
    setsigmask: Iterable[int] | None = None,
) -> None:
    """Run a Python program as a new interpreter would.

    ``kept``: open files that it inherits; None: as they say. The signals are those of posix_spawn.
    """
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    atexit._clear()
    logging.root.handlers.clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in setsigdef:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if setsigmask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, setsigmask)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing
            if descriptor > 2 and not (os.get_inheritable(descriptor) if kept is None else descriptor in kept):
                os.close(descriptor)
    if environment is not None:
        given = dict(environment)
        os.environ.clear()
        os.environ.update(given)
    flags = list(itertools.takewhile(("-I", "-S", "-s", "-u").__contains__, words))
    kind, *arguments = words[len(flags) :]
    _open_streams("-u" in flags)
    sys.path[:] = ["", *_python_path(), *installed]
    importlib.invalidate_caches()
    if kind == "-m":
        module, *sys.argv[1:] = arguments
        _run_module(module)
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


def _open_streams(unbuffered: bool = False) -> None:
    """Open the standard streams as an interpreter does at its start."""
    _left.extend((sys.stdin, sys.stdout, sys.stderr))
    buffering = 1 if unbuffered or "PYTHONUNBUFFERED" in os.environ else -1
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


_left: list[Any] = []  # streams whose buffers are of another program


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
