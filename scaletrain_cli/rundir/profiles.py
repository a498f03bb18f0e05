"""Profiles of a living run: the request file ``profile``, and ``attempts/NNNN/profile/step-NNNNNNNN/``.

A folder of a profile has ``profile.json``, what was asked for, and for each profiled rank ``rank-NNNNN.json``, its
figures, and ``rank-NNNNN.trace.json.gz``. ``summary.json`` joins the figures of all ranks and the plan's.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scaletrain_cli.rundir.documents import (
    entries,
    parse_json,
    read_as,
    read_document,
    reporting_damage,
    typed,
    write_document,
)
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, open_to_read

SCHEMA = "scaletrain.profile/v1"
MOST_STEPS, MOST_RANKS = 50, 16
# What each moment of the profiled steps counts as: the first of these that applies. Seconds per step; their sum is the
# time of a step. engine/metrics/trace.py defines each.
CAUSES = (
    "compute",
    "optimizer",
    "exposed_communication",
    "bubble",
    "copies",
    "data_wait",
    "between_steps",
    "host",
    "idle",
)
PLANNED = ("compute", "exposed_communication", "bubble", "optimizer", "data_wait")  # causes that a plan has
_FOLDER = re.compile(r"step-(\d{8,})")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class ProfileRequest:
    """A request for a profile, in the file ``profile`` of the run directory. An empty file has the default values.

    ``id``: of the command that waits for it. ``step``: the first step of the trace; 0: the soonest. ``memory``: adds
    allocations, ``stacks``: lines of Python code; ``nvtx``: emits NVTX ranges for Nsight Systems, and no trace.
    """

    id: str = ""
    step: int = 0
    steps: int = 3
    ranks: tuple[int, ...] = (0,)
    memory: bool = False
    stacks: bool = False
    nvtx: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        if not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"steps must be 1 to {MOST_STEPS}, not {self.steps}")
        if self.step < 0:
            raise ValueError(f"step must be positive, not {self.step}")
        if not 1 <= len(self.ranks) <= MOST_RANKS or len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"ranks must be 1 to {MOST_RANKS} different ranks, not {list(self.ranks)}")


def write_request(run: RunDir, request: ProfileRequest) -> None:
    """Write the request; it replaces an earlier one that the run has not taken yet. Raises OSError."""
    write_document(run.profile_file, asdict(request))


def read_request(run: RunDir) -> ProfileRequest | None:
    """Return the request that the run has not taken yet; None without a file. Raises ValueError for other contents."""
    try:
        with open_to_read(run.profile_file) as file:
            text = file.read(_MOST_BYTES).strip()
    except FileNotFoundError:
        return None
    data = parse_json(text) if text else {}
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    known = [field.name for field in dataclasses.fields(ProfileRequest)]
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    try:
        request: ProfileRequest = typed(ProfileRequest, data)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return request


def withdraw_request(run: RunDir, request_id: str) -> None:
    """Remove the request with this id if the run has not taken it yet."""
    with contextlib.suppress(ValueError, OSError):
        if (waiting := read_request(run)) is not None and waiting.id == request_id:
            run.profile_file.unlink()


@dataclass(frozen=True)
class Profile:
    """A requested profile. ``state``: ``scheduled``, ``recorded`` or ``not-reached``: the attempt ended before it.

    ``first_step`` is the first step of the trace; the step before it warms the profiler up. ``planned``: seconds of a
    step by cause, and in all, by the plan.
    """

    request: str
    attempt: int
    state: str
    first_step: int
    steps: int
    ranks: Sequence[int]
    device: str
    planned: Mapping[str, float]

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps - 1


def profile_folder(run: RunDir, attempt: int, first_step: int) -> Path:
    return run.attempt(attempt) / "profile" / f"step-{first_step:08d}"


def rank_file(folder: Path, rank: int, ending: str = ".json") -> Path:
    """Return a file of one rank: ``.json`` its figures, ``.trace.json.gz`` its trace, ``.memory.pickle`` its memory."""
    return folder / f"rank-{rank:05d}{ending}"


def write_profile(folder: Path, profile: Profile) -> None:
    """Write ``profile.json``. Raises OSError."""
    make_folder(folder)
    write_document(folder / "profile.json", asdict(profile))


def read_profile(folder: Path) -> Profile | None:
    """Return what was profiled; None without ``profile.json``. Raises UsageError for a damaged one."""
    return read_as(Profile, folder / "profile.json")


def profile_folders(run: RunDir) -> list[Path]:
    """Return the folders of all profiles, the newest attempt and the latest step last."""
    folders: list[Path] = []
    for attempt in run.attempts():
        folders += (one for one in entries(run.attempt(attempt) / "profile") if _FOLDER.fullmatch(one.name))
    return folders


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a profile from the files of its ranks, as in ``summary.json``; None without a profile.

    ``ranks_missing``: those that have not written their figures yet. Raises UsageError for damaged figures.
    """
    if (profile := read_profile(folder)) is None:
        return None
    documents = {rank: read_document(rank_file(folder, rank)) for rank in profile.ranks}
    by_rank = [{"rank": rank, **figures} for rank, figures in documents.items() if figures is not None]
    with reporting_damage(folder):
        measured = _measured([figures for figures in by_rank if figures.get("causes")])
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        **asdict(profile),
        "ranks_missing": [rank for rank, figures in documents.items() if figures is None],
        "planned": dict(profile.planned),
        "measured": measured,
        "by_rank": by_rank,
    }


def _measured(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each cause, and of a step, over the ranks; empty without ranks."""
    if not ranks:
        return {}
    seconds = {name: [float(figures["causes"][name]) for figures in ranks] for name in CAUSES}
    seconds["step"] = [float(figures["step_seconds"]) for figures in ranks]
    return {
        name: {"median": median(values), "lowest": min(values), "highest": max(values)}
        for name, values in seconds.items()
    }


def write_summary(folder: Path) -> None:
    """Write ``summary.json`` from the files of the ranks that have written theirs. Raises OSError."""
    if (summary := summary_of(folder)) is not None:
        write_document(folder / "summary.json", summary)
