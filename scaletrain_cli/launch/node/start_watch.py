"""Say what the start of an attempt waits for, long before the limits of its phases, which are generous."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scaletrain_cli.launch.attempts import read_attempt
from scaletrain_cli.launch.node.heartbeats import LastBeat, furthest_behind
from scaletrain_cli.launch.node.options import AgentOptions
from scaletrain_cli.launch.node.record import read_node_records
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir

NOTICE_SECONDS = 60.0  # of a phase; after it whenever the time has doubled
_ALONE = ("start", "imports")  # phases in which a rank waits for no other one
_PHASES = (*_ALONE, "connect", "preflight", "data", "set-up", "restore")


@dataclass
class StartWatch:
    """Records the event ``start-waits`` while no rank of this node has begun a step and a phase takes long.

    Agents of other nodes than the first are silent about phases in which ranks wait for each other.
    """

    run: RunDir
    options: AgentOptions
    node: str
    nodes: int
    _phase: str = field(default="", init=False)
    _due: float = field(default=NOTICE_SECONDS, init=False)

    def look(self, beats: Mapping[int, LastBeat], now: float) -> None:
        """Record what the start waits for, if it is due. ``now``: monotonic seconds. Raises OSError."""
        behind = beats[furthest_behind(beats)]
        if self._due == float("inf") or behind.phase not in _PHASES:
            self._due = float("inf")  # it trains
            return
        if behind.phase != self._phase:
            self._phase, self._due = behind.phase, NOTICE_SECONDS
        seconds, is_first = now - behind.received, self.options.node_rank == 0
        if seconds < self._due or not (is_first or behind.phase in _ALONE):
            return
        self._due = 2 * seconds
        attempt = self.options.attempt
        params = {
            "node": self.node,
            "ranks": [rank for rank, beat in beats.items() if beat.phase == behind.phase],
            "phase": behind.phase,
            "seconds": round(seconds),
            "limit": round(behind.allowed_seconds),
        }
        why = Reason("node.start-waits", params)
        joined = {node.name for node in read_node_records(self.run, attempt)}
        if is_first and len(joined) < self.nodes:
            began = read_attempt(self.run, attempt)
            absent = [name for name in (began.nodes if began is not None else ()) if name not in joined]
            counts = {"joined": len(joined), "of": self.nodes, "absent": absent or ["not named by the scheduler"]}
            why = Reason("node.start-waits-for-nodes", {**params, **counts})
        record_event(self.run, "start-waits", attempt=attempt, text=str(why), **why.to_document())
