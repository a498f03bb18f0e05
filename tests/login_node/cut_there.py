"""The command of a login node whose connection is cut when it makes its n-th change: see test_cut_connections.py."""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from scaletrain_cli.__main__ import main

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "subprocess.Popen")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
plan = Path(os.environ["HOME"], "cut.json")
changes = 0


def count(event: str, arguments: tuple[Any, ...]) -> None:
    global changes
    is_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITES)
    if not is_write and event not in CHANGES:
        return
    changes += 1
    if changes == at:
        with socket.socket(socket.AF_UNIX) as tests:
            tests.connect(address)
            tests.recv(1)  # the connection is cut
        if hangs_up:
            os.killpg(0, signal.SIGHUP)  # as the kernel does where the login node gave it a terminal


if plan.exists():
    at, address, hangs_up = json.loads(plan.read_text())
    plan.unlink()
    sys.addaudithook(count)
    try:
        main(sys.argv[1:])
    finally:
        plan.with_name("changes").write_text(str(changes))
main(sys.argv[1:])
