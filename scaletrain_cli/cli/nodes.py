"""`scaletrain nodes`: the nodes that attempts have ended on, and that later ones keep away from."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, describe
from scaletrain_cli.errors import ExitCode, UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Show or forget nodes that runs keep away from.",
)
EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


@app.callback()
def group() -> None:
    """Show or forget nodes that runs keep away from."""


@app.command("list", epilog=describe(EXIT_CODES))
def list_nodes(as_json: AsJson = False) -> None:
    """Show the nodes that evidence speaks against, with that evidence and when it expires.

    Slurm jobs under this runs root exclude them as long as enough other nodes are left.
    """
    from scaletrain_cli.rundir.bad_nodes import bad_nodes_file, read_bad_nodes
    from scaletrain_cli.rundir.paths import runs_root

    root, now = runs_root(), time.time()
    nodes = read_bad_nodes(root, now)
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json({"file": str(bad_nodes_file(root)), "nodes": [dataclasses.asdict(node) for node in nodes]})
        return
    if not nodes:
        from scaletrain_cli.ui.console import say

        say(f"nothing speaks against any node under {root}.")
        return
    from scaletrain_cli.ui.tables import show_nodes

    show_nodes(nodes, now)


@app.command(epilog=describe(EXIT_CODES))
def clear(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Which; else all of them.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forget what speaks against nodes, as after a repair. Jobs in the queue keep what they were told."""
    from scaletrain_cli.rundir.bad_nodes import forget_bad_nodes
    from scaletrain_cli.rundir.paths import runs_root
    from scaletrain_cli.ui.console import say

    root = runs_root()
    try:
        gone = forget_bad_nodes(root, nodes or (), time.time()) if root.is_dir() else []
    except OSError as error:
        raise UsageError(f"{root} cannot be written: {error.strerror or error}") from error
    missing = sorted(set(nodes or ()) - set(gone))
    if missing:
        raise UsageError(f"nothing was known against {', '.join(missing)}. `scaletrain nodes list` shows the nodes.")
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json({"forgotten": list(gone)})
    say(f"forgot {', '.join(gone)}" if gone else "there was nothing to forget")
