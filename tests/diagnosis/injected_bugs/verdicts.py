"""Check that the diagnosis names the injected bug, and nothing in healthy runs. No tests here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.diagnosis.injected_bugs import injection
from tests.diagnosis.injected_bugs.bugs import BUGS, Bug
from tests.diagnosis.injected_bugs.healthy import HEALTHY
from tests.diagnosis.injected_bugs.runs import Found, Outcome, outcomes_of

WITHIN = 200  # steps
_FIRST = 2  # findings
_TABLES = {name: f"{__package__}.{table}" for name, table in (("bugs", "bugs:BUGS"), ("healthy", "healthy:HEALTHY"))}


@dataclass(frozen=True)
class Verdict:
    """A run and what is wrong with its diagnosis; empty: nothing. ``outcome``: None if this machine cannot have it.

    ``finding``: the one that names the bug, and its place among all from 1 on; None and 0 otherwise.
    """

    name: str
    outcome: Outcome | None
    wrong: str = ""
    finding: Found | None = None
    place: int = 0


def judged(kind: str, folder: Path, words: Sequence[str] = (), workers: int = 2) -> Iterator[Verdict]:
    """Yield verdicts on the ``bugs`` or the ``healthy`` runs whose names hold one of the words; on all without.

    Those of several ranks run one at a time, after the others.
    """
    trials = {name: row.trial for name, row in (BUGS if kind == "bugs" else HEALTHY).items()}
    chosen = [name for name in trials if not words or any(word in name for word in words)]
    for name in chosen:
        if not injection.is_possible(trials[name].injected):
            yield Verdict(name, None)
    chosen = [name for name in chosen if injection.is_possible(trials[name].injected)]
    alone = [name for name in chosen if "cluster.gpus_per_node=2" in trials[name].overrides]
    for names, at_a_time in (([name for name in chosen if name not in alone], workers), (alone, 1)):
        if names:
            for outcome in outcomes_of(names, _TABLES[kind], folder, workers=at_a_time):
                yield _of_bug(BUGS[outcome.name], outcome) if kind == "bugs" else _of_healthy(outcome)


def _of_bug(bug: Bug, outcome: Outcome) -> Verdict:
    codes = [found.code for found in outcome.found]
    place = next((place for place, code in enumerate(codes, start=1) if code in bug.codes), 0)
    finding = outcome.found[place - 1] if place else None
    wrong = ""
    if finding is None or place > _FIRST:
        wrong = f"{' or '.join(bug.codes)} is not among the first {_FIRST} of {codes}"
    elif finding.since is None or finding.since - bug.shows > WITHIN:
        wrong = f"{finding.code} is named from step {finding.since} on"
    elif not finding.figures:
        wrong = f"{finding.code} has no figure"
    elif bug.key and bug.key not in finding.keys:
        wrong = f"{finding.code} changes {finding.keys}, not {bug.key}"
    elif finding.place and not finding.place.startswith(("run.yaml:", "--set")):
        wrong = f"{finding.code} is located at {finding.place}"
    return Verdict(outcome.name, outcome, wrong, finding, place)


def _of_healthy(outcome: Outcome) -> Verdict:
    serious = [found.text for found in outcome.found if found.severity != "note"]
    wrong = "; ".join(serious)
    if outcome.steps < outcome.total:
        wrong = f"ended at step {outcome.steps} of {outcome.total}"
    return Verdict(outcome.name, outcome, wrong)
