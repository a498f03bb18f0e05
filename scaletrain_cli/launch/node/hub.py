"""The node agent's part in fetching files of the Hugging Face Hub: once per node, before any rank is started.

Each agent writes its progress to attempts/NNNN/hub/<node rank>.json. Ranks start only when all nodes have their files:
otherwise those of a fast node would wait in the rendezvous of the ranks until it times out. Either all nodes start
their ranks or none does: the first one that finds all nodes ready, or that is stopped, decides for all in the folder
decision/.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import DoNotRequeueError, PreemptedError, ScaletrainError, WrongNodesError
from scaletrain_cli.hub.cache import CACHE_VARIABLES, HubSettings
from scaletrain_cli.hub.reference import HubError
from scaletrain_cli.launch.exit_classification import OF_THE_CACHE
from scaletrain_cli.launch.hub_fetch import MEASURES_ONLY, ONLY, FetchProgress, FetchStopped, environment_here, fetch
from scaletrain_cli.launch.node.options import AGENT_SIGNALS, AgentOptions
from scaletrain_cli.launch.node.processes import next_signal
from scaletrain_cli.launch.node.record import is_announced
from scaletrain_cli.launch.shared_folder import is_of_one_machine
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.journal import has_committed, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import create_file, make_folder
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.hub_files import HubUse, hub_uses, may_be_frozen, with_local_files
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.text import bytes_text

_NOTE_SECONDS = 10.0
_POLL_SECONDS = 0.5
_SEEN_SECONDS = 60.0  # until a shared file system shows every node what another one has renamed
_LOOK_SECONDS = 1.0  # between two looks for other nodes on the shared file system
# Until a node whose progress no longer changes counts as lost; a fetching agent writes every _NOTE_SECONDS.
LOST_SECONDS = 600.0
_NOT_WRITABLE = "hub.not-writable"
_READY, _STOPPED, _START = "ready", "stopped", "start"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalFiles:
    """The spec with local paths, and the variables with which the ranks find the same paths without a request."""

    spec: RunSpec
    variables: Mapping[str, str] = field(default_factory=dict)


class CacheFullError(DoNotRequeueError):
    """The cache that all nodes share, or that of this machine, has too little space (exit 93)."""

    failure_reason = "disk-full"


def fetch_hub_files(run: RunDir, record: RunRecord, options: AgentOptions, secrets: Mapping[str, str]) -> LocalFiles:
    """Fetch what this node lacks, wait until all nodes are ready, and return the local files.

    Raises HubError for what a retry cannot cure, FetchError for what one may, WrongNodesError for a cache of this node
    that is full, or read-only and not named by ``env``, CacheFullError for another cache that is full, and
    PreemptedError after a signal.
    """
    spec = record.spec
    if not record.hub or spec.env.get(ONLY) == MEASURES_ONLY:  # a run that only measures its nodes reads no files
        return LocalFiles(spec)
    own = environment_here(spec, os.environ) if spec.cluster.traits.runs_here else {**os.environ, **spec.env}
    environment = {**own, **secrets}
    settings = HubSettings.from_environment(environment)
    notes, stop = _Notes(run, options), _Stop(run, options.attempt)
    try:
        uses = _uses_of_node(run, spec, options.node_rank)
        with _cache_errors(spec, settings.cache):
            fetched = fetch(uses, record.hub, environment, on_progress=notes.progress, is_stopped=stop)
        notes.end(_READY, fetched)
        _wait_for_nodes(run, spec.cluster.nodes, options, stop)
    except FetchStopped:
        notes.end(_STOPPED)
        raise PreemptedError(Reason("node.stopped-in-fetch")) from None
    variables = {"HF_HUB_CACHE": str(settings.cache)}
    if not spec.code.own_program:  # lm-evaluation-harness fetches the data of its tasks itself
        variables["HF_HUB_OFFLINE"] = "1"
    return LocalFiles(with_local_files(spec, record.hub, settings), variables)


@contextlib.contextmanager
def _cache_errors(spec: RunSpec, cache: Path) -> Iterator[None]:
    """Turn the error of a cache that cannot take the files into one by which the launcher decides on a retry."""
    try:
        yield
    except HubError as error:
        if error.why.code not in OF_THE_CACHE:
            raise
        may_be_written = error.why.code != _NOT_WRITABLE
        # A folder that the spec names is the same on every node.
        if _is_of_this_node(spec, cache) and (may_be_written or not CACHE_VARIABLES & spec.env.keys()):
            raise WrongNodesError(error.why) from error
        if may_be_written:
            raise CacheFullError(error.why) from error
        raise


def _is_of_this_node(spec: RunSpec, cache: Path) -> bool:
    """Return True if another node may take the place of this one and has a cache of its own."""
    traits = spec.cluster.traits
    if traits.runs_here:
        return False
    if not traits.shared_run_directory:  # pods: a volume that env names is the same for all
        return not CACHE_VARIABLES & spec.env.keys()
    return is_of_one_machine(cache.resolve())


def _uses_of_node(run: RunDir, spec: RunSpec, node_rank: int) -> list[HubUse]:
    """Return the references whose files this node reads: text and rows are read once, by rank 0, images by each rank.

    Initial weights are read until the first checkpoint; those of a frozen base at each start, because checkpoints
    without it are smaller.
    """
    without_weights = has_committed(run) and not may_be_frozen(spec)
    skipped = {"source"} if node_rank and spec.training.objective not in LOSSES_OF else set()
    skipped |= {"weights"} if without_weights else set()
    skipped |= {"adapter"} if has_committed(run) else set()
    return [use for use in hub_uses(spec) if use.purpose not in skipped]


class _Stop:
    """Returns, when called, whether the attempt ends before its ranks have started.

    Reasons are a signal, a cancellation, and another node that was stopped or has failed. Not if the ranks of another
    node may have started already: the signal is then left to the watch over the ranks.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt, self._looked = run, attempt, 0.0
        self._folder = _folder(run, attempt)

    def __call__(self) -> bool:
        signum = next_signal(AGENT_SIGNALS, 0.0)
        if signum is not None and signum not in (signal.SIGCHLD, signal.SIGHUP):
            if self._decide_to_stop():
                return True
            os.kill(os.getpid(), signum)  # blocked, and so pending until the ranks are watched
            return False
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        if self._run.is_cancelled or is_announced(self._run, self._attempt, "failed"):
            return self._decide_to_stop()
        return decision(self._folder) == _STOPPED

    def _decide_to_stop(self) -> bool:
        try:
            return decide(self._folder, _STOPPED) == _STOPPED
        except OSError:  # a full disk must not keep a node from stopping
            return True


