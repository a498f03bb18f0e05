"""Names of the files in a run directory, the location of run directories, and the sweeps that they belong to.

A sweep has no folder: it is the set of runs under the runs root whose files sweep.json name it.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.documents import entries, undamaged_as, write_document
from scaletrain_cli.safe_files import make_folder, user_name
from scaletrain_cli.sent_run import sent_run, sent_run_folder

_ATTEMPT = re.compile(r"\d{4,}")
MEMORY = Path("/dev/shm")  # a file system in memory, which Linux has on every machine


def runs_root() -> Path:
    """Return ``$SCALETRAIN_RUNS``, else the root in the user's clusters.yaml, else ``./runs``."""
    if named := os.environ.get("SCALETRAIN_RUNS"):
        return Path(named).absolute()
    from scaletrain_cli.spec.clusters_file import configured_runs_root

    return (configured_runs_root() or Path("runs")).absolute()


class _Below:
    """The path of a file or folder of this name in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", of: type["RunDir"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Creating one does not touch the file system."""

    path: Path

    record = _Below("run.json")
    events = _Below("events.jsonl")
    metrics = _Below("metrics.jsonl")
    checkpoints = _Below("checkpoints")
    reference = _Below("reference")  # the log-probabilities of preference pairs under the first weights
    submission = _Below("submission.json")
    secrets = _Below("secrets.json")  # values of ``secret_env``, mode 0600; no other file contains them
    sent = _Below("sent.txt")  # the job that was submitted last: a script, a manifest or a command
    stop_file = _Below("cancelled")  # written by ``scaletrain cancel``: no further attempt may start
    manual_stop_file = _Below("stop")  # written by a user without the command, through the file system: the same effect
    save_file = _Below("save")  # written by a user who requests a checkpoint; the run removes it and saves
    # Written by ``scaletrain profile``, or empty by a user, to request a profile; the run removes it.
    profile_file = _Below("profile")
    # Written when another place continues the run from its mirror: no further attempt may start here.
    superseded_file = _Below("superseded.json")
    mirror_claim_file = _Below("mirror-claim.json")  # the claim with which this directory owns the run in its mirror

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def is_cancelled(self) -> bool:
        """Return True if the run was cancelled, by the command or by a stop file, or continues in another place."""
        # os.path, unlike Path, takes an I/O error for a missing file: it must not end an agent that looks each second.
        if any(map(os.path.exists, (self.stop_file, self.manual_stop_file, self.superseded_file))):
            return True
        return (known := sent_run(self.path)) is not None and known.is_cancelled

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / f"{number:04d}"

    def measured(self, attempt: int) -> Path:
        """The measured memory of an attempt, compared with the plan."""
        return self.attempt(attempt) / "measured.json"

    def ledger(self, attempt: int) -> Path:
        """The time accounting of an attempt."""
        return self.attempt(attempt) / "ledger.json"

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts made so far, in order."""
        return sorted(int(one.name) for one in entries(self.path / "attempts") if _ATTEMPT.fullmatch(one.name))

    def new_attempt(self, after: int = 0) -> int:
        """Claim the next attempt number, above ``after``; concurrent processes get different ones."""
        number = max(after, *self.attempts(), 0) + 1
        while True:
            try:
                make_folder(self.attempt(number) / "logs", exist_ok=False)
                return number
            except FileExistsError:
                number += 1


def find_run_or_newest(name: str | None) -> RunDir:
    """Return the run that find_run() finds, or without a name the one that was made last. Raises UsageError."""
    if name is not None or sent_run_folder() is not None:
        return find_run(name or "")
    runs = list_runs()
    if not runs:
        raise UsageError(f"no runs under {runs_root()}. Run `scaletrain submit SPEC` to start one.")
    return max(runs, key=submitted_at)


def submitted_at(run: RunDir) -> float:
    """Return when run.json was written, in Unix seconds; minus infinity if the run was removed meanwhile."""
    try:
        return os.stat(f"{run.path}/run.json").st_mtime
    except OSError:
        return float("-inf")


def find_run(name: str) -> RunDir:
    """Return the run with this id, unique prefix or directory. Raises UsageError."""
    if (shown := sent_run_folder()) is not None:  # whatever its name or path is on the machine that asks for it
        return RunDir(shown)
    # os.path, unlike Path, returns False for a name that no file can have.
    if name and os.path.isfile(os.path.join(name, "run.json")):
        return RunDir(Path(os.path.abspath(name)))
    root = runs_root()
    runs = [run] if (run := exact_run(name)) is not None else list_runs(name) if name else []
    if len(runs) == 1:
        return runs[0]
    if runs:
        raise UsageError(
            f"{name} matches {len(runs)} runs: {', '.join(run.run_id for run in runs)}. Use a longer prefix."
        )
    place = root / name
    if name and os.path.lexists(place) and not os.access(place, os.R_OK | os.X_OK, effective_ids=True):
        raise UsageError(
            f"{place} cannot be read by {user_name(os.geteuid())}: it belongs to {user_name(place.lstat().st_uid)}. "
            f"Ask that user to run `chmod -R g+rX {place}`."
        )
    raise UsageError(
        f"no run {name[:200]!r} under {root}. `scaletrain list` shows the runs; $SCALETRAIN_RUNS sets the runs root."
    )


def exact_run(name: str) -> RunDir | None:
    """Return the run with exactly this id, without listing the runs root; None if there is none."""
    run = RunDir(runs_root() / name)
    return run if name and name == run.run_id and not name.startswith(".") and os.path.isfile(run.record) else None


def swap_folder(run_id: str, attempt: int, node_rank: int, environment: Mapping[str, str]) -> Path:
    """Return the folder for NVMe offload of one node, in ``$SCALETRAIN_SWAP`` or the temporary folder."""
    parent = environment.get("SCALETRAIN_SWAP") or environment.get("TMPDIR") or "/tmp"
    return Path(parent).absolute() / f"scaletrain-swap-{run_id}" / f"attempt-{attempt:04d}-node-{node_rank:04d}"


def copies_folder(run: RunDir, memory: Path = MEMORY) -> Path:
    """Return the folder of a run's copies in the host memory of a node; runs of other roots may have the same name."""
    import hashlib  # loads OpenSSL, which most commands do not need

    root = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]
    return memory / f"scaletrain-{os.geteuid()}-{run.run_id}-{root}"


