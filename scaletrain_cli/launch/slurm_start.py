"""When Slurm says that a job would start: what `sbatch --test-only` prints, read as data. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scaletrain_cli.launch.outlook import Start
from scaletrain_cli.launch.slurm_tables import moment

# "sbatch: Job 12 to start at 2026-11-22T00:30:00 using 16 processors on nodes n[1-2] in partition main"
_ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<at>\S+)(?:.*? on (?:nodes )?(?P<nodes>\S+))?(?: in partition (?P<partition>\S+))?"
)


def start_and_rest(lines: Sequence[str], now: float, *, reservations_hidden: bool = False) -> tuple[Start, list[str]]:
    """Slurm's estimate, and what else it or a plugin of the site said."""
    counted = ", reservations that are hidden from you counted" if reservations_hidden else ""
    start: Start | None = None
    rest = []
    for line in lines:
        match = _ESTIMATE.search(line)
        at = moment(match["at"]) if match is not None else None
        if match is None or at is None:
            rest.append(line)
            continue
        nodes = f" on {match['nodes']}" if match["nodes"] else ""
        partition = f" of {match['partition']}" if match["partition"] else ""
        source = f"Slurm's estimate (sbatch --test-only){nodes}{partition}{counted}"
        start = Start(at, f"{source}; jobs of a higher priority may come before it" if at > now + 60 else source)
    return start or Start(None, "sbatch --test-only gave no time"), rest
