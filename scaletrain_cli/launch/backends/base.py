"""The back-end interface between the launcher and a scheduler, and the data types that it uses."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from scaletrain_cli.errors import MissingPackageError, Problem, SchedulerError, UsageError, sentences
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.job import Job
from scaletrain_cli.own_processes import python_words
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, as_reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import CodeRecord, RunRecord
from scaletrain_cli.spec import ClusterSpec, RunSpec
from scaletrain_cli.spec.backend_traits import BackendTraits, backend_traits

if TYPE_CHECKING:
    from scaletrain_cli.launch.attempts import AttemptRecord
    from scaletrain_cli.launch.backends.cluster_view import ClusterView
    from scaletrain_cli.launch.resource_checks.view import View
    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.plan.data_size import DataSize
    from scaletrain_cli.plan.reliability.node_sizes import NodeSize
    from scaletrain_cli.rundir.preparation import PreparationJob


SESSION_MODULE = "scaletrain_cli.launch.node.command"
VIEW_MODULE = "scaletrain_cli.launch.node.view"
_ENGINE_NEEDS = ("torch", "deepspeed", "tokenizers")  # found by find_spec, not imported


@dataclass(frozen=True)
class Start:
    """The estimated start of a job: ``at`` in seconds since the epoch, None if unknown.

    ``reason`` names the source of the estimate, or why there is none. A text becomes a Reason without a code.
    """

    at: float | None
    reason: Reason

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", as_reason(self.reason))

    @property
    def why(self) -> str:
        """The text of ``reason``."""
        return str(self.reason)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object."""
        return {"at": self.at, "why": self.why, "reason": self.reason.to_document()}


@dataclass(frozen=True)
class PreflightResult:
    """The result for a job that can run: its start, and warnings, each as a Reason or a text."""

    start: Start
    warnings: tuple[Reason, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "warnings", tuple(map(as_reason, self.warnings)))

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts of ``warnings``, with their remedies."""
        return tuple(map(sentences, self.warnings))


@dataclass(frozen=True)
class SubmissionSummary:
    """A job that is about to be submitted. ``step``: the last step done, 0 for a new run; ``warnings``: as Reasons."""

    spec: RunSpec
    plan: RunPlan
    start: Start
    step: int = 0
    warnings: tuple[Reason, ...] = ()
    code: CodeRecord | None = None  # the user's code, if the spec names any
    sizes: tuple[NodeSize, ...] = ()  # every number of nodes of the range, if the spec has one

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts of ``warnings``, with their remedies."""
        return tuple(map(sentences, self.warnings))

    @property
    def steps_left(self) -> int:
        return max(0, self.spec.total_steps - self.step)

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of all devices; None where no price is known."""
        price = self.plan.cost.price_per_gpu_hour
        return None if price is None else price * self.spec.allocated_devices

    @property
    def expected_usd(self) -> float | None:
        """Return the cost of the remaining steps, including interruptions; None where it is not known."""
        whole = self.plan.cost.expected_usd
        return None if whole is None else whole * self.steps_left / max(1, self.spec.total_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the part of the JSON object that submit and resume share."""
        cost = {"expected_usd": self.expected_usd, "usd_per_hour": self.usd_per_hour, "steps": self.steps_left}
        sizes = {"sizes": [size.to_json() for size in self.sizes]} if self.sizes else {}
        return {"start": self.start.to_json(), "cost": cost} | sizes | notes_json(self.warnings)


def notes_json(warnings: Sequence[Reason]) -> dict[str, Any]:
    """Return the keys ``notes``, the texts of warnings, and ``note_reasons``, the code and parameters of each."""
    return {
        "notes": [sentences(warning) for warning in warnings],
        "note_reasons": [warning.to_document() for warning in warnings],
    }


@dataclass(frozen=True)
class Check:
    """One line of `scaletrain doctor`; ``advice`` is the remedy if ``state`` is not ``ok``."""

    name: str
    state: Literal["ok", "warn", "none"]
    found: str
    advice: str = ""


