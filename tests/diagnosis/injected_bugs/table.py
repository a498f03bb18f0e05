"""The tables of injected training bugs and healthy runs, as lines and as a page. No tests here."""

from collections.abc import Mapping, Sequence

from tests.diagnosis.injected_bugs.bugs import BUGS
from tests.diagnosis.injected_bugs.healthy import HEALTHY
from tests.diagnosis.injected_bugs.runs import Trial
from tests.diagnosis.injected_bugs.verdicts import WITHIN, Verdict

Line = str
HEADERS = {
    "bugs": "| bug | injected by | steps | finding | place | from step | evidence | seconds |\n|-|-|-|-|-|-|-|-|",
    "healthy": "| healthy run | settings | steps | notes | seconds |\n|-|-|-|-|-|",
}
_COMMAND = "make bug-injection ARGS='--write docs/injected-bugs.md'"


def bug_line(verdict: Verdict) -> Line:
    """Return the line of a run with a bug."""
    name, bug = verdict.name, BUGS[verdict.name]
    injection, outcome, finding = _injection(bug.trial), verdict.outcome, verdict.finding
    if outcome is None:
        return f"| {name} | {injection} | - | cannot be had on this machine | - | - | - | - |"
    if finding is None:
        cells = [name, injection, str(outcome.steps), "**none**", "-", "-", verdict.wrong, f"{outcome.seconds:.1f}"]
        return f"| {' | '.join(cells)} |"
    mark = f"**{finding.code}**" if verdict.wrong else f"`{finding.code}` ({finding.severity})"
    cells = [name, injection, str(outcome.steps), mark, f"{verdict.place} of {len(outcome.found)}", str(finding.since)]
    return f"| {' | '.join(cells)} | {finding.text} | {outcome.seconds:.1f} |"


def healthy_line(verdict: Verdict) -> Line:
    """Return the line of a healthy run."""
    outcome = verdict.outcome
    assert outcome is not None
    notes = ", ".join(f"`{found.code}`" for found in outcome.found if found.severity == "note") or "-"
    found = f"**{verdict.wrong}**" if verdict.wrong else notes
    injection = _injection(HEALTHY[verdict.name].trial)
    return f"| {verdict.name} | {injection} | {outcome.steps} | {found} | {outcome.seconds:.1f} |"


def page(lines: Mapping[str, Sequence[Line]], seconds: float) -> str:
    """Return the page with both tables."""
    return "\n".join(
        [
            "# Injected training bugs and healthy runs",
            "",
            f"Written by `{_COMMAND}`: {sum(map(len, lines.values()))} real runs on CPU processes, two at a time, in "
            f"{seconds:.0f} seconds. Each bug has to be the first or second finding of `scaletrain diagnose` within "
            f"{WITHIN} steps of showing, with a figure and a place in the spec; a healthy run may have notes only. "
            "*From step*: the first one, in steps of ten, from which on it is among the first two. Bugs that no "
            "setting can have are injected into the ranks (`tests/diagnosis/injected_bugs/injection.py`). What "
            "concerns GPUs is tested with synthesized telemetry alone (`tests/diagnosis/test_findings.py`).",
            "",
            "## Bugs",
            "",
            HEADERS["bugs"],
            *lines["bugs"],
            "",
            "## Healthy runs",
            "",
            HEADERS["healthy"],
            *lines["healthy"],
            "",
        ]
    )


def _injection(trial: Trial) -> str:
    parts = [trial.base, *trial.overrides]
    parts += [f"fault {trial.fault}"] if trial.fault else []
    parts += [f"in the ranks: {trial.injected}"] if trial.injected else []
    return "; ".join(f"`{part}`" for part in parts).replace("|", "\\|")
