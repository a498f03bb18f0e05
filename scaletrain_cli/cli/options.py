"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scaletrain_cli.cli.completion import complete_cluster, complete_run, complete_setting

SpecPath = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file; - reads stdin.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec, as in training.steps=100; repeatable.",
        autocompletion=complete_setting,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="One of your clusters in ~/.config/scaletrain/clusters.yaml; stands above the spec's cluster section.",
        autocompletion=complete_cluster,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id, the beginning of one, or a run directory.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
TrustOwner = Annotated[
    bool,
    typer.Option("--trust-owner", help="Act on a run of another user as if it were yours: what is in it runs as you."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
