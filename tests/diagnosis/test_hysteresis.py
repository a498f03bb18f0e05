"""Findings of repeated diagnoses: raised, worse, cleared."""

from typing import Any

import pytest

from scaletrain_cli.diagnosis.findings import Finding, Hysteresis, Severity
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import raised_findings

FLAT = "diagnosis.loss-flat"


def finding(severity: Severity = "warning", code: str = FLAT, **params: Any) -> Finding:
    return Finding(Reason(code, params), severity, "high")


def changes(looks: str, raised: str = "") -> str:
    """Return the change after each look: ``nwe`` find a note, a warning, an error; ``.`` finds nothing."""
    severities: dict[str, Severity] = {"n": "note", "w": "warning", "e": "error"}
    hysteresis = Hysteresis({FLAT: severities[raised]} if raised else {})
    found = ""
    for look in looks:
        transitions = hysteresis.next([] if look == "." else [finding(severities[look])])
        found += "+".join(each.change[0] for each in transitions) or "-"
    return found


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ("ww", "-r"),  # two of three
        ("w.w", "--r"),
        ("w..w..", "------"),  # one of three
        ("ww..w...", "-r-----c"),  # absent twice does not clear
        ("ww...ww", "-r--c-r"),  # raised again after it was cleared
        ("wwee.", "-r-w-"),  # an error twice
        ("wwew.", "-r---"),  # an error once
        ("wwewewww", "-r--w---"),  # worse once, even if the severity changes
        ("eeww", "-r--"),  # less severe: still raised
    ],
)
def test_it_takes_two_of_three_diagnoses_to_raise_and_three_to_clear(looks: str, expected: str) -> None:
    assert changes(looks) == expected


def test_a_finding_of_an_earlier_attempt_is_not_raised_again_and_can_be_cleared() -> None:
    assert changes("wwww", raised="w") == "----"
    assert changes("...", raised="w") == "--c"
    assert changes("ee", raised="w") == "-w"


def test_one_look_is_enough_at_the_end_of_an_attempt() -> None:
    hysteresis = Hysteresis({})
    assert [each.change for each in hysteresis.next([finding()], is_last=True)] == ["raised"]


def test_subjects_are_raised_apart_and_at_most_eight_with_one_code() -> None:
    hysteresis = Hysteresis({})
    ranks = [finding(code="diagnosis.slow-rank", rank=rank) for rank in range(20)]
    hysteresis.next(ranks)
    raised = hysteresis.next(ranks)
    assert [each.key for each in raised] == [f"diagnosis.slow-rank rank {rank}" for rank in range(8)]
    waits = [finding(code="diagnosis.data-wait", rank=rank) for rank in (1, 2)]
    assert [finding.subject for finding in waits] == ["", ""]  # the rank that waits longest changes


def event(name: str, *, code: str = FLAT, time: float = 1.0, **fields: Any) -> dict[str, Any]:
    known = {"severity": "warning", "subject": "", "params": {}, "attempt": 1, "step": 5}
    return {"event": name, "code": code, "time": time, **known, **fields}


def test_events_add_up_to_what_is_raised() -> None:
    slow = "diagnosis.slow-rank"
    events = [
        event("finding", time=1.0),
        event("finding", code=slow, subject="rank 3"),
        event("finding", code=slow, subject="rank 4"),
        event("finding", time=9.0, severity="error", change="worse", step=7),
        event("finding-cleared", code=slow, subject="rank 3"),
        {"event": "finding", "severity": 3},  # damaged
        {"event": "spike"},
    ]
    found = raised_findings(events)
    assert list(found) == [FLAT, f"{slow} rank 4"]
    assert (found[FLAT].severity, found[FLAT].time, found[FLAT].step) == ("error", 1.0, 7)
    assert raised_findings([*events, {"event": "from-scratch"}]) == {}
