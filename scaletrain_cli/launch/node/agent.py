"""The entry point of the node agent, one per node and attempt.

Started as ``python -m scaletrain_cli.launch.node.agent RUN_DIR --attempt N``. It blocks the signals before any
slow import. Options and environment variables describe the job.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from scaletrain_cli.launch.node.options import AGENT_SIGNALS, parse_options
from scaletrain_cli.log_setup import set_up_logging
from scaletrain_cli.own_processes import leave_current_folder

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this node, and return one exit code for all of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AGENT_SIGNALS)
    leave_current_folder()
    options = parse_options(arguments, os.environ)
    set_up_logging(f"node agent {options.node_rank} on {options.node_name}")
    from scaletrain_cli.errors import ExitCode, ScaletrainError
    from scaletrain_cli.full_disk import is_full
    from scaletrain_cli.launch.node.attempt import run_node

    try:
        return run_node(options)
    except ScaletrainError as error:
        logger.error("%s", error)
        return error.exit_code
    except OSError as error:
        if not is_full(error):
            raise
        logger.error("%s", error)  # the node record cannot hold it
        return ExitCode.DO_NOT_REQUEUE


if __name__ == "__main__":
    sys.exit(main())
