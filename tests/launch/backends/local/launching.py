"""A command line that starts a local run with the stand-in engine, as a process whose Python children are forks too.

``submit``, ``resume`` (from scratch) or ``foreground``. It stays until the supervisor has ended.
"""

import os
import sys
from pathlib import Path

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from tests.forked import Forked, forking

ENGINE = "tests.launch.fake_engine"
STARTED = "started"


def launching(verb: str, run: RunDir) -> Forked:
    """Start the command line; a run in the background has then been submitted. Raises RuntimeError if it fails."""
    reads, writes = os.pipe()
    process = Forked(__name__, [verb, str(run.path)], forking(os.environ), stdout=writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as said:
        if verb != "foreground" and said.readline().strip() != STARTED:
            raise RuntimeError(process.communicate())
    return process


def main(verb: str, folder: str) -> int:
    run, backend = RunDir(Path(folder)), LocalBackend(engine=ENGINE)
    record = read_record(run)
    if verb == "foreground":
        return backend.run_in_foreground(run, record, lambda: None)
    if verb == "submit":
        submit_run(run, record, backend)
    else:
        resume(run, scheduler=backend, from_scratch=True)
    print(STARTED, flush=True)
    os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
