"""Start the ranks of a measurement on this machine, as a node agent would, and read the output of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.drill import VARIABLE
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.launch.submit import create_run, plan_for_engine
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec, load_spec
from scaletrain_cli.worker.checkpoint_commit import open_attempt

_BENCHMARKS = Path(__file__).parents[1]


def made_run(recipe: Path, overrides: list[str]) -> tuple[RunDir, RunSpec]:
    """Return a run directory under $SCALETRAIN_RUNS with its first attempt claimed, and its data prepared."""
    spec = load_spec(recipe, overrides)
    run = create_run(spec, make_plan(spec)).run
    prepare_run_datasets(spec, run.path.parent, {}, 1, lambda *_: None)
    open_attempt(run.checkpoints, run.new_attempt())
    return run, spec


def train_here(
    spec: RunSpec,
    *,
    fault: str = "",
    before: Callable[[RunDir], None] = lambda run: None,
) -> RunDir:
    """Train a run under $SCALETRAIN_RUNS as ``scaletrain train`` does, until it ends or fails, and return it.

    ``fault``: to inject, in the notation of engine/faults.py; ``before`` is called with the run before its first
    attempt. Raises InfeasibleError for a run that cannot be trained, and SchedulerError for a machine that cannot.
    """
    backend, plan = LocalBackend(), plan_for_engine(spec, spec.name)
    backend.preflight(spec, plan)
    data = prepare_data(spec)
    made = create_run(spec, plan)
    data.record(made.run)
    before(made.run)
    with _environment(VARIABLE, fault):
        backend.run_in_foreground(made.run, made.record, lambda: None)
    return made.run


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started; an empty value sets none."""
    earlier = os.environ.pop(name, None)
    os.environ.update({name: value} if value else {})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if earlier is None else {name: earlier})


def on_ranks(module: str, run: RunDir, world_size: int, *arguments: str) -> Any:
    """Return the JSON of the last line of rank 0's output. Raises RuntimeError with the end of a failed rank's log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = os.pathsep.join([str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "PYTHONPATH": found,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "SCALETRAIN_ATTEMPT": "1",
        "SCALETRAIN_AGENT_PID": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, str(run.path), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world_size)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as output:
                    started.append(subprocess.Popen(command, env=environment | place, stdout=output, stderr=output))
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            log = logs[next(index for index, code in enumerate(codes) if code)]
            raise RuntimeError(f"a rank of {module} failed:\n{log.read_text(errors='replace')[-3000:]}")
        return json.loads(logs[0].read_text(errors="replace").splitlines()[-1])
