"""The node agent's entry: one per node and attempt; ``python -m scaletrain_cli.launch.node.agent RUN_DIR --attempt N``.

Blocks the signals before anything slow is imported, then hands over to node_run. Knows no scheduler: what it must know
of the job comes in options or the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from scaletrain_cli.launch.node.options import HEARD, parse_options
from scaletrain_cli.own_processes import leave_current_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of the attempt; the exit code sums up its ranks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    leave_current_folder()
    options = parse_options(arguments, os.environ)
    from scaletrain_cli.errors import ExitCode, ScaletrainError
    from scaletrain_cli.full_disk import is_full, say
    from scaletrain_cli.launch.node.attempt import run_node

    try:
        return run_node(options)
    except ScaletrainError as error:
        say(f"node agent {options.node_rank} on {options.node_name}: {error}")
        return error.exit_code
    except OSError as error:
        if not is_full(error):
            raise
        say(f"node agent {options.node_rank} on {options.node_name}: {error}")  # its record cannot say it
        return ExitCode.DO_NOT_REQUEUE


if __name__ == "__main__":
    sys.exit(main())
