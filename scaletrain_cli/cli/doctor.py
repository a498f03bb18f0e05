"""`scaletrain doctor`: what this machine can do, and what to install for the rest."""

from __future__ import annotations

from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(as_json: AsJson = False) -> None:
    """Check what this machine can do: packages, cores, memory, GPUs, compilers, schedulers, disk.

    A warning is something that will hurt; a dash is something that is not here and may not be needed.
    With --json: {"checks": [{"name", "state", "found", "advice"}]}, state being ok, warn or none.
    """
    from scaletrain_cli.cli.machine import checks
    from scaletrain_cli.rundir.paths import runs_root

    found = checks(runs_root())
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json({"checks": [vars(check) for check in found]})
        return
    from scaletrain_cli.ui.check_list import show_checks

    show_checks((check.name, check.state, check.found, check.advice) for check in found)
