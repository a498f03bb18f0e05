"""``python -m tests.diagnosis.injected_bugs [--write PAGE] [WORD ...]``: train buggy and healthy runs.

Prints what the diagnosis finds in them; with words only those whose names hold one of them. Exits with 1 if a bug is
not among the first two findings within 200 steps, or a healthy run has a finding above a note.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.diagnosis.injected_bugs.table import HEADERS, Line, bug_line, healthy_line, page
from tests.diagnosis.injected_bugs.verdicts import Verdict, judged


def main() -> int:
    """Run the campaign and return the exit code."""
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis.injected_bugs", description=description)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of names; every run without")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables as a page, too")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where DeepSpeed talks in every process
    sys.stderr = os.fdopen(errors, "w")
    began = time.monotonic()
    lines: dict[str, list[Line]] = {"bugs": [], "healthy": []}
    wrong: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, line_of in (("bugs", bug_line), ("healthy", healthy_line)):
            print(f"\n{HEADERS[kind]}")
            for verdict in judged(kind, Path(folder) / kind, options.words, options.workers):
                lines[kind].append(line_of(verdict))
                print(lines[kind][-1], flush=True)
                wrong += [verdict] if verdict.wrong else []
    seconds = time.monotonic() - began
    for verdict in wrong:
        print(f"WRONG {verdict.name}: {verdict.wrong}\n{verdict.outcome.log if verdict.outcome else ''}")
    count = sum(len(each) for each in lines.values())
    print(f"\n{count} runs in {seconds:.0f} s, {len(wrong)} of them wrong")
    if options.write:
        options.write.write_text(page(lines, seconds), encoding="utf-8")
    return int(bool(wrong) or not count)


if __name__ == "__main__":
    sys.exit(main())
