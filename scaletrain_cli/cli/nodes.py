"""`scaletrain nodes`: list or clear the nodes that new jobs exclude after failures on them."""

import dataclasses
import time
from typing import Annotated

import typer

from scaletrain_cli.cli.elsewhere import name_clusters
from scaletrain_cli.cli.options import AsJson, OnLoginNode, describe, verb_group
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

app = verb_group("List or clear excluded nodes.")
EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


@app.command("list", epilog=describe(EXIT_CODES))
def list_nodes(cluster: OnLoginNode = None, as_json: AsJson = False) -> None:
    """List the excluded nodes with the evidence against them and when it expires.

    Slurm jobs under this runs root exclude these nodes as long as enough other nodes are left.
    """
    from scaletrain_cli.rundir.bad_nodes import bad_nodes_file, read_bad_nodes

    root, now = runs_root(), time.time()
    nodes = read_bad_nodes(root, now)
    if as_json:
        print_json({"file": str(bad_nodes_file(root)), "nodes": [dataclasses.asdict(node) for node in nodes]})
        return
    if nodes:
        from scaletrain_cli.ui.tables import show_nodes

        show_nodes(nodes, now)
    else:
        say(f"no nodes are excluded under {root}.")
    name_clusters("nodes list")


@app.command(epilog=describe(EXIT_CODES))
def clear(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Nodes to clear (default: all).")] = None,
    cluster: OnLoginNode = None,
    as_json: AsJson = False,
) -> None:
    """Clear excluded nodes, for example after a repair. Jobs already in the queue keep their exclusions."""
    from scaletrain_cli.rundir.bad_nodes import forget_bad_nodes

    root = runs_root()
    try:
        gone = forget_bad_nodes(root, nodes or (), time.time()) if root.is_dir() else []
    except OSError as error:
        raise UsageError(f"{root} cannot be written: {error.strerror or error}") from error
    missing = sorted(set(nodes or ()) - set(gone))
    if missing:
        raise UsageError(f"{', '.join(missing)}: not excluded. `scaletrain nodes list` shows the excluded nodes.")
    if as_json:
        print_json({"forgotten": list(gone)})
    say(f"cleared {', '.join(gone)}" if gone else "no nodes were excluded")
