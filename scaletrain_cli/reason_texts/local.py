"""The texts of the local back end."""

from __future__ import annotations

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    "supervisor-failed": Text(
        "the supervisor cannot continue: {error}. No attempt follows; correct that, then `scaletrain resume`"
    ),
    "supervisor-stopped": Text("the supervisor was stopped; `scaletrain resume` continues the run"),
}
