"""What `exec`, `shell` and `port-forward` do on any back end, checked with real processes.

The commands are started as a user starts them; ``runs`` is the run id or its folder.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked, forking
from tests.ports import reserved_port
from tests.terminals import terminal
from tests.waiting import wait_until


@dataclass(frozen=True)
class Started:
    """A command line by a fork, and the open files that it writes to."""

    process: Forked
    stdout: int
    stderr: int

    @property
    def out(self) -> bytes:
        return os.pread(self.stdout, 1 << 20, 0)

    @property
    def errors(self) -> list[str]:
        """The lines that are complete."""
        text = os.pread(self.stderr, 1 << 20, 0).decode()
        return text[: text.rfind("\n") + 1].splitlines()


class Sessions:
    """The command line of a user of one run, by forks."""

    def __init__(self, run: str, environment: Mapping[str, str]) -> None:
        self.run, self.environment = run, forking(environment)

    @contextlib.contextmanager
    def start(self, verb: str, *words: str, given: bytes = b"") -> Iterator[Started]:
        """Start a verb; it is killed at the end of the block."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            os.pwrite(stdin.fileno(), given, 0)
            streams = {"stdin": stdin.fileno(), "stdout": stdout.fileno(), "stderr": stderr.fileno()}
            process = Forked("scaletrain_cli", [verb, self.run, *words], self.environment, **streams)
            try:
                yield Started(process, stdout.fileno(), stderr.fileno())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def exec(self, *words: str, options: Sequence[str] = (), given: bytes = b"") -> tuple[int, bytes, list[str]]:
        """Return the exit code of a command, its output and the lines of its errors."""
        with self.start("exec", *options, "--", *words, given=given) as started:
            return started.process.wait(), started.out, started.errors

    def passes_streams_and_the_exit_code_on(self) -> None:
        """Every byte arrives, on the stream that it was written to, and the code is that of the command."""
        data = os.urandom(300_000)
        code, out, errors = self.exec("sh", "-c", "cat; echo oops >&2; exit 41", given=data)
        assert (out == data, code) == (True, 41)
        assert errors[-1] == "oops"
        assert self.exec("no-such-program")[0] == 127
        assert self.exec("sh", "-c", "kill -TERM $$")[0] == 128 + signal.SIGTERM

    def has_the_environment_of_the_ranks(self, run_dir: str, rank: int) -> None:
        """Variables and Python are those of the ranks; only with --rank those of one of them."""
        code, out, errors = self.exec("sh", "-c", 'pwd; echo "$FAKE"; which python; env')
        assert code == 0, errors
        shown = out.decode().splitlines()
        assert shown[0] == run_dir
        assert "steps" in shown[1]
        assert shown[2] == os.path.join(os.path.dirname(sys.executable), "python")
        assert f"SCALETRAIN_RUN_DIR={run_dir}" in shown
        names = {line.partition("=")[0] for line in shown}
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "SCALETRAIN_HEARTBEAT_FD"} & names
        script = "echo $RANK $LOCAL_RANK; tr '\\0' ' ' < /proc/$SCALETRAIN_RANK_PID/cmdline"
        own = self.exec("sh", "-c", script, options=("--rank", str(rank)))[1].decode().splitlines()
        assert own[0].startswith(f"{rank} ")
        assert "fake_engine" in own[1]

    def streams_output_and_passes_ctrl_c_on(self) -> None:
        """Output arrives while the command runs, without a newline too; Ctrl-C becomes a SIGINT of the command."""
        script = "trap 'kill $!; echo \" interrupted\"; exit 9' INT; printf ready; sleep 60 & wait $!"
        with self.start("exec", "--", "sh", "-c", script) as started:
            wait_until(lambda: started.out == b"ready", "output arrives")
            started.process.send_signal(signal.SIGINT)
            assert started.process.wait() == 9
            assert started.out == b"ready interrupted\n"

    def ends_the_command_of_a_user_who_is_gone(self) -> None:
        """A killed client leaves no process: the command and its children get SIGHUP."""
        mark = f"{time.time_ns()}"
        with self.start("exec", "--", "sh", "-c", f"sleep 3600; : {mark}") as started:
            wait_until(lambda: pids(mark), "the command runs")
            started.process.kill()
        wait_until(lambda: not pids(mark), "the command has ended")

    def opens_a_shell_with_a_terminal_of_the_same_size(self) -> None:
        environment = self.environment | {"TERM": "xterm", "SHELL": "/bin/sh", "ENV": "", "PS1": "$ "}
        with terminal(
            [sys.executable, "-m", "scaletrain_cli", "shell", self.run], environment, size=(31, 97)
        ) as screen:
            screen.wait_for(r"ends the shell[^#$]*[#$] ")
            screen.type("stty size; echo attempt=$SCALETRAIN_ATTEMPT\n")
            screen.wait_for(r"31 97\r\n[^\n]*attempt=1")
            screen.resize(40, 111)
            os.kill(
                screen.process.pid, signal.SIGWINCH
            )  # the kernel sends it to a process in front of its own terminal
            screen.type("until stty size | grep 40; do sleep 0.1; done; sh -c 'echo sleeps; exec sleep 300'\n")
            screen.wait_for(r"40 111\r\n[^\n]*sleeps")
            screen.type("\x03")
            screen.wait_for(r"[#$] ")  # an earlier line would be lost
            screen.type("exit 6\n")
            assert screen.to_the_end() == 6, screen.text
            assert screen.modes == screen.before, "the terminal is as it was"

    def forwards_a_port(self, port: int, local: int, *options: str) -> None:
        """Many connections at once, each with its own bytes; Ctrl-C ends it, and nothing listens or runs any more.

        ``port``: of a server on the node that sends back what it receives.
        """
        with self.start("port-forward", f"{local}:{port}", f"0:{reserved_port()}", *options) as started:
            wait_until(lambda: len(started.errors) >= 3, "both ports are forwarded")
            found = re.search(r"127\.0\.0\.1:(\d+) leads to port \d+ of", started.errors[2])
            assert found is not None, started.errors
            for _ in range(2):
                ends = [socket.create_connection(("127.0.0.1", local)) for _ in range(8)]
                sent = [bytes([number]) * 200_000 for number in range(8)]
                for end, data in zip(ends, sent, strict=True):
                    end.sendall(data)
                    end.shutdown(socket.SHUT_WR)
                assert [received(end) for end in ends] == sent
            with socket.create_connection(("127.0.0.1", int(found[1]))) as refused:
                assert received(refused) == b""
            wait_until(lambda: "refuses the connection" in started.errors[-1], "the refusal is shown")
            assert listens_at(local) == ["127.0.0.1"]
            started.process.send_signal(signal.SIGINT)
            assert started.process.wait() == 0, started.errors
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


def received(end: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := end.recv(1 << 16):
            found += data
    end.close()
    return found


def pids(text: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", "--", text], capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in found]


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
