"""The program of a pod that prepares data: PID 1, which runs the preparation as a child and says how it ended.

Its last line is for the submitter, who may not see the volume: the sizes of the prepared data, or why there are none.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.kubernetes.pod import PREPARATION_DOCUMENT
from scaletrain_cli.launch.backends.kubernetes.pod_output import preparation_end_line, preparation_sizes_line
from scaletrain_cli.launch.preparation import prepare_here, sizes_of_datasets
from scaletrain_cli.own_processes import leave_current_folder
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.unexpected import known_error

_TERMINATED = 143  # 128 + SIGTERM, the shell convention


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data and return the exit code of the container."""
    parser = argparse.ArgumentParser(prog="preparation_pod", description="Prepare data in a pod.")
    parser.add_argument("--documents", type=Path, required=True, help=f"folder with {PREPARATION_DOCUMENT}")
    parser.add_argument("--runs-root", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    leave_current_folder()
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        failure = Path(folder) / "failure.json"
        try:
            document = json.loads((given.documents / PREPARATION_DOCUMENT).read_text(encoding="utf-8"))
            spec = RunSpec.model_validate(document["spec"])
            root, known = given.runs_root, document["hub"]
            datasets = prepare_here(spec, root, workers=given.workers, failure=failure, known=known)
            print(preparation_sizes_line(sizes_of_datasets(spec, root, datasets)), flush=True)
            return int(ExitCode.DONE)
        except Exception as error:
            problem = known_error(error, "data prepare")
            print(preparation_end_line(problem, (read_document(failure) or {}).get("reason")), flush=True)
            return int(problem.exit_code)


def _terminate(number: int, frame: object) -> None:
    """Pass SIGTERM on to the processes of the preparation, which end without leaving anything half written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
