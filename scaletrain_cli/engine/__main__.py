"""``python -m scaletrain_cli.engine RUN_DIR``: one rank, from its first signal handler to its exit code.

The process border: every exception becomes an exit code and a line of evidence for the restart policy.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from scaletrain_cli.engine.signals import PreemptionFlag, die_with_agent
from scaletrain_cli.errors import ExitCode, ScaletrainError


def main() -> int:
    """Train; the exit code of the rank."""
    flag = PreemptionFlag()
    flag.install()
    die_with_agent()
    path, attempt, rank = Path(sys.argv[1]), int(os.environ["SCALETRAIN_ATTEMPT"]), int(os.environ["RANK"])
    try:
        return int(_train(path, attempt, flag))
    except Exception as error:
        traceback.print_exc()
        code = error.exit_code if isinstance(error, ScaletrainError) else ExitCode.CRASHED
        _leave_evidence(path, attempt, rank, error, code)
        return int(code)


def _train(path: Path, attempt: int, flag: PreemptionFlag) -> ExitCode:
    from scaletrain_cli.engine.assembly import assemble
    from scaletrain_cli.engine.process_group import Ranks
    from scaletrain_cli.rundir.paths import RunDir
    from scaletrain_cli.rundir.record import read_record

    run = RunDir(path)
    return assemble(run, read_record(run), Ranks.from_environment(), attempt).fit(flag)


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return "oom"
    known = {"NonFiniteGradientError": "nan", "WrongNodesError": "wrong-nodes"}
    return known.get(name, "usage" if isinstance(error, ScaletrainError) else "crash")


def _leave_evidence(path: Path, attempt: int, rank: int, error: Exception, code: ExitCode) -> None:
    evidence = {"rank": rank, "reason": _reason(error), "message": str(error)[:2000], "exit_code": int(code)}
    folder = path / "attempts" / f"{attempt:04d}" / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(evidence), encoding="utf-8")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group whose peer has died would hang or abort in its destructor and hide the code
