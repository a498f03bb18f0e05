"""The texts of the engine and the node agent: why a rank or a node failed."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {}