class _Notes:
    """Writes the node's progress to the run directory, to the log and to the journal."""

    def __init__(self, run: RunDir, options: AgentOptions) -> None:
        self._run, self._options = run, options
        self._folder = _folder(run, options.attempt)
        make_folder(self._folder)
        self._noted, self._count, self._started, self._begun = 0.0, 0, time.monotonic(), False
        self._write({"state": "checking"})

    def progress(self, progress: FetchProgress) -> None:
        """Note the progress every _NOTE_SECONDS, and as an event when a download begins."""
        if progress.state == "fetching" and not self._begun:
            self._begun = True
            self._record("hub-fetching", files=progress.files, bytes=progress.total_bytes, cache=progress.cache)
        if time.monotonic() - self._noted < _NOTE_SECONDS:
            return
        self._write(dataclasses.asdict(progress))
        done, total = bytes_text(progress.done_bytes), bytes_text(progress.total_bytes)
        logger.info("files of the hub: %s%s", progress.state, f", {done} of {total}" if progress.total_bytes else "")

    def end(self, state: str, progress: FetchProgress | None = None) -> None:
        """Note how the fetch ended."""
        self._write({"state": state})
        if progress is not None and progress.files:
            seconds = round(time.monotonic() - self._started, 1)
            self._record("hub-fetched", files=progress.files, bytes=progress.received_bytes, seconds=seconds)

    def _record(self, event: str, **values: Any) -> None:
        record_event(self._run, event, attempt=self._options.attempt, node=self._options.node_name, **values)

    def _write(self, values: Mapping[str, Any]) -> None:
        self._noted, self._count = time.monotonic(), self._count + 1
        # The count changes with every note, whatever the clocks of the nodes say.
        write_document(_note(self._folder, self._options.node_rank), {**values, "count": self._count})


def _folder(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "hub"


def _note(folder: Path, node_rank: int) -> Path:
    return folder / f"{node_rank:04d}.json"


def decision(folder: Path) -> str | None:
    """Return what was decided for all nodes, ``start`` or ``stopped``; None before that."""
    with contextlib.suppress(OSError):
        return next(iter(os.listdir(folder / "decision")), None)
    return None


def decide(folder: Path, wanted: str) -> str:
    """Decide for all nodes of the attempt unless another node has; return the decision.

    One rename makes the decision visible: it fails if the target is a folder that is not empty. Raises OSError.
    """
    if (known := decision(folder)) is not None:
        return known
    draft = folder / f".decision-{os.urandom(8).hex()}"
    make_folder(draft)
    create_file(draft / wanted, b"")
    try:
        draft.rename(folder / "decision")
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        deadline = time.monotonic() + _SEEN_SECONDS
        while (known := decision(folder)) is None:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        return known
    return wanted


def _wait_for_nodes(run: RunDir, nodes: int, options: AgentOptions, is_stopped: _Stop) -> None:
    """Wait until every node has its files, or another node has found that.

    Raises FetchStopped, and ScaletrainError for a lost node.
    """
    folder = _folder(run, options.attempt)
    seen: dict[int, object] = {}
    changed = dict.fromkeys(range(nodes), time.monotonic())
    while decision(folder) != _START:
        waiting = []
        for rank in range(nodes):
            note = read_document(_note(folder, rank)) or {}
            if note.get("state") == _READY:
                continue
            if note.get("state") == _STOPPED:  # in pods without a shared volume, which do not see its decision
                decide(folder, _STOPPED)
                raise FetchStopped
            waiting.append(rank)
            if note.get("count") != seen.get(rank):
                seen[rank], changed[rank] = note.get("count"), time.monotonic()
            if time.monotonic() - changed[rank] > LOST_SECONDS:
                params = {"node_rank": rank, "seconds": LOST_SECONDS}
                raise ScaletrainError(Reason("node.lost-in-fetch", params))
        if not waiting:
            if decide(folder, _START) == _START:
                return
            raise FetchStopped
        if is_stopped():
            raise FetchStopped
        time.sleep(_POLL_SECONDS)
