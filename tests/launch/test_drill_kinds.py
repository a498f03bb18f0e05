"""Every kind of drill is a fault of the engine, and affects only the first attempt."""

import re

import pytest

from scaletrain_cli.engine import faults
from scaletrain_cli.launch.drill import KINDS, UNDISTURBED, VARIABLE
from scaletrain_cli.spec import override_spec
from tests.launch.conftest import PROJECT, make_spec

# Hits batches, in whatever attempt they come; the run is to leave them out.
OF_THE_DATA = {"spike"}


def test_the_environment_variable_for_faults_is_that_of_the_engine() -> None:
    assert VARIABLE == faults.VARIABLE


@pytest.mark.parametrize("name", KINDS)
def test_each_fault_parses_and_reaches_the_ranks_through_the_spec(name: str) -> None:
    settings = [one for one in KINDS[name].settings(step=27, world_size=2) if one.startswith("env.")]
    text = override_spec(make_spec(), settings, file="spec").env[VARIABLE]
    faults.Faults(text, rank=1, attempt=1)
    assert ("attempt=1" in text) == (name not in OF_THE_DATA)
    assert "step=27" in text


def test_the_undisturbed_run_has_no_fault() -> None:
    assert UNDISTURBED.settings(step=27, world_size=2) == []


def test_the_documentation_names_every_kind_of_drill() -> None:
    page = (PROJECT / "docs" / "drills.md").read_text(encoding="utf-8")
    page = page.partition("## Faults of your own")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", page, flags=re.MULTILINE) == list(KINDS)
