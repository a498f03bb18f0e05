"""The texts of the launcher: states of a run, ends of attempts, restart decisions."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {}
