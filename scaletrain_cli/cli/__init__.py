"""The command line: one module per verb, imported when the verb is called."""

from scaletrain_cli.cli.running import run

__all__ = ["run"]
