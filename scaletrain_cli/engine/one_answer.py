"""``python -m scaletrain_cli.engine.one_answer QUESTION ...``: one JSON object as the last line of stdout.

``prepare`` builds a dataset, ``export`` writes weights as Hugging Face has them. Talk goes to stderr; an error is the
object ``{"error": {...}}``. Imports nothing heavy at first: a missing package, or Ctrl-C while torch is imported, ends
like every other error.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from scaletrain_cli.unexpected import known_error

_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_QUESTIONS = {"prepare": "data prepare", "export": "checkpoint export"}  # the module here, and the verb that asks


def main(words: list[str]) -> int:
    """Print the answer of the module that ``words`` begins with; return the exit code."""
    question, *arguments = words
    try:
        told = import_module(f"scaletrain_cli.engine.{question}").answer(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        found = known_error(error, _QUESTIONS[question])
        print(json.dumps({"error": found.to_json()}))
        return int(found.exit_code)
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)
