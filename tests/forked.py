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
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import scaletrain_cli
from scaletrain_cli.launch.node import inspection
from scaletrain_cli.launch.node.processes import reap
from scaletrain_cli.rundir import record
from scaletrain_cli.sent_run import sent
from scaletrain_cli.spec import load_spec
from tests.forked_python import FORKS_PYTHON, end_with, fork_python, open_streams, python_path, run_module

_PROJECT = Path(__file__).parent.parent
# Not imported by the server: what needs torch, whose threads a fork would lose.
_HEAVY = ("engine", "data", "worker.hugging_face", "worker.lightning")
AUDIT_EVENT = "scaletrain.tests.forked"
_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 20


def forking(environment: Mapping[str, str], libraries: str = "scaletrain_cli.engine.faults") -> dict[str, str]:
    """Return the environment of a forked process that forks the Python programs that it starts, too.

    ``libraries``: what the server imports for them; here what the stand-in engine needs.
    """
    return {**environment, FORKS_PYTHON: libraries}


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
    importlib.import_module("psutil")  # threads of agents import it, whose lock a fork would find taken
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
    # Ignored if the test that started this server was within a submission; later processes would ignore it, too.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
        open_streams()
        if FORKS_PYTHON in environment:
            fork_python(sys.path[2:])
        # As of ``python -m``; the first two entries are those of the server.
        sys.path[:2] = [folder, *python_path()]
        importlib.invalidate_caches()
        sys.argv[1:] = arguments
        run_module(module)

    end_with(run)


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
