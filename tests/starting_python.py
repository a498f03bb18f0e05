"""A process that starts a Python program in one of three ways, and prints how it ended: for tests/test_forked.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(way: str, output: str, *words: str) -> None:
    """Run ``python WORDS PID``, with the pid of this process; its output goes to a file."""
    signal.signal(signal.SIGTERM, lambda *_: print("the handler of the parent", flush=True))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    command = [sys.executable, *words, str(os.getpid())]
    environment = {**os.environ, "GIVEN": way}
    if way == "popen":
        with Path(output).open("wb") as file:
            code = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
    elif way == "spawn":
        actions = [(os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
        actions.append((os.POSIX_SPAWN_CLOSE, inherited))
        pid = os.posix_spawn(
            command[0],
            command,
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=[signal.SIGHUP],
            setsigdef=[signal.SIGUSR2],
        )
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    else:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(1, 2)
        os.execv(command[0], command)
    print(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
