"""Requests that the ranks of an attempt stop: growth.json, to restart on more nodes, and idle.json, as they do nothing.

A request is written to attempts/NNNN before the ranks are signaled: the end of the attempt is then no preemption.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from scaletrain_cli.reasons import Reason, reason_from
from scaletrain_cli.rundir.documents import read_document, reporting_damage, typed, write_document
from scaletrain_cli.rundir.paths import RunDir


def request_growth(run: RunDir, attempt: int, why: Reason) -> None:
    """Record that the attempt is asked to stop. Raises OSError."""
    write_document(run.attempt(attempt) / "growth.json", {"time": time.time(), **why.to_document()})


def withdraw_growth(run: RunDir, attempt: int) -> None:
    """Remove the request of an attempt whose ranks could not be signaled."""
    (run.attempt(attempt) / "growth.json").unlink(missing_ok=True)


def read_growth_request(run: RunDir, attempt: int) -> Reason | None:
    """Return why the attempt was asked to stop; None if it was not."""
    data = read_document(run.attempt(attempt) / "growth.json")
    return None if data is None else reason_from(data)


@dataclass(frozen=True)
class GrowthRequest:
    """A request that an attempt stop: when, in Unix seconds, and on how many nodes it trained then, if recorded."""

    attempt: int
    time: float
    before: int | None


def growth_requests(run: RunDir) -> list[GrowthRequest]:
    """Return all requests of the run, in order of the attempts."""
    found = []
    for number in run.attempts():
        data = read_document(path := run.attempt(number) / "growth.json")
        if data is not None:
            with reporting_damage(path):
                before = typed(int | None, data.get("params", {}).get("before"))
                found.append(GrowthRequest(number, typed(float, data["time"]), before))
    return found


def request_idle_end(run: RunDir, attempt: int, why: Reason) -> None:
    """Record that the attempt is to end because it does nothing. Raises OSError."""
    write_document(run.attempt(attempt) / "idle.json", {"time": time.time(), **why.to_document()})


def read_idle_request(run: RunDir, attempt: int) -> Reason | None:
    """Return why the attempt is to end; None if it does something, as far as is known."""
    data = read_document(run.attempt(attempt) / "idle.json")
    return None if data is None else reason_from(data)
