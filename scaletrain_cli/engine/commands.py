"""``python -m scaletrain_cli.engine.commands COMMAND ...``: what needs torch or tokenizers, in a process of its own.

``prepare`` builds datasets, ``prepare-job`` a part of them, ``stats`` reports on them, and ``upload`` copies them to an
object store; ``show`` renders rows, and ``step`` the samples of a step; ``export`` writes a checkpoint's weights as
Hugging Face files, and ``sample`` generates with them. The result is one JSON object, the last line of stdout; progress
goes to stderr. An error is ``{"error": {...}}`` with the exit code of the error. SIGTERM ends a command with 143, after
what it was writing is removed. Heavy modules are imported last, so that a missing package or
Ctrl-C during an import ends like any other error.
"""

import ctypes
import json
import signal
import sys
from importlib import import_module

from scaletrain_cli.unexpected import known_error

_PR_SET_PDEATHSIG = 1
_INTERRUPTED, _TERMINATED = 130, 143  # 128 + SIGINT or SIGTERM, the shell convention
# By command: the module whose ``run_command`` runs it, and the CLI verb to name in an error.
_COMMANDS = {
    "prepare": ("data.prepared", "data prepare"),
    "prepare-job": ("data.preparation", "data prepare"),
    "show": ("data.show", "data show"),
    "step": ("data.step_view", "data show"),
    "stats": ("data.stats", "data stats"),
    "upload": ("data.upload", "data upload"),
    "export": ("checkpoint.export", "checkpoint export"),
    "sample": ("checkpoint.sample", "checkpoint sample"),
}


def main(arguments: list[str]) -> int:
    """Run the command ``arguments[0]`` with the remaining arguments, print its result, and return the exit code."""
    command, *rest = arguments
    module, verb = _COMMANDS[command]
    try:
        result = import_module(f"scaletrain_cli.engine.{module}").run_command(rest)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        failure = known_error(error, verb)
        print(json.dumps({"error": failure.to_json()}))
        return int(failure.exit_code)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # what is being written is removed
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the verb was killed: nobody waits for the result
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)
