"""What `exec`, `shell` and `port-forward` do on any back end, checked with real processes.

The commands are started as a user starts them; ``runs`` is the run id or its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.ports import reserved_port
from tests.waiting import wait_until

SCALETRAIN = (sys.executable, "-m", "scaletrain_cli")


class Sessions:
    """The command line of a user of one run."""

    def __init__(self, run: str, environment: Mapping[str, str]) -> None:
        self.run, self.environment = run, dict(environment)

    def exec(self, *words: str, options: Sequence[str] = (), given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [*SCALETRAIN, "exec", self.run, *options, "--", *words]
        return subprocess.run(command, env=self.environment, input=given, capture_output=True)

    @contextlib.contextmanager
    def start(self, verb: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a verb; it is killed at the end of the block."""
        with subprocess.Popen(
            [*SCALETRAIN, verb, self.run, *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def passes_streams_and_the_exit_code_on(self) -> None:
        """Every byte arrives, on the stream that it was written to, and the code is that of the command."""
        data = os.urandom(300_000)
        done = self.exec("sh", "-c", "cat; echo oops >&2; exit 41", given=data)
        assert (done.stdout == data, done.returncode) == (True, 41)
        assert done.stderr.decode().splitlines()[-1] == "oops"
        assert self.exec("no-such-program").returncode == 127
        assert self.exec("sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM

    def has_the_environment_of_the_ranks(self, run_dir: str, rank: int) -> None:
        """Variables and Python are those of the ranks; only with --rank those of one of them."""
        done = self.exec("sh", "-c", 'pwd; echo "$FAKE"; which python; env')
        assert done.returncode == 0, done.stderr.decode()
        shown = done.stdout.decode().splitlines()
        assert shown[0] == run_dir
        assert "steps" in shown[1]
        assert shown[2] == os.path.join(os.path.dirname(sys.executable), "python")
        assert f"SCALETRAIN_RUN_DIR={run_dir}" in shown
        names = {line.partition("=")[0] for line in shown}
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "SCALETRAIN_HEARTBEAT_FD"} & names
        script = "echo $RANK $LOCAL_RANK; tr '\\0' ' ' < /proc/$SCALETRAIN_RANK_PID/cmdline"
        own = self.exec("sh", "-c", script, options=("--rank", str(rank))).stdout.decode().splitlines()
        assert own[0].startswith(f"{rank} ")
        assert "fake_engine" in own[1]

    def streams_output_and_passes_ctrl_c_on(self) -> None:
        """Output arrives while the command runs, without a newline too; Ctrl-C becomes a SIGINT of the command."""
        script = (
            "import sys, time\n"
            "try:\n    print('ready', end='', flush=True)\n    time.sleep(60)\n"
            "except KeyboardInterrupt:\n    print(' interrupted', flush=True)\n    sys.exit(9)"
        )
        with self.start("exec", "--", sys.executable, "-c", script) as process:
            assert process.stdout is not None
            assert os.read(process.stdout.fileno(), 100) == b"ready"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == b" interrupted\n"
            assert process.wait() == 9

    def ends_the_command_of_a_user_who_is_gone(self) -> None:
        """A killed client leaves no process: the command and its children get SIGHUP."""
        mark = f"{time.time_ns()}"
        with self.start("exec", "--", "sh", "-c", f"sleep 3600; : {mark}") as process:
            wait_until(lambda: pids(mark, without=process.pid), "the command runs")
            process.kill()
        wait_until(lambda: not pids(mark), "the command has ended")

    def opens_a_shell_with_a_terminal_of_the_same_size(self) -> None:
        with self.terminal("shell") as (process, terminal):
            resize(terminal, 31, 97)
            screen = Screen(terminal)
            screen.wait_for(r"ends the shell")
            screen.wait_for(r"[#$] ")
            screen.type("stty size; echo attempt=$SCALETRAIN_ATTEMPT\n")
            screen.wait_for(r"31 97\r\n[^\n]*attempt=1")
            resize(terminal, 40, 111)
            os.kill(process.pid, signal.SIGWINCH)  # the kernel sends it to a process in front of its own terminal
            screen.type("sleep 0.5; stty size; echo sleeps; sleep 300\n")
            screen.wait_for(r"40 111\r\n[^\n]*sleeps")
            screen.type("\x03")
            screen.type("exit 6\n")
            screen.to_the_end()
            assert process.wait() == 6, screen.text
            assert termios.tcgetattr(terminal)[3] & termios.ICANON, "the terminal is as it was"

    @contextlib.contextmanager
    def terminal(self, verb: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """Start a verb in a terminal; yield its process, and the other end of the terminal."""
        own, of_process = pty.openpty()
        resize(own, 31, 97)
        process = subprocess.Popen(
            [*SCALETRAIN, verb, self.run, *words],
            env=self.environment | {"TERM": "xterm", "SHELL": "/bin/sh", "ENV": "", "PS1": "$ "},
            stdin=of_process,
            stdout=of_process,
            stderr=of_process,
            start_new_session=True,
        )
        try:
            yield process, own
        finally:
            process.kill()
            process.wait()
            for descriptor in (own, of_process):
                os.close(descriptor)

    def forwards_a_port(self, port: int, local: int, *options: str) -> None:
        """Many connections at once, each with its own bytes; Ctrl-C ends it, and nothing listens or runs any more.

        ``port``: of a server on the node that sends back what it receives.
        """
        with self.start("port-forward", f"{local}:{port}", f"0:{reserved_port()}", *options) as process:
            assert process.stderr is not None
            lines = [process.stderr.readline().decode() for _ in range(3)]
            found = re.search(r"127\.0\.0\.1:(\d+) leads to port \d+ of", lines[2])
            assert found is not None, lines
            for _ in range(2):
                ends = [socket.create_connection(("127.0.0.1", local)) for _ in range(8)]
                sent = [bytes([number]) * 200_000 for number in range(8)]
                for end, data in zip(ends, sent, strict=True):
                    end.sendall(data)
                    end.shutdown(socket.SHUT_WR)
                assert [received(end) for end in ends] == sent
            with socket.create_connection(("127.0.0.1", int(found[1]))) as refused:
                assert received(refused) == b""
            assert "refuses the connection" in process.stderr.readline().decode()
            assert listens_at(local) == ["127.0.0.1"]
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0, process.stderr.read().decode()
        assert listens_at(local) == []


ECHO_SERVER = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
socketserver.ThreadingTCPServer.request_queue_size = 64
server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Screen:
    """What a terminal shows."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self.text = terminal, ""

    def wait_for(self, pattern: str) -> None:
        while not re.search(pattern, self.text):
            self.text += os.read(self._terminal, 4096).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def to_the_end(self) -> None:
        """Read until nothing comes for a moment: the end of the terminal is held open by the test."""
        os.set_blocking(self._terminal, False)
        quiet = time.monotonic()
        while time.monotonic() - quiet < 1.0:
            try:
                self.text += os.read(self._terminal, 4096).decode(errors="replace")
                quiet = time.monotonic()
            except BlockingIOError:
                time.sleep(0.05)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def received(end: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := end.recv(1 << 16):
            found += data
    end.close()
    return found


def pids(text: str, without: int = 0) -> list[int]:
    found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found if int(pid) != without]


def listens_at(port: int) -> list[str]:
    """Return the addresses of this machine at which a process listens at a port."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                raw = bytes.fromhex(address)
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    return found
