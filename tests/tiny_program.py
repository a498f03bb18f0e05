"""A training program for ``code.engine`` that trains nothing, so that tests of the launcher take little time."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[1]
# It logs its steps, and saves the step as its state.
PROGRAM = """
import sys, time
from scaletrain_cli.worker import ExitCode, Rank

rank = Rank.start(sys.argv[1])

def train():
    latest = rank.checkpoints.latest()
    step = latest.step if latest else 0
    rank.checkpoints.open()
    rank.record_event("resumed" if step else "started", step=step)
    while step < rank.resolved.total_steps and not rank.preemption.raised:
        step += 1
        rank.heartbeat.beat(step, "step")
        rank.log_metrics(step, loss=1.0 / step)
        time.sleep(float(rank.resolved.spec["env"]["STEP_SECONDS"]))
    staged = rank.checkpoints.stage(step)
    with staged.file("state") as file:
        file.write(str(step).encode())
    rank.checkpoints.commit(step, staged.digests)
    rank.record_event("checkpoint", step=step)
    done = step >= rank.resolved.total_steps
    rank.record_event("finished" if done else "preempted", step=step)
    print("finished" if done else "preempted", "at step", step)
    return ExitCode.DONE if done else ExitCode.PREEMPTED

rank.run(train)
"""


def settings(folder: Path, *, steps: int, step_seconds: float = 0.01) -> list[str]:
    """Write the program to ``folder`` as the module ``tiny``; return the overrides of a spec that run it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.py").write_text(PROGRAM)
    return [
        *("cluster.gpus_per_node=1", f"training.steps={steps}", "training.schedule.warmup_steps=2"),
        *("evaluation.every=0", "code.engine=tiny"),
        *(f"env.PYTHONPATH={folder}:{PROJECT}", f"env.STEP_SECONDS='{step_seconds}'"),
    ]
