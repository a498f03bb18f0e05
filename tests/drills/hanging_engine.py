"""The engine, one of whose ranks sleeps for ever before a collective; tests/drills/test_hangs.py names it to the agent.

``HANG`` in the environment holds a JSON object: the ``rank``, a function ``inside`` which it is to stop, and the
``step`` from which on; ``call`` is the function of torch.distributed, or ``module:name`` of another one.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

from scaletrain_cli.worker import heartbeat

HANG = json.loads(os.environ.get("HANG", "{}"))
# Saves and first evaluations may take half an hour; the tests do not wait for it.
heartbeat.LONG_SECONDS = HANG.get("long_seconds", heartbeat.LONG_SECONDS)


def is_due() -> bool:
    """Return whether the caller's stack is inside the function, in a step from the given one on."""
    frame, inside, step = sys._getframe(2), HANG.get("inside") is None, 0
    while frame is not None:
        inside = inside or frame.f_code.co_name == HANG["inside"]
        found = frame.f_locals.get("step")
        if isinstance(found, int) and "scaletrain_cli" in frame.f_code.co_filename:
            step = found
        frame = frame.f_back  # type: ignore[assignment]
    return inside and step >= HANG["step"]


def patch(module: Any, name: str) -> None:
    """Replace the function by one that sleeps for ever when it is due."""
    original = getattr(module, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if is_due():
            print("hanging", flush=True)
            while True:
                time.sleep(1000)
        return original(*arguments, **named)

    setattr(module, name, call)


def main() -> int:
    if "call" in HANG and HANG["rank"] == int(os.environ["RANK"]):
        module, _, names = HANG["call"].rpartition(":")
        found: Any = importlib.import_module(module or "torch.distributed")
        *path, name = names.split(".")
        for part in path:
            found = getattr(found, part)
        patch(found, name)
    from scaletrain_cli.engine.__main__ import main as train

    return train()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
