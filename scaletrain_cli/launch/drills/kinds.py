"""The kinds of drill: what is done to the run, by a rank itself so that it works under every scheduler, and what of it.

A table. The faults are those of engine/faults.py; how a drill is carried out and judged is not known here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

VARIABLE = "SCALETRAIN_FAULT"

# What a run must do by itself: start again and lose the steps since its newest checkpoint; start again and lose none;
# start again from the checkpoint before the newest; go on as if nothing were; go back in process; or stop for good, and
# go on once it is resumed.
Ending = Literal["restarted", "preempted", "older", "unharmed", "rolled-back", "stopped"]


@dataclass(frozen=True)
class DrillKind:
    """``fault`` in the words of engine/faults.py, with {rank} for the last rank, {step}, and {last}, three steps on.

    ``in_save``: the step is the one after a save began, else the middle between two.
    """

    name: str
    summary: str
    fault: str
    ending: Ending
    overrides: tuple[str, ...] = ()
    in_save: bool = False

    def settings(self, *, step: int, world_size: int) -> list[str]:
        """Overrides for the spec of a run that is hit before ``step``, in its first attempt."""
        fault = self.fault.format(rank=world_size - 1, step=step, last=step + 3)
        return [*self.overrides, f"env.{VARIABLE}={json.dumps(fault)}"] if fault else [*self.overrides]


UNDISTURBED = DrillKind("undisturbed", "nothing happens", "", "unharmed")
_HIT = "rank={rank} step={step} attempt=1"

KINDS: dict[str, DrillKind] = {
    kind.name: kind
    for kind in (
        DrillKind("exception", "a rank raises an exception", f"exception {_HIT}", "restarted"),
        DrillKind("sigterm", "a rank is told to leave, as by a preemption", f"sigterm {_HIT}", "preempted"),
        DrillKind("sigkill", "a rank is killed", f"sigkill {_HIT}", "restarted"),
        DrillKind(
            "sigkill-in-save",
            "a rank is killed while every rank writes a checkpoint",
            f"slow-save seconds=1.5 attempt=1; sigkill {_HIT}",
            "restarted",
            in_save=True,
        ),
        DrillKind("sigkill-agent", "the node agent is killed", f"sigkill-agent {_HIT}", "restarted"),
        DrillKind("node", "the agent and all ranks of a node are killed at once", f"node {_HIT}", "restarted"),
        DrillKind("sigstop", "a rank stands still and says nothing", f"sigstop {_HIT}", "restarted"),
        DrillKind(
            "slow-rank",
            "a rank takes a fifth of a second longer for each step",
            "slow-rank rank={rank} step={step} seconds=0.2 attempt=1",
            "unharmed",
        ),
        DrillKind("disk-full", "the disk is full during a save", f"disk-full write=3 {_HIT}", "stopped"),
        DrillKind(
            "stale-attempt",
            "the run is given up for dead and its checkpoints opened to the next attempt, and it goes on",
            "stale-attempt rank=0 step={step} attempt=1",
            "stopped",
        ),
        DrillKind("nan", "a rank's gradient becomes NaN", f"nan {_HIT}", "stopped", ("guard.nan=stop",)),
        DrillKind(
            "spike",
            "four batches have a loss of twenty times what it should be",
            "spike step={step}-{last} factor=20",
            "rolled-back",
            ("guard.spike.action=rollback",),
        ),
        *(
            DrillKind(
                kind,
                f"{what} in the newest checkpoint, and a rank is killed",
                f"{kind} rank=0 step={{step}} attempt=1",
                "older",
            )
            for kind, what in (
                ("truncate", "a file is cut short"),
                ("flip", "one bit is flipped"),
                ("delete", "a file is deleted"),
            )
        ),
    )
}
