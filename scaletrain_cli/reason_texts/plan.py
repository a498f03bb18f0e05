"""The texts of the planner: why layouts and clusters are rejected, and what a plan warns of."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {}
