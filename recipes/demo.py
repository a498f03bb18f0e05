"""The life of a run in a few minutes: prepare, plan, submit, preempt with a real signal, resume, finish, check.

Uses the command line only; the baseline (unigram entropy) is computed here, from the tokens.
Run it with `make demo`. Arguments are passed on as overrides, e.g. `recipes/demo.py training.steps=40`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = os.path.relpath(Path(__file__).with_name("llama-10m-cpu.yaml"))
PREEMPT_AT_STEP = 30
GIVE_UP_SECONDS = 900
OF_LEARNING = tuple(f"diagnosis.{name}" for name in ("first-loss", "loss", "order", "targets", "validation"))


def scaletrain(*arguments: str, show: bool = True) -> str:
    """Run one command and return its standard output; a failure ends the demo."""
    if show:
        print(f"\n$ scaletrain {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "scaletrain_cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"scaletrain {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout


def status(run_id: str) -> dict[str, Any]:
    """Return the present output of `scaletrain status --json`."""
    return dict(json.loads(scaletrain("status", run_id, "--json", show=False)))


def unigram_entropy_nats(dataset: dict[str, Any]) -> float:
    """Return the entropy of the token frequencies: the loss of the best model that ignores context."""
    counts = np.zeros(dataset["vocab_size"], dtype=np.int64)
    for shard in sorted(Path(dataset["path"]).glob("*/train.bin")):
        counts += np.bincount(np.fromfile(shard, dtype=dataset["dtype"]), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def wait_until(run_id: str, reached: Any) -> dict[str, Any]:
    """Poll the status until ``reached`` holds or the run has ended, and print a line every ten steps."""
    deadline, shown = time.monotonic() + GIVE_UP_SECONDS, -10
    while time.monotonic() < deadline:
        now = status(run_id)
        step = now["step"] or 0
        if step >= shown + 10:
            loss = "" if now["loss"] is None else f"loss {now['loss']:.3f}"
            print(f"  step {step:>4} of {now['total_steps']}  {loss}", flush=True)
            shown = step - step % 10
        if reached(now) or now["state"] in ("finished", "failed", "cancelled"):
            return now
        time.sleep(1.0)
    sys.exit(f"the run did not get there within {GIVE_UP_SECONDS} s; see `scaletrain logs {run_id}`")


def main() -> None:
    """Run the demo; exit with an error unless the run finished, lost no step and beat the baseline."""
    started = time.monotonic()
    sets = [word for override in sys.argv[1:] for word in ("--set", override)]
    dataset = json.loads(scaletrain("data", "prepare", RECIPE, *sets, "--json"))
    print(f"  {dataset['train_tokens']:,} training tokens of Python's own standard library in {dataset['path']}")
    print(scaletrain("plan", RECIPE, *sets))

    run_id = json.loads(scaletrain("submit", RECIPE, *sets, "--yes", "--json"))["run_id"]
    before = wait_until(run_id, lambda now: (now["step"] or 0) >= PREEMPT_AT_STEP)
    if not before["agent_pids"]:
        sys.exit(f"the run ended before it could be preempted: {before['state']}; {before['why']}")
    agent = before["agent_pids"][0]
    print(f"\n$ kill -TERM {agent}   # the notice that a spot node gets, sent to the run's node agent", flush=True)
    os.kill(agent, signal.SIGTERM)

    after = wait_until(run_id, lambda now: False)
    print(f"\n{scaletrain('status', run_id)}")
    entropy = unigram_entropy_nats(dataset)
    print(f"state                    {after['state']}")
    print(f"restarts                 {after['restarts']}")
    print(f"steps lost               {after['steps_lost_total']}")
    print(f"training loss            {after['loss']:.4f} nats")
    print(f"validation loss          {after['validation_loss']:.4f} nats")
    print(f"unigram entropy          {entropy:.4f} nats (the best that a model without context can do)")
    print(f"uniform guess            {math.log(dataset['vocab_size']):.4f} nats")
    print(f"run directory            {after['run_dir']}")
    print(f"wall time                {time.monotonic() - started:.0f} s")
    diagnosis = json.loads(scaletrain("diagnose", run_id, "--json"))
    codes = [finding["code"] for finding in diagnosis["findings"] if finding["severity"] != "note"]
    # Those about the speed depend on what else runs on this machine.
    warnings = [code for code in codes if code.startswith(OF_LEARNING)]
    failures = [
        complaint
        for complaint, holds in (
            ("the run did not finish", after["state"] == "finished"),
            ("the run was not restarted", after["restarts"] == 1),
            ("steps were lost", after["steps_lost_total"] == 0),
            ("the model learned no context", after["validation_loss"] < entropy),
            (f"the diagnosis warns of {', '.join(warnings)}", not warnings),
        )
        if not holds
    ]
    if failures:
        sys.exit("demo failed: " + "; ".join(failures))
    print("demo passed: the run was preempted, resumed from its checkpoint, and lost 0 steps")


if __name__ == "__main__":
    main()
