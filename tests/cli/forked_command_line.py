"""Run a command line and the data process that it starts as forks; return its output and exit code. No tests here."""

import os

from tests import forked
from tests.cli.command_line import BUG, Ended


def forked_scaletrain(*arguments: object) -> Ended:
    """Run one command line; neither process imports anything again."""
    environment = forked.forking(os.environ, "numpy tokenizers")
    done = forked.scaletrain(*map(str, arguments), environment=environment)
    assert BUG not in done.stdout + done.stderr, done
    return Ended(done.returncode, done.stdout, done.stderr)
