"""`scaletrain port-forward`: reach a port of a node of a running run at 127.0.0.1."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import OneNode, RunName
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.ui.console import say, warn

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.base import NodeCommand
    from scaletrain_cli.launch.node_session import PortPair

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    run: RunName,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOCAL:]REMOTE...",
            help="Port of the node, and the port at 127.0.0.1 that leads to it (default: the same; 0: any free one).",
        ),
    ],
    node: OneNode = None,
    streams: Annotated[
        bool,
        typer.Option(
            "--streams", help="Listen at no port; connect the node to this verb on the laptop, which calls it over ssh."
        ),
    ] = False,
) -> None:
    """Reach ports of a node of a running run from this machine, e.g. port 6006 of a TensorBoard.

    Listens at 127.0.0.1 only, and needs no right beyond those of the job's owner. A program on the node must listen at
    its loopback address or at all addresses. Ctrl-C ends it with 0; the end of the run ends it with 4.
    """
    from scaletrain_cli.launch.node_session import ADDRESS, become, command_on_node, node_of_run, port_pair

    pairs = [port_pair(text) for text in ports]
    run_dir = find_run(run)
    record, place = node_of_run(run_dir, node)
    connect = partial(command_on_node, run_dir, record, place)
    if streams:  # a machine that reached this one by ssh has the ports, and speaks with the node through this process
        become(connect())
    here = [pair for pair in pairs if record.spec.cluster.traits.runs_here and pair.local == pair.remote]
    for pair in here:
        say(f"{run_dir.run_id} runs on this machine: its port {pair.remote} is at {ADDRESS}:{pair.remote} already")
    away = [pair for pair in pairs if pair not in here]
    if away:
        forward(connect, place.name, away)


def forward(connect: Callable[[], NodeCommand], where: str, pairs: Sequence[PortPair]) -> None:
    """Forward ports through a session with a node until Ctrl-C. Raises the errors of forward_ports()."""
    from scaletrain_cli.launch.node_session import ADDRESS, forward_ports

    def opened(pair: PortPair) -> None:
        say(f"http://{ADDRESS}:{pair.local} leads to port {pair.remote} of {where}")

    before = {signum: signal.signal(signum, signal.default_int_handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        say("Ctrl-C ends the forwarding")
        forward_ports(connect, where, pairs, opened, lambda why: warn(str(why)))
    except KeyboardInterrupt:
        return
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
