"""Real runs with an injected bug, which the diagnosis names, and healthy ones, in which it finds nothing to warn of."""

from pathlib import Path

import pytest

from tests.diagnosis.injected_bugs.bugs import BUGS
from tests.diagnosis.injected_bugs.verdicts import Verdict, judged

pytestmark = pytest.mark.drill
FEW = {"bugs": ("an exploding block",), "healthy": ("60 steps, validated four times",)}


def wrong(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.name: verdict.wrong for verdict in verdicts if verdict.wrong}


@pytest.mark.parametrize("kind", FEW)
def test_a_few_runs(kind: str, tmp_path: Path) -> None:
    found = list(judged(kind, tmp_path / kind, FEW[kind], workers=0))
    assert [verdict.name for verdict in found] == list(FEW[kind])
    assert wrong(found) == {}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bugs", "healthy"])
def test_every_ill_is_named_and_no_healthy_run_has_a_warning(kind: str, tmp_path: Path) -> None:
    found = list(judged(kind, tmp_path / kind))
    assert wrong(found) == {}
    assert len(found) >= 20


def test_each_kind_of_finding_about_training_and_speed_is_injection() -> None:
    assert len(BUGS) >= 25
    assert len({code for bug in BUGS.values() for code in bug.codes}) >= 20
