"""What a preflight finds: problems by the key of the spec, notes, and when the job could start. Knows no cluster."""

from __future__ import annotations

from collections.abc import Sequence

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.base import Start
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.spec import RunSpec

Found = Problem | str | Start  # a problem, a note that is worth telling, or what is known of the start
_SECTION = "cluster.kubernetes"
_NAMES_SHOWN = 8


def missing(spec: RunSpec, key: str, given: str, what: str, there: Sequence[Object]) -> Problem:
    names = names_shown(sorted(str(item["metadata"]["name"]) for item in there))
    return problem(spec, key, f"there is no such {what}. There are: {names}.", given)


def problem(spec: RunSpec, key: str, message: str, given: str | None = None) -> Problem:
    dotted = f"{_SECTION}.{key}" if key else _SECTION
    return Problem(spec.where(dotted), dotted, message, given)


def names_shown(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