def require_engine_packages(spec: RunSpec) -> None:
    """Raise MissingPackageError if the run uses the built-in engine and this Python lacks one of its packages.

    For the preflight of a back end whose ranks run in it.
    """
    missing = [name for name in _ENGINE_NEEDS if not spec.code.own_program and find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{', '.join(missing)} not installed here: a run on this machine needs the extra train.",
            install_command("train"),
        )


@dataclass(frozen=True)
class JobNode:
    """One node of a running job: ``number`` counts from 0 in the order of the ranks; ``name``: as in Job.nodes.

    ``named`` is False if the scheduler's name is not known; ``name`` is then only for messages.
    """

    job_id: str
    number: int
    name: str
    named: bool = True


class ViewWaitsError(SchedulerError):
    """No process can reach the files of a run until its next pods run, or there are none yet (Backend.view_command)."""


@dataclass(frozen=True)
class NodeCommand:
    """A command line, and its environment; None: that of this process. ``asks``: it may ask for a password."""

    words: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    asks: bool = False


def session_words(run_folder: Path | str, node: JobNode) -> tuple[str, ...]:
    """Return the words after the interpreter of the run that start a session on its node, see Backend.node_command."""
    return (*python_words(SESSION_MODULE), *session_arguments(run_folder, node))


def session_arguments(run_folder: Path | str, node: JobNode) -> tuple[str, ...]:
    """Return the arguments of SESSION_MODULE."""
    return (str(run_folder), "--node-rank", str(node.number))


def view_words(runs_root: Path | str, run_id: str) -> tuple[str, ...]:
    """Return the words after the interpreter that start the far end of a view, see Backend.view_command."""
    return (*python_words(VIEW_MODULE), str(runs_root), run_id)


