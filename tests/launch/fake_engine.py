"""A stand-in for a rank: it follows the engine's contract with the launcher, trains nothing, and fails on request.

``FAKE`` in the environment holds a JSON object; see misbehave() for its keys. Imports nothing heavy at its start.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from scaletrain_cli.engine.faults import Faults
from scaletrain_cli.rundir.paths import RunDir, swap_folder
from scaletrain_cli.worker.agent_watch import AgentWatch
from scaletrain_cli.worker.heartbeat import Heartbeat, install_stack_dump
from scaletrain_cli.worker.telemetry import RankTelemetry

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("SCALETRAIN_ATTEMPT", "0"))

_stop_at: list[int] = []


def main() -> int:
    run_folder = Path(sys.argv[1])
    fake: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["SCALETRAIN_AGENT_PID"]):
        return 1
    install_stack_dump(os.environ)
    time.sleep(fake.get("start_seconds", 0))
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
    if "touch" in fake:
        Path(fake["touch"]).touch()
    if "swap" in fake:
        folder = swap_folder(run_folder.name, ATTEMPT, int(os.environ["NODE_RANK"]), os.environ) / f"rank{RANK}"
        folder.mkdir(parents=True)
        (folder / "moments").write_bytes(b"0" * 1000)
    for name in fake.get("echo", []):
        say(f"{name}={os.environ[name]!r}")
    say("up")
    watch = AgentWatch.of_rank(RunDir(run_folder), ATTEMPT, **fake.get("agent_watch", {}))
    watch.start()
    if fake.get("detached_child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        say(f"child {child.pid}")
    code = misbehave(run_folder, fake)
    watch.leave()
    return code


def misbehave(run_folder: Path, fake: dict[str, Any]) -> int:
    """Train ``steps`` steps of ``step_seconds``, from the latest checkpoint on, unless the plan says otherwise.

    ``die``: {"attempt:rank": exit code, or minus a signal number}; any part may be ``*``. ``reason``: the reason in the
    failure file. ``die_at``: the step at which the rank dies. ``checkpoint_every``: steps between checkpoints.
    ``stay``: {"attempt:rank": step after which the rank waits for a signal or for the file ``go`` in the run
    directory}, so that a test need not be faster than the steps; it beats meanwhile, unless it has announced
    ``silence``. ``deaf``: ranks that ignore signals.
    ``save_seconds``: duration of a save after a signal, which the file ``save`` in the run directory ends before.
    ``echo``: variables to print. ``touch``: a file to create.
    ``swap``: write to the node's disk, as NVMe offload does. ``hang``: {"attempt:rank": step at which the rank
    sleeps}; the ranks in ``stopped`` stop themselves by SIGSTOP instead. ``silence``: seconds that a step may take.
    ``linger``: rank 0 waits for ``go`` after it has finished. ``agent_watch``: limits of the watchdog over the node
    agent. $SCALETRAIN_FAULT injects faults as in the engine.
    """
    heartbeat = Heartbeat.from_environment(os.environ)
    telemetry = RankTelemetry.from_environment(os.environ, interval_seconds=0.0)
    checkpoints = run_folder / "checkpoints"
    ended = RunDir(run_folder).attempt(ATTEMPT) / f".ended-{RANK}"
    step = max((int(path.name[5:]) for path in checkpoints.glob("step-????????")), default=0)
    end, faults = planned(fake.get("die", {})), Faults.from_environment(RANK, ATTEMPT, checkpoints)
    while step < fake.get("steps", 3):
        time.sleep(fake.get("step_seconds", 0.02))
        step += 1
        heartbeat.beat(step, "step", fake.get("silence"))
        telemetry.add(step, {"step_seconds": fake.get("step_seconds", 0.02)})
        if step == planned(fake.get("hang", {})):
            hang(stopped=RANK in fake.get("stopped", []))
        faults.before_step(step)
        if end is not None and step >= fake.get("die_at", 1):
            if end == 0:
                ended.touch()
            return die(run_folder, end, fake.get("reason"))
        if RANK == 0:
            append(run_folder / "metrics.jsonl", {"step": step, "loss": 1.0 / step})
        if step == planned(fake.get("stay", {})):
            while not _stop_at and not (run_folder / "go").exists():
                time.sleep(0.05)
                if "silence" not in fake:  # as an engine whose steps go on; otherwise it is within one long step
                    heartbeat.beat(step, "step")
        save = bool(fake.get("checkpoint_every")) and step % fake["checkpoint_every"] == 0
        if _stop_at and RANK not in fake.get("deaf", []):
            for _ in range(round(fake.get("save_seconds", 0) / 0.05)):
                if not (run_folder / "save").exists():
                    time.sleep(0.05)
            commit(run_folder, step)
            say("saved")
            return 75
        if save:
            commit(run_folder, step)
    ended.touch()
    if RANK == 0:
        # All ranks of an engine commit its last checkpoint: if one of a node that began has failed, rank 0 waits for
        # its own end.
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        while not all(
            ended.with_name(f".ended-{int(path.name[5:9]) * size + local}").exists()
            for path in (ended.parent / "nodes").glob("node-*.json")
            for local in range(size)
        ):
            time.sleep(0.01)
            heartbeat.beat(step, "save")
            if _stop_at:
                commit(run_folder, step)
                return 75
        append(run_folder / "events.jsonl", {"time": time.time(), "event": "finished", "step": step})
        while "linger" in fake and not (run_folder / "go").exists():  # as a tracker that still sends
            time.sleep(0.05)
            heartbeat.beat(step, "end")
    return 0


def planned(plan: dict[str, int]) -> int | None:
    """Return the value of a plan by attempt and rank for this rank."""
    keys = (f"{ATTEMPT}:{RANK}", f"{ATTEMPT}:*", f"*:{RANK}", "*:*")
    return next((plan[key] for key in keys if key in plan), None)


def hang(stopped: bool) -> None:
    say("hanging")
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def die(run_folder: Path, code: int, reason: str | None) -> int:
    if reason is not None:
        failure = {"rank": RANK, "reason": reason, "message": f"{reason} on request", "exit_code": code}
        path = run_folder / f"attempts/{ATTEMPT:04d}/failures/rank-{RANK:05d}.json"
        path.write_text(json.dumps(failure), encoding="utf-8")
    say(f"dying {code}")
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(60)
    return code


def commit(run_folder: Path, step: int) -> None:
    if RANK != 0:
        return
    from scaletrain_cli.worker import checkpoint_commit

    folder = run_folder / "checkpoints"
    writer = checkpoint_commit.HashingWriter(checkpoint_commit.stage_checkpoint(folder, ATTEMPT, step) / "shard-0")
    writer.write(f"state at {step}".encode())
    files = {"shard-0": writer.close()}
    checkpoint_commit.commit_checkpoint(folder, step, files, world_size=1, clean=True, attempt=ATTEMPT)
    append(run_folder / "events.jsonl", {"time": time.time(), "event": "checkpoint", "step": step})


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def on_signal(signum: int, frame: FrameType | None) -> None:
    _stop_at.append(signum)
    say(f"heard {signal.Signals(signum).name}")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    # As the engine does: a second signal would end the interpreter's shutdown, which restores the default handlers.
    os._exit(main())
