"""Compare the planner with published measurements: memory, step time, which runs fit, and which it would choose.

Reads tables of runs (CSV) from the directory of ``--truth`` or of the variable SCALETRAIN_PLANNER_TRUTH. The planner
gets each run's model, machines and layout, never a measured value. A missing file, or a row that no run spec describes,
is skipped, and the output says why. ``--write`` writes the measured errors to the planner's catalogue, from which the
ranges of plans follow, and the tables of docs/planner.md; it needs every file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from planner_truth import deepspeed_runs, left_out, ranges, report
from planner_truth.evaluation import Score, judge, score
from planner_truth.sets import SETS

VARIABLE = "SCALETRAIN_PLANNER_TRUTH"
ROOT = Path(__file__).resolve().parents[1]
ERRORS = ROOT / "scaletrain_cli" / "plan" / "catalogue" / "errors.json"
PAGE = ROOT / "docs" / "planner.md"


def main() -> int:
    """Print the scores; return 2 if the directory or a name is wrong."""
    names = [chosen.name for chosen in SETS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--truth", metavar="DIR", help=f"directory of the tables (else ${VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--set", action="append", metavar="NAME", help=f"score only this one: {', '.join(names)}")
    parser.add_argument("--rows", action="append", metavar="NAME", help="also print every row of this set, worst first")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="refit DeepSpeed's constants without each of its sources in turn"
    )
    parser.add_argument("--write", action="store_true", help=f"write {ERRORS.relative_to(ROOT)} from these runs")
    parser.add_argument("--framework", help="model every run under this framework's habits instead of its own")
    options = parser.parse_args()
    for name in [*(options.set or []), *(options.rows or [])]:
        if name not in names:
            parser.error(f"no set is called {name}. Known: {', '.join(names)}")
    given = options.truth or os.environ.get(VARIABLE)
    if not given:
        print(
            "No measurements to compare with: name their directory with --truth DIR, "
            f"{VARIABLE}=DIR or make bench-planner TRUTH=DIR."
        )
        return 0
    directory = Path(given)
    if not directory.is_dir():
        parser.error(f"{directory} is not a directory")
    if options.leave_one_out:
        print(*left_out.lines(left_out.leave_one_out(deepspeed_runs.TABLE, directory)), "", sep="\n")
        print(*left_out.without_each_constant(deepspeed_runs.TABLE, directory), sep="\n")
        return 0
    wanted = set(options.set or options.rows or names) | set(options.rows or [])
    chosen = [truth_set for truth_set in SETS if truth_set.name in wanted]
    outcomes = {table: judge(table, directory, options.framework) for table in dict.fromkeys(s.table for s in chosen)}
    scores = [score(truth_set, outcomes[truth_set.table]) for truth_set in chosen]
    if options.write:
        missing = [table.file for table, outcome in outcomes.items() if outcome.missing]
        if missing or options.set or options.rows or options.framework:
            parser.error(f"--write needs every table, as they are{': missing ' if missing else ''}{', '.join(missing)}")
        write(ranges.error_file(outcomes), scores)
    if options.json:
        print(json.dumps(report.to_json(scores, outcomes, with_rows=bool(options.rows)), indent=2))
        return 0
    for found in scores:
        if found.truth_set.name in (options.rows or []):
            print(f"== {found.truth_set.title}", *report.rows(found), "", sep="\n")
    print(*report.lines(scores, outcomes), *ranges.lines(outcomes), sep="\n")
    return 0


def write(errors: dict[str, Any], scores: list[Score]) -> None:
    """Write the measured errors to the catalogue, and the tables between the markers of the documentation."""
    # One cell or regime per line.
    text = re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(errors, indent=1))
    ERRORS.write_text(text + "\n", encoding="utf-8")
    tables = {"accuracy": list(report.markdown(scores)), "ranges": list(ranges.markdown(errors))}
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        head, rest = text.split(f"<!-- {name}: {ranges.COMMAND} -->\n")
        table = "\n".join(lines)
        text = f"{head}<!-- {name}: {ranges.COMMAND} -->\n{table}\n{rest[rest.index(f'<!-- end of {name} -->') :]}"
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {ERRORS} {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
