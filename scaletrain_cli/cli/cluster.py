"""`scaletrain cluster`: set up a cluster that this machine reaches by ssh."""

from typing import Annotated

import typer

from scaletrain_cli import __version__
from scaletrain_cli.cli.options import AsJson, complete_cluster, describe, verb_group
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

app = verb_group("Set up a cluster that this machine reaches by ssh.")
EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.SCHEDULER)


@app.command(epilog=describe(EXIT_CODES))
def setup(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Cluster in clusters.yaml.", autocompletion=complete_cluster)
    ],
    extras: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Extras to install, as train,slurm (default: by the scheduler).")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python there (default: the first of version 3.10 or later).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install this ScaleTrain on the login node of a cluster, in a virtual environment of its own.

    Repeat it after an update, or if the connection was cut. Nothing is done if the same is there already.
    """
    from scaletrain_cli.launch.login_node.ssh import COMMAND_OF_SETUP, install
    from scaletrain_cli.spec.backend_traits import DEFAULT, backend_traits
    from scaletrain_cli.spec.clusters_file import choose_cluster, clusters_file

    cluster = choose_cluster(name)
    assert cluster is not None
    node = cluster.login_node
    if node is None:
        raise UsageError(Reason("login_node.setup-without-host", {"cluster": name, "file": str(clusters_file())}))
    if extras is None:
        extras = backend_traits(str(cluster.entries.get("scheduler", DEFAULT))).extras
    chosen = [extra for extra in extras.split(",") if extra]
    say(f"installing ScaleTrain {__version__} on {node.ssh}; with torch it takes some minutes")
    is_new = install(node, chosen, python)
    say(f"{COMMAND_OF_SETUP} on {node.ssh} {'is ready' if is_new else 'was there already'}")
    is_used = node.scaletrain in (None, COMMAND_OF_SETUP)
    remedy = "" if is_used else f". Take clusters.{name}.host.scaletrain out of {clusters_file()}"
    say(f"verbs for {name} use {COMMAND_OF_SETUP if is_used else node.scaletrain}{remedy}")
    if as_json:
        answer = {"cluster": name, "host": node.ssh, "command": COMMAND_OF_SETUP, "version": __version__}
        print_json(answer | {"extras": chosen, "installed": is_new, "used": is_used})
