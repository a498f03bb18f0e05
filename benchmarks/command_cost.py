"""CPU time of frequent verbs (submit --dry-run, list, status), compared with their limits.

CPU (user + system, children included), not wall time, so that a busy machine does not change the figures much. Each row
is the median of nine runs, taken in turns. The 200 runs are of this machine's scheduler and have ended, each with 500
lines of metrics and its checkpoints. `python benchmarks/command_cost.py --repeat 3 --runs 50` is the short form.
`--many 10000 --repeat 1` prints instead what verbs cost beside that many runs, and of a run of 1,000 attempts and
200,000 events: a verb of some runs must not cost as much as all of them. `--ssh` prints wall time instead: of verbs
through a login node, a real sshd on this machine, beside plain ssh with the same verb over a connection that is open.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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


EVENTS_OF_LARGE, ATTEMPTS_OF_LARGE = 200_000, 1000


def commands_beside(count: int) -> dict[str, tuple[list[str], float | None]]:
    """Return the commands that name some of ``count`` runs, or one with many attempts and events, with their limits."""
    names = [f"run-{number:05d}" for number in range(0, count, max(1, count // 200))]
    return {
        "list --state running": (["list", "--state", "running"], 3.0),
        "list --state finished": (["list", "--state", "finished"], 3.0),
        "list, the newest 20": (["list"], 3.0),
        f"rm of {len(names)}, --dry-run": (["rm", *names, "--dry-run"], 5.0),
        "report of 50": (["report", *names[:50], "--json"], 5.0),
        "status of one": (["status", names[0]], 1.0),
        "status, large": (["status", "large"], 5.0),
        "events, large": (["events", "large"], 10.0),
        "watch --once, large": (["watch", "large", "--once"], 5.0),
        f"rm of {len(names)}": (["rm", *names, "--yes"], 10.0),
    }


def make_many(root: Path, count: int) -> None:
    """Copy a finished run ``count`` times, and give one more many attempts and events."""
    make_runs(root, 1)
    first = root / "run-000"
    record = (first / "run.json").read_text(encoding="utf-8")
    for number in range(count):
        copy = shutil.copytree(first, root / f"run-{number:05d}", copy_function=os.link)
        (copy / "run.json").unlink()
        (copy / "run.json").write_text(record.replace("run-000", copy.name), encoding="utf-8")
    large = first.rename(root / "large")
    attempt = json.loads((large / "attempts/0001/attempt.json").read_text(encoding="utf-8"))
    attempt |= {"reason": "preempted", "exit_code": 75, "decision": {"requeue": True, "exit_code": 75, "why": "again"}}
    for number in range(1, ATTEMPTS_OF_LARGE + 1):
        folder = large / f"attempts/{number:04d}"
        folder.mkdir(exist_ok=True)
        (folder / "attempt.json").unlink(missing_ok=True)  # it has other names in the copies
        (folder / "attempt.json").write_text(json.dumps(attempt | {"number": number}), encoding="utf-8")
    events = ({"time": 1.7e9 + step, "event": "checkpoint", "step": step} for step in range(EVENTS_OF_LARGE))
    (large / "events.jsonl").unlink()
    saved = {"attempt": 1, "bytes": 1000, "seconds": 0.5}
    (large / "events.jsonl").write_text("".join(f"{json.dumps(event | saved)}\n" for event in events), encoding="utf-8")


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


OVER_SSH_TARGET_SECONDS = 0.5  # more than plain ssh
SMALL = Path(__file__).parents[1] / "tests" / "cli" / "small.yaml"


def compare_over_ssh(count: int, repeat: int) -> None:
    """Print the wall time of verbs that run on a login node, and of plain ssh with the same verb."""
    sys.path.insert(0, str(RECIPES.parent))
    from scaletrain_cli.launch.login_node.sent_runs import SentRun, remember
    from scaletrain_cli.launch.login_node.ssh import command_of
    from scaletrain_cli.spec.clusters_file import LoginNode
    from tests.login_node.server import REAL_COMMAND, ssh_server

    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None:
        raise SystemExit("no sshd; on Debian: apt-get install openssh-server")
    with tempfile.TemporaryDirectory(prefix="ssh-") as name:
        folder = Path(name)
        for inner in ("ssh", "bin", "config/scaletrain", "runs", "sockets"):
            (folder / inner).mkdir(parents=True)
        make_runs(folder / "runs", count)
        (folder / "scaletrain").write_text(REAL_COMMAND)
        (folder / "scaletrain").chmod(0o755)
        host = {"ssh": "login.site", "scaletrain": f"{folder}/scaletrain", "runs": f"{folder}/runs"}
        clusters = {"clusters": {"site": {"host": host, "scheduler": "local"}}}
        (folder / "config/scaletrain/clusters.yaml").write_text(json.dumps(clusters), encoding="utf-8")
        os.environ |= {
            "XDG_CONFIG_HOME": f"{folder}/config",
            "XDG_STATE_HOME": f"{folder}/state",
            "SCALETRAIN_RUNS": f"{folder}/no",
        }
        os.environ |= {"XDG_RUNTIME_DIR": f"{folder}/sockets", "PYTHONPATH": str(RECIPES.parent)}
        remember(SentRun("run-000", "site", time.time()))
        there = f"SCALETRAIN_RUNS={folder}/runs {folder}/scaletrain "
        pairs = {
            "status": (["status", "run-000"], f"{there}status run-000"),
            "list": (["list", "--cluster", "site"], f"{there}list"),
            "submit --dry-run": (
                ["submit", str(SMALL), "--cluster", "site", "--dry-run"],
                f"{there}submit {SMALL} --dry-run",
            ),
        }
        with ssh_server(sshd, folder, f"HOME={folder}"):
            os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
            taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pairs}
            cpu: dict[str, list[float]] = {name: [] for name in pairs}  # on this side, of the verb and of plain ssh
            for _ in range(repeat + 1):
                for name, (words, plain) in pairs.items():
                    commands = (
                        [sys.executable, "-m", "scaletrain_cli", *words],
                        command_of(LoginNode("site", **host), plain, "-T"),
                    )
                    for seconds, command in zip(taken[name], commands, strict=True):
                        began, before = time.perf_counter(), os.times()
                        subprocess.run(
                            command,
                            check=True,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                        )
                        seconds.append(time.perf_counter() - began)
                        after = os.times()
                        cpu[name].append(after.children_user + after.children_system - before[2] - before[3])
            control = f"ControlPath={folder}/sockets/scaletrain-ssh/%C"
            subprocess.run(["ssh", "-O", "exit", "-o", control, "login.site"], capture_output=True, check=True)
    print(f"{count} runs there; wall seconds, medians of {repeat}; CPU seconds on this side")
    heads = ("over ssh", "plain ssh", "more", "of least", "target", "CPU", "CPU plain")
    print(f"{'scaletrain ...':<20}{''.join(f'{head:>11}' for head in heads)}")
    for name, both in taken.items():
        verb, plain_ssh = both[0][1:], both[1][1:]  # the first one opens the connection
        median, beside = statistics.median(verb), statistics.median(plain_ssh)
        more = (median - beside, min(verb) - min(plain_ssh), OVER_SSH_TARGET_SECONDS)
        figures = (median, beside, *more, statistics.median(cpu[name][2::2]), statistics.median(cpu[name][3::2]))
        print(f"{name:<20}{''.join(f'{figure:>11.2f}' for figure in figures)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--many", type=int, help="copies of a finished run, beside which some verbs are measured")
    parser.add_argument("--ssh", action="store_true", help="measure verbs through a login node")
    options = parser.parse_args()
    if options.ssh:
        compare_over_ssh(options.runs, options.repeat)
        return
    count = options.many or options.runs
    commands = commands_beside(count) if options.many else COMMANDS
    taken: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_many(root, count) if options.many else make_runs(root, count)
        cpu_seconds(["--help"], root)  # writes the compiled files, where they are not there yet
        for _ in range(options.repeat):
            for name, (arguments, _target) in commands.items():
                taken[name].append(cpu_seconds(arguments, root))
    print(f"{count} runs under the runs root; medians of {options.repeat}")
    print(f"{'scaletrain ...':<36}{'CPU s, median':>14}{'least':>8}{'most':>8}{'target':>8}")
    for name, seconds in taken.items():
        target = commands[name][1]
        figures = f"{statistics.median(seconds):>14.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}"
        print(f"{name:<36}{figures}{f'{target:.1f}' if target is not None else '':>8}")


if __name__ == "__main__":
    main()
