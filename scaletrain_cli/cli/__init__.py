"""The command line: one module per verb, loaded when it is called. Verbs ask other rooms and show the answer."""

from scaletrain_cli.cli.running import run

__all__ = ["run"]
