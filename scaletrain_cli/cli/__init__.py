"""The command line: one module per verb, loaded when it is called. Verbs ask other rooms and show the answer."""

from scaletrain_cli.cli.app import invoke, show_error

__all__ = ["invoke", "show_error"]
