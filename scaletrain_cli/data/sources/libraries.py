"""Import libraries of optional extras where they are needed."""

import importlib
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.reasons import Reason


def require(module: str, extra: str) -> Any:
    """Return a module of an optional extra. Raises UsageError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            Reason("sources.library-missing", {"module": module, "command": install_command(extra)})
        ) from error
