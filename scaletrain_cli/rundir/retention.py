"""Which checkpoints may go, by their steps and marks alone. Deletes nothing and reads no file."""

from __future__ import annotations

from collections.abc import Sequence

from scaletrain_cli.rundir.checkpoints import Checkpoint


def superfluous(committed: Sequence[Checkpoint], keep: int, keep_every: int | None = None) -> list[Checkpoint]:
    """Of ``committed``, oldest first, those that nobody asked to keep.

    The ``keep`` newest stay, the newest clean one, and for ever each whose step is a multiple of ``keep_every``.
    """
    newest_clean = next((one for one in reversed(committed) if one.clean), None)
    older = committed[: max(0, len(committed) - keep)]
    return [one for one in older if one is not newest_clean and not (keep_every and one.step % keep_every == 0)]
