"""Specs with the values of --vary or --sweep in them; what is wrong with such a value says which option it came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import SpecError

if TYPE_CHECKING:
    from scaletrain_cli.spec import RunSpec


def load_varied(
    path: Path, overrides: Sequence[str], varied: Sequence[str], option: str, cluster: str | None
) -> RunSpec:
    """The spec with its overrides and those of one variant. Raises SpecError."""
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.source import SET_OPTION as SET

    keys = {setting.partition("=")[0] for setting in varied}
    try:
        return load_spec(path, [*overrides, *varied], cluster=cluster)
    except SpecError as error:
        error.problems = tuple(
            replace(problem, where=option) if problem.where == SET and problem.key in keys else problem
            for problem in error.problems
        )
        raise
