"""CPU time of frequent verbs (submit --dry-run, list, status), compared with their limits.

CPU (user + system, children included), not wall time, so that a busy machine does not change the figures much. Each row
is the median of nine runs, taken in turns. The 200 runs are of this machine's scheduler and have ended, each with 500
lines of metrics and its checkpoints. `python benchmarks/command_cost.py --repeat 3 --runs 50` is the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
SUBMIT_TARGET_SECONDS = 0.5
LIST_TARGET_SECONDS = 1.0
STEPS_PER_RUN = 500
CHECKPOINT_EVERY = 100
ON_KUBERNETES = (
    "cluster.scheduler=kubernetes",
    f"cluster.kubernetes.image=registry.example/scaletrain@sha256:{'a' * 64}",
    "cluster.kubernetes.runs.claim=runs",
)


def dry_run(recipe: str, *overrides: str) -> list[str]:
    """Return the arguments of a dry run of a recipe."""
    # A source that exists on this machine: a missing one ends the dry run.
    sets = [word for override in ("data.source=python-stdlib", *overrides) for word in ("--set", override)]
    return ["submit", str(RECIPES / recipe), "--dry-run", *sets]


# Arguments of each command and its limit in seconds of CPU; None: for comparison only.
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "--help": (["--help"], None),
    "submit --dry-run, local, 10M": (dry_run("llama-10m-cpu.yaml"), SUBMIT_TARGET_SECONDS),
    "submit --dry-run, Slurm, 7B": (dry_run("llama-7b-h100.yaml"), SUBMIT_TARGET_SECONDS),
    "submit --dry-run, Slurm, 70B": (dry_run("llama-70b-spot.yaml"), SUBMIT_TARGET_SECONDS),
    "submit --dry-run, Kubernetes, 7B": (dry_run("llama-7b-h100.yaml", *ON_KUBERNETES), SUBMIT_TARGET_SECONDS),
    "list, the newest 20": (["list"], None),
    "list --limit 0": (["list", "--limit", "0"], LIST_TARGET_SECONDS),
    "list --limit 0 --json": (["list", "--limit", "0", "--json"], LIST_TARGET_SECONDS),
    "status of the newest": (["status"], LIST_TARGET_SECONDS),
}


def cpu_seconds(arguments: list[str], root: Path) -> float:
    """Return user and system time of one command, including its children."""
    environment = {**os.environ, "SCALETRAIN_RUNS": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have the compiled files
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "scaletrain_cli", *arguments], env=environment, check=True, capture_output=True
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def make_runs(root: Path, count: int) -> None:
    """Create finished runs with the files that the launcher and the engine write."""
    from scaletrain_cli.errors import ExitCode
    from scaletrain_cli.launch.attempts import Decision, begin_attempt, end_attempt
    from scaletrain_cli.launch.exit_classification import Outcome
    from scaletrain_cli.launch.submit import create_run
    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.reasons import Reason
    from scaletrain_cli.rundir.journal import record_event
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.worker import checkpoint_commit

    spec = load_spec(RECIPES / "llama-10m-cpu.yaml")
    plan = make_plan(spec)
    lines = [{"step": step, "attempt": 1, "loss": 9.0 - step / STEPS_PER_RUN} for step in range(1, STEPS_PER_RUN + 1)]
    for line in lines[CHECKPOINT_EVERY - 1 :: CHECKPOINT_EVERY]:
        line["validation_loss"] = line["loss"] + 0.1
    metrics = "".join(f"{json.dumps(line)}\n" for line in lines)
    for number in range(count):
        run = create_run(spec, plan, f"run-{number:03d}", root=root).run
        attempt = begin_attempt(run, spec, scheduler="local", job_id="1", nodes=("here",))
        run.metrics.write_text(metrics, encoding="utf-8")
        for step in range(CHECKPOINT_EVERY, STEPS_PER_RUN + 1, CHECKPOINT_EVERY):
            writer = checkpoint_commit.HashingWriter(
                checkpoint_commit.stage_checkpoint(run.checkpoints, attempt, step) / "shard-0"
            )
            writer.write(b"state")
            files = {"shard-0": writer.close()}
            checkpoint_commit.commit_checkpoint(run.checkpoints, step, files, world_size=2, clean=True, attempt=attempt)
            record_event(run, "checkpoint", step=step)
        record_event(run, "finished", step=STEPS_PER_RUN)
        outcome = Outcome(ExitCode.DONE, "done", Reason("launch.all-ranks-finished"))
        end_attempt(run, spec, attempt, outcome, Decision(False, ExitCode.DONE, "done"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_runs(root, options.runs)
        cpu_seconds(["--help"], root)  # writes the compiled files, where they are not there yet
        for _ in range(options.repeat):
            for name, (arguments, _target) in COMMANDS.items():
                taken[name].append(cpu_seconds(arguments, root))
    print(f"{options.runs} runs under the runs root; medians of {options.repeat}")
    print(f"{'scaletrain ...':<36}{'CPU s, median':>14}{'least':>8}{'most':>8}{'target':>8}")
    for name, seconds in taken.items():
        target = COMMANDS[name][1]
        figures = f"{statistics.median(seconds):>14.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}"
        print(f"{name:<36}{figures}{f'{target:.1f}' if target is not None else '':>8}")


if __name__ == "__main__":
    main()
