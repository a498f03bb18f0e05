"""mirror.json and superseded.json of a run directory: what its mirror holds, and whether another place owns the run."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document, undamaged_as, undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir

SCHEMA = "scaletrain.mirror/v1"
SUPERSEDED_SCHEMA = "scaletrain.superseded/v1"
_RESTORED = "mirror-restored.json"


@dataclass(frozen=True)
class MirrorState:
    """The mirror of a run as its process last saw it.

    ``steps``: those of the checkpoints in the mirror. ``step`` and ``committed``: the newest one, and when its manifest
    was written (Unix seconds). ``waiting_step``: the newest checkpoint here that is not there, and ``waiting_since``.
    ``uploading_step``: the one that is copied, ``sent_bytes`` of ``upload_bytes``. ``problem``: why tries fail since
    ``failing_since``. ``owner``: the place that continues the run in place of this one.
    """

    to: str
    generation: int
    updated: float
    steps: list[int] = field(default_factory=list)
    step: int | None = None
    committed: float | None = None
    waiting_step: int | None = None
    waiting_since: float | None = None
    uploading_step: int | None = None
    upload_bytes: int = 0
    sent_bytes: int = 0
    problem: Reason | None = None
    failing_since: float | None = None
    owner: str = ""

    @property
    def state(self) -> str:
        """Return ``superseded``, ``failing``, ``copying``, ``behind`` or ``current``."""
        if self.owner:
            return "superseded"
        if self.problem is not None:
            return "failing"
        if self.uploading_step is not None:
            return "copying"
        return "behind" if self.waiting_step is not None else "current"

    def lag_seconds(self, now: float) -> float:
        """Return for how long the newest checkpoint here has not been in the mirror; 0 if it is."""
        return 0.0 if self.waiting_since is None else max(0.0, now - self.waiting_since)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the stable JSON object (docs/json.md)."""
        problem = None if self.problem is None else self.problem.to_json()
        lag = round(self.lag_seconds(time.time() if now is None else now), 3)
        return {**asdict(self), "problem": problem, "state": self.state, "lag_seconds": lag}


def mirror_file(run: RunDir) -> Path:
    return run.path / "mirror.json"


def write_mirror_state(run: RunDir, state: MirrorState) -> None:
    """Replace the state file. Raises OSError."""
    problem = None if state.problem is None else state.problem.to_document()
    write_document(mirror_file(run), {"schema": SCHEMA, **asdict(state), "problem": problem})


def read_mirror_state(run: RunDir) -> MirrorState | None:
    """Return the state; None if the run has no mirror, or the file is damaged: training reads it."""
    return undamaged_as(MirrorState, mirror_file(run))


def mark_superseded(run: RunDir, owner: Mapping[str, Any]) -> None:
    """Record that another place continues the run: no attempt starts here any more, and the present one stops."""
    write_document(run.superseded_file, {"schema": SUPERSEDED_SCHEMA, "time": round(time.time(), 3), **owner})


def read_superseded(run: RunDir) -> dict[str, Any] | None:
    """Return the claim of the place that continues the run; None if this one does."""
    return (undamaged_document(run.superseded_file) or {}) if os.path.exists(run.superseded_file) else None


def mark_restored(run: RunDir, token: str) -> None:
    """Record that the history and the checkpoint of the claim with this token are here."""
    write_document(run.path / _RESTORED, {"token": token, "attempts": max(run.attempts(), default=0)})


def read_restored(run: RunDir) -> tuple[str, int]:
    """Return the token of the claim whose history was received, and its newest attempt; empty and 0 if none was."""
    data = read_document(run.path / _RESTORED) or {}
    attempts = data.get("attempts")
    return str(data.get("token", "")), attempts if isinstance(attempts, int) else 0


def begun_here(run: RunDir) -> list[int]:
    """Return the attempts that began after the history of another place was received, if it was."""
    received = read_restored(run)[1]
    return [number for number in run.attempts() if number > received]