class LogFetcher(Protocol):
    """Copies the output of ranks that do not write to the run directory into it, each line once."""

    def fetch(self) -> None:
        """Copy new lines. Raises SchedulerError after everything that could be copied."""

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which lines are copied as the ranks print them."""


class Backend(ABC):
    """One way to run jobs. A back end has no state of its own: everything is in the run directory and the scheduler.

    A back end must implement render, submit, job and cancel; every other method has a default. The contract:

    - **Errors.** SchedulerError where the scheduler refuses or cannot be reached, with nothing changed;
      SchedulerSilentError where it did not answer, so that the request may or may not have been applied.
    - **Idempotent submit.** A submitter may die after the scheduler took the job. ``submit`` of a run whose latest
      revision the scheduler already has returns the id of that job and creates no second one.
    - **Lost answers.** The job of a submission that was not answered is found without its id: by its name, if that is
      unique for the run and the submission, or by a mark in the job. While the scheduler may still accept the
      request, ``job`` returns the state ``unknown`` with ``unsettled``, and ``submit`` repeats it only if that cannot
      create a second job.
    - **Gang.** All nodes of an attempt start together or not at all, and end together.
    - **Grace period.** Before a job ends for any reason but its own, each node agent gets SIGTERM, and
      ``cluster.grace_seconds`` before it is killed. Ranks save a checkpoint in that time.
    - **Restarts.** Only the job or the scheduler starts the next attempt. An attempt begins with
      ``launch.attempts.begin_attempt`` and ends with ``launch.restart.conclude_attempt``, whose Decision says whether
      another one follows. A job of one node can run ``launch.node.job``, which does all of it.
    - **Exit codes.** The job ends with the exit code of the Decision (docs/exit-codes.md): 0 done, 75 preempted with
      its state saved, 93 no retry can help.
    - **Bad nodes.** ``render`` and ``submit`` exclude nodes of ``rundir.bad_nodes`` where the scheduler can do that.
    """

    name: ClassVar[str]  # as in BackendTraits.name
    output_format: ClassVar[Literal["script", "yaml"]] = "script"  # of render(); JSON is made from both
    can_force: ClassVar[bool] = False  # force() is implemented
    can_probe: ClassVar[bool] = False  # probe() is implemented
    replaces_nodes: ClassVar[bool] = False  # a restart of the same job may get other nodes
    prepares_in_jobs: ClassVar[bool] = False  # submit_preparation() is implemented

    @property
    def traits(self) -> BackendTraits:
        """The declaration of this back end."""
        return backend_traits(self.name)

    # ---- the core -----------------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, run: RunDir, record: RunRecord) -> str:
        """Return the exact text that submit() would submit. It contains no secret, and nothing is written."""

    def notes(self, spec: RunSpec) -> Iterable[Reason]:
        """Return the warnings about a job that no request is needed for; a dry run shows them, preflight() has them."""
        return ()

    @abstractmethod
    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Submit the job and return its id. Called through launch.submit, which holds the lock of the run.

        The run of a sweep whose SweepPlace names a run before it must not start before that one has ended, unless
        max_concurrent() returns the number of all points.
        """

    @abstractmethod
    def job(self, run: RunDir, record: RunRecord) -> Job:
        """Return the latest job of the run as the scheduler reports it now. Changes nothing."""

    @abstractmethod
    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """End the job, with its state saved; no further attempt starts.

        Sends SIGTERM to the node agents, or writes the stop file of the run; does not wait for the ranks to save.
        """

    # ---- the runs of a sweep as one job array -------------------------------------------------------------------

    def require_array(self, specs: Sequence[RunSpec]) -> None:
        """Raise UsageError unless runs with these specs can be the tasks of one job array."""
        raise UsageError(Reason("launch.no-arrays", {"scheduler": self.traits.display_name}))

    def render_array(self, sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], cap: int) -> str:
        """Return the text of the array that submit_array() would submit, without the jobs of its runs."""
        raise self._not_implemented("--array")

    def submit_array(
        self, sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], cap: int, *, again: bool
    ) -> Sequence[str]:
        """Submit one job array, of which ``cap`` tasks run at a time, and return the job id of each run.

        SweepPlace.array of each run is set. ``again``: an earlier request was not answered; if the scheduler has that
        array, no other one is submitted.
        """
        raise self._not_implemented("--array")

    # ---- before a job is submitted ------------------------------------------------------------------------------

    def with_local_defaults(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the settings that it leaves to this machine, which the record of the run then keeps.

        Sends no request. Called before a spec is checked, rendered or recorded; a second call changes nothing.
        """
        return spec

    def preparation_cores(self, cluster: ClusterSpec) -> int:
        """Return the worker processes of one task of a preparation job."""
        return 1

    def prepares_itself(self, cluster: ClusterSpec) -> bool:
        """Return whether the job of a run prepares its data itself, where no other job could do it."""
        return False

    def preparation_tasks(self, cluster: ClusterSpec) -> int | None:
        """Return the number of tasks of a preparation job; None: by the size of the data."""
        return None

    def submit_preparation(self, run: RunDir, record: RunRecord, tasks: int) -> None:
        """Queue a job that prepares the data of the run, on which submit() then makes the gang depend.

        Called before submit(), with the lock of the run. A second call for the same revision queues nothing if the job
        has not ended. Raises SchedulerError.
        """
        raise self._not_implemented("--prepare job")

    def queue_preparation(self, spec: RunSpec, name: str, folder: Path, tasks: int) -> PreparationJob:
        """Queue a job that prepares the data of a spec for later runs. ``folder``: of its files, below the datasets.

        Raises UsageError where prepares_in_jobs is False, and SchedulerError.
        """
        raise self._not_implemented("--submit")

    def sizes_of_preparation(self, job: PreparationJob, say: Callable[[str], None]) -> dict[str, DataSize]:
        """Wait for a job of queue_preparation() whose data this machine does not see; return the sizes of its sources.

        ``say`` gets lines of progress. Raises the error of the preparation, UsageError and SchedulerError.
        """
        raise self._not_implemented("training.epochs")

    def preparation_failure(self, run: RunDir, gang: Job) -> Reason | None:
        """Return that the preparation job of a run has failed, if the scheduler shows that this ended the gang.

        Called for a gang that has ended without an attempt, if the tasks of the job have recorded no reason.
        """
        return None

    def was_taken_away(self, run: RunDir, job: Job, last: AttemptRecord | None) -> bool:
        """Return whether a job that has ended was taken from its run, rather than ended by a person.

        Called for a run that is not over by itself: its last attempt ``last`` reported no end, or another one was to
        follow it, or none began. In doubt return False: a run that a person has ended must not start again.
        """
        return job.cause != "cancelled"

    def was_shut_down(self, run: RunDir, last: AttemptRecord) -> bool:
        """Return whether the last attempt was stopped because its machine was shut down."""
        return False

    def cancel_preparation(self, run: RunDir) -> None:
        """End the preparation job of a run whose gang could not be queued."""
        return None

    def await_preparation(self, run: RunDir, record: RunRecord, say: Callable[[str], None]) -> None:
        """Wait for the job of submit_preparation(), if submit() cannot make the gang depend on it.

        ``say`` gets lines of progress. Raises the error of the preparation, which is then recorded in the run.
        """
        return None

    def render_preparation(self, run: RunDir, record: RunRecord) -> str:
        """Return what submit_preparation() submits before the gang, if render() does not refer to it; else ''."""
        return ""

    def start_following_evaluations(self, run: RunDir) -> None:
        """Start a process that submits an evaluation of each checkpoint of the run, if it can live on this machine.

        Called after submit() for a run with ``evaluation.job.submit: auto``. Does nothing by default: the nodes do it
        (``BackendTraits.submits_from_nodes``), or the user (`scaletrain evaluation submit RUN --follow`).
        """
        return None

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Return when the job could start, with warnings. Raises SchedulerError where it could never run.

        ``run``: the run to resume, with the code kept of it; None for a new run. Leaves no job or file behind.
        """
        return PreflightResult(Start(None, Reason("launch.start-unknown", {"scheduler": self.traits.display_name})))

    def probe(self, spec: RunSpec, plan: RunPlan) -> Sequence[Any]:
        """Run a short job on the nodes and return the facts of each. Raises UsageError where can_probe is False."""
        raise self._not_implemented("--probe")

    def max_concurrent(self, cluster: ClusterSpec, requested: int | None, points: int) -> int:
        """Return the maximum number of concurrent runs of a sweep. Raises UsageError for an impossible ``requested``.

        By default any ``requested`` below ``points`` is refused: submit() has to start the runs in turn for it.
        """
        if requested is not None and requested < points:
            raise self._not_implemented(f"--max-concurrent {requested}")
        return points

    def has_own_python(self, spec: RunSpec) -> bool:
        """Return whether the ranks run another Python than this process, so that its packages are not visible here."""
        return False

    def resource_problems(self, view: View) -> Iterator[Problem]:
        """Yield a problem for each resource of the back end's section that is visibly missing on this machine."""
        yield from ()

    def passes_on(self, spec: RunSpec, name: str, environment: Mapping[str, str]) -> bool:
        """Return whether the ranks get the environment variable ``name`` of the submitting machine."""
        return bool(environment.get(name)) and (self.traits.runs_here or name in spec.secret_env)

    def secret_hint(self, name: str) -> str:
        """Return the hint on how the ranks get the secret ``name``."""
        return f"Export {name} and name it in secret_env"

    def run_directory_mode(self) -> int | None:
        """Return the permissions of new run directories; None for the default."""
        return None

    def preflight_settings(self) -> tuple[str, ...]:
        """Return overrides of the spec for the short run of `scaletrain preflight`."""
        return ()

    def run_in_foreground(self, run: RunDir, record: RunRecord, on_tick: Callable[[], None]) -> int:
        """Run the job as a child of this process and return the exit code of the run, for `scaletrain train`.

        ``on_tick`` is called several times a second. Raises UsageError where the ranks run on other machines.
        """
        raise UsageError(Reason("launch.no-foreground", {"scheduler": self.traits.display_name}))

    def _not_implemented(self, option: str) -> UsageError:
        return UsageError(Reason("launch.not-implemented", {"option": option, "scheduler": self.traits.display_name}))

    # ---- while it is queued or runs -----------------------------------------------------------------------------

    def prefetched(self, runs: Sequence[RunDir]) -> Backend:
        """Return a back end that answers job() for these runs from one request to the scheduler, if it can."""
        return self

    def latest_job_id(self, run: RunDir, record: RunRecord, submitted: str) -> str:
        """Return the id of the latest job, without a request; ``submitted`` is that of submission.json."""
        return submitted

    def logs(self, run: RunDir, record: RunRecord) -> LogFetcher | None:
        """Return the fetcher of the ranks' output; None if they write to the run directory."""
        return None

    def job_log(self, run: RunDir, job_id: str) -> Path | None:
        """Return the log that the job itself, not its ranks, writes to the run directory; None where there is none."""
        return None

    def force(self, run: RunDir, record: RunRecord) -> list[str]:
        """Remove the remains of a cancelled job on nodes that are known to be off; return their names.

        Raises UsageError where can_force is False.
        """
        raise UsageError(Reason("launch.no-force", {"run": run.run_id, "scheduler": self.traits.display_name}))

    def remove_ended(self, run: RunDir, record: RunRecord) -> list[str]:
        """Delete the objects that the scheduler keeps of a job that is over; return their names."""
        return []

    def node_command(self, run: RunDir, record: RunRecord, node: JobNode) -> NodeCommand:
        """Return a command that starts the interpreter of the run on one of its nodes, with ``session_words()``.

        For `scaletrain exec`, `shell` and `port-forward`. It passes standard input and output on as they are, without
        a terminal; it needs no device of its own and waits for none, and its process on the node sees the devices and
        the processes of the ranks. It is called for a job that runs. Raises UsageError where it is not implemented.
        """
        raise UsageError(Reason("launch.no-session", {"scheduler": self.traits.display_name}))

    @contextlib.contextmanager
    def view_command(self, run: RunDir, record: RunRecord, say: Callable[[str], None]) -> Iterator[NodeCommand]:
        """Yield a command that starts the interpreter of the run, with ``view_words()``, where its files are.

        For views of a run whose files this machine does not see; it passes standard input and output on as they are.
        What was made for it is removed at the end of the block. ``say`` gets lines of progress. Raises UsageError where
        that cannot be had, ViewWaitsError and other SchedulerErrors.
        """
        yield self._no_view()

    def _no_view(self) -> NodeCommand:
        raise UsageError(Reason("launch.no-view", {"scheduler": self.traits.display_name}))

    # ---- explanations -------------------------------------------------------------------------------------------

    def explain_stuck(self, run: RunDir, record: RunRecord, status: RunStatus) -> Iterator[Finding]:
        """Yield the conditions that keep an active job from starting or ending and do not resolve by themselves."""
        yield from ()

    def explain_waiting(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return why a queued job waits."""
        return Finding.because("queued", Reason("launch.queued"), (Evidence.because("the scheduler", status.job.why),))

    def explain_never_began(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return why a job ended before its first attempt."""
        evidence = (Evidence.because("the scheduler", status.reason),) if status.why else ()
        return Finding.because("never-began", Reason("launch.never-began", {"run": run.run_id}), evidence)

    def actions_if_suspended(self, job_id: str) -> tuple[str, ...]:
        """Return how to end the suspension of a job: commands or sentences."""
        return ()

    # ---- the cluster and this machine ---------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Return whether this machine can submit: the command or configuration exists. Contacts no server."""
        return False

    def has_this_machine(self) -> bool:
        """Return whether this machine belongs to the cluster, as a login node does: `status --cluster` shows it."""
        return False

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        """Return the nodes, quotas and queue. Raises SchedulerError if the scheduler does not answer."""
        from scaletrain_cli.launch.backends.cluster_view import ClusterView

        name = self.traits.display_name
        note = Reason("launch.cluster-not-reported", {"scheduler": name})
        return ClusterView(scheduler=self.name, cluster=name, has_other_users=False, warnings=(note,))

    def checks(self) -> Iterator[Check]:
        """Yield the lines of `scaletrain doctor` about this back end. Takes a few seconds at most."""
        if self.is_available():
            yield Check(self.name, "ok", self.traits.display_name)
        else:
            yield Check(self.name, "none", f"{self.traits.display_name} is not available here")
