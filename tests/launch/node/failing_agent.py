"""A node agent that fails by an error of its own, in the function of attempt.py that $FAILS names."""

import os
import sys

from scaletrain_cli.launch.node import agent, attempt


def fail(*_: object) -> None:
    raise LookupError("an error of the agent")


setattr(attempt, os.environ["FAILS"], fail)
sys.exit(agent.main())
