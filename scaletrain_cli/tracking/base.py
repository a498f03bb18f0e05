"""The interface of a tracker. ``docs/extending.md`` shows a complete one in a package of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints

# How an attempt ended: the last step was trained; it will be resumed; it failed.
Outcome = Literal["finished", "preempted", "failed"]


class TrackerOptions(BaseModel):
    """The base of the options of a tracker: its section of ``tracking`` in the run spec. Every option has a default.

    Options hold no secrets: the run spec is written to the run directory. A tracker reads its key from the environment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @property
    def enabled(self) -> bool:
        """Return whether the tracker is started at all."""
        return True


@dataclass(frozen=True)
class Spread:
    """The newest values of one measure over many ranks, GPUs or nodes; ``worst`` names the one to look at first."""

    lowest: float
    median: float
    highest: float
    worst: str


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run beside its metrics; None where they are not known.

    ``goodput``: share of the time of all attempts. ``cost_usd``: so far. ``findings``: the number raised, by severity.
    ``spreads``: by ``rank``, ``gpu`` or ``node`` and the name of a measure in SI units; over ``measured_ranks`` ranks,
    fewer than ``ranks`` in a run of very many nodes, of which some are read.
    """

    total_steps: int
    ranks: int
    planned_step_seconds: float
    goodput: float | None = None
    remaining_seconds: float | None = None
    cost_usd: float | None = None
    cost_to_come_usd: float | None = None
    findings: Mapping[str, int] = field(default_factory=dict)
    spreads: Mapping[tuple[str, str], Spread] = field(default_factory=dict)
    measured_ranks: int | None = None


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker sees it.

    ``tracking_id``: eight letters and digits, the same in every attempt; a tracker creates one run under it and resumes
    that run later. ``folder``: the run directory. ``config``: the run spec as JSON values. ``attempt``: 1 is the first.
    ``figures``: reads the run directory and returns figures of the run, in a few tenths of a second of CPU time; None
    where nobody provides them. ``last_step``: of the metrics that this tracker was given before; 0 without any.
    """

    run_id: str
    tracking_id: str
    folder: Path
    config: Mapping[str, Any]
    attempt: int
    figures: Callable[[], RunFigures | None] = lambda: None
    last_step: int = 0


OptionText = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")]
Options = TypeVar("Options", bound=TrackerOptions)


class Tracker(ABC, Generic[Options]):
    """One experiment tracker in one attempt of a run.

    All methods are called in one thread that belongs to this tracker, in the order start, any of the others, finish.
    Any of them may raise and may take long: training never waits for them. After an exception the object is discarded,
    and a new one is started later in the same attempt.

    Steps arrive in increasing order, except those of evaluation jobs. A step that is trained again, after a preemption
    or a rollback, is passed on only to a tracker that can take back what it has (``rewinds``); for the others the
    values that came first remain.
    """

    options_model: ClassVar[type[TrackerOptions]]
    rewinds: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Create the run, or resume the one of an earlier attempt.

        Return the last step of each metric that the tracker holds, or None if the tracker cannot report it. Then the
        steps in its state file count, which may be a second older when the process was killed.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log ``values`` by name after optimizer step ``step`` (1-based), measured at Unix time ``seconds``.

        A step comes twice when it was also evaluated, each time with other names.
        """

    def rewind(self, step: int) -> None:
        """Remove all values of steps above ``step``. Called where ``rewinds`` is true, also after start."""
        raise NotImplementedError

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        """Log an event of events.jsonl (docs/run-directory.md), recorded at Unix time ``seconds``."""
        return

    def artifact(self, path: Path) -> None:
        """Store a file of the run directory. Called once per file, in the first attempt that has it."""
        return

    @abstractmethod
    def finish(self, outcome: Outcome) -> None:
        """Send what is left and close. Training waits for at most a minute, after a preemption for 20 seconds."""