def list_runs(begin: str = "") -> list[RunDir]:
    """Return the runs under the runs root whose ids begin so, sorted by name."""
    root = runs_root()
    names = sorted(os.listdir(root)) if root.is_dir() else []
    named = (name for name in names if name.startswith(begin) and not name.startswith("."))  # hidden: being created
    # os.path, unlike Path, returns False for paths that this user may not read.
    return [RunDir(root / name) for name in named if os.path.isfile(f"{root}/{name}/run.json")]


@dataclass(frozen=True)
class SweepPlace:
    """Point ``number`` (from 1) of the ``points`` of a sweep; ``after`` is the run before it in its lane.

    ``array``: the first submission of the run was task ``number`` of one job array for the whole sweep.
    """

    sweep: str
    number: int
    points: int
    overrides: tuple[str, ...]
    after: str | None = None
    array: bool = False


@dataclass(frozen=True)
class Sweep:
    """The existing runs of a sweep in the order of submission; ``points`` is the planned number."""

    name: str
    points: int
    runs: tuple[RunDir, ...]


def write_sweep_place(run: RunDir, place: SweepPlace) -> None:
    """Write sweep.json. Call it before the run is submitted, because its scheduler reads it."""
    write_document(run.path / "sweep.json", {"schema": "scaletrain.sweep/v1", **dataclasses.asdict(place)})


def read_sweep_place(run: RunDir) -> SweepPlace | None:
    """Return the place of a run in its sweep; None if it has none or the file is invalid."""
    return undamaged_as(SweepPlace, run.path / "sweep.json")


def list_sweeps(begin: str = "") -> dict[str, Sweep]:
    """Return the sweeps with runs under the runs root whose ids begin so, by name: as that of their sweep does."""
    by_sweep: dict[str, list[tuple[SweepPlace, RunDir]]] = {}
    for run in list_runs(begin):
        place = read_sweep_place(run)
        if place is not None:
            by_sweep.setdefault(place.sweep, []).append((place, run))
    for members in by_sweep.values():
        members.sort(key=lambda member: member[0].number)
    return {
        name: Sweep(name, members[0][0].points, tuple(run for _, run in members)) for name, members in by_sweep.items()
    }


def find_sweep(name: str) -> Sweep:
    """Return the sweep with this name or unique prefix. Raises UsageError."""
    sweeps = list_sweeps(name) or list_sweeps()
    begun = [sweep for sweep in sweeps if name and sweep.startswith(name)]
    if name in sweeps or len(begun) == 1:
        return sweeps.get(name) or sweeps[begun[0]]
    if begun:
        raise UsageError(f"{name} matches {len(begun)} sweeps: {', '.join(begun)}. Use a longer prefix.")
    known = f"Available sweeps: {', '.join(sweeps)}." if sweeps else "There are no sweeps."
    raise UsageError(f"no sweep {name[:200]!r} under {runs_root()}. {known}")


def find_runs(names: Iterable[str]) -> list[RunDir]:
    """Return the runs that are named, alone or by their sweep, in this order, each once. Raises UsageError."""
    chosen: dict[str, RunDir] = {}
    for name in names:
        named = find_run_or_sweep(name)
        for run in named.runs if isinstance(named, Sweep) else (named,):
            chosen.setdefault(str(run.path), run)
    return list(chosen.values())


def find_run_or_sweep(name: str) -> RunDir | Sweep:
    """Return a sweep for its full name, or for a prefix of its runs only; otherwise a run, as find_run() does."""
    if sent_run_folder() is not None or not name or exact_run(name) is not None:
        return find_run(name)
    begun = {run.run_id for run in list_runs(name)}
    if len(begun) < 2 and not any(run.startswith(f"{name}-") for run in begun):
        return find_run(name)
    sweeps = list_sweeps(name)
    if name in sweeps:
        return sweeps[name]
    of = [sweep for key, sweep in sweeps.items() if key.startswith(name)]
    if len(of) == 1 and begun <= {run.run_id for run in of[0].runs}:
        return of[0]
    return find_run(name)
