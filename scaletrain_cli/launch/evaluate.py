"""Submit the jobs that run ``evaluation.tasks``: for each checkpoint a run of its own, beside the training job.

An evaluation is a run whose program is ``scaletrain_cli.engine.evaluation``: it is submitted, listed, cancelled and
explained like any other. Its id is derived from the checkpoint, so that a second submission creates no second job.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scaletrain_cli.errors import InfeasibleError, ScaletrainError, UsageError, sentences
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.launch.submit import LONGEST_RUN_ID, create_run, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.evaluations import Evaluation, read_evaluation, write_evaluation
from scaletrain_cli.rundir.journal import read_rollbacks, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder, read_record
from scaletrain_cli.safe_files import locked
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import evaluation_cluster
from scaletrain_cli.spec.hub_files import WHOLE_CHECKPOINT, may_be_frozen

ENGINE = "scaletrain_cli.engine.evaluation"
RUN_VARIABLE, STEP_VARIABLE = "SCALETRAIN_EVALUATED_RUN", "SCALETRAIN_EVALUATED_STEP"
_POLL_SECONDS, _RETRY_SECONDS = 5.0, 60.0
_HASH_CHARACTERS = 12
_ONE = (
    *("data_parallel", "tensor_parallel", "pipeline_parallel", "sequence_parallel", "context_parallel"),
    "expert_parallel",
)


@dataclass(frozen=True)
class SubmittedEvaluation:
    """The job of one evaluation, which is the run ``run_id``."""

    step: int
    run_id: str
    job_id: str


def due_steps(run: RunDir, record: RunRecord) -> list[int]:
    """Return the steps of committed checkpoints that ``evaluation.job.every`` selects and no job evaluates yet."""
    every = record.spec.evaluation.job.every
    committed = (checkpoint.step for checkpoint in list_checkpoints(checkpoint_folder(run, record.spec)))
    return [step for step in committed if step % every == 0 and _is_due(run, step)]


def _is_due(run: RunDir, step: int) -> bool:
    """Return True if the checkpoint has no evaluation, or one whose job was never confirmed by the scheduler."""
    if (evaluation := read_evaluation(run, step)) is None:
        return True
    return evaluation.state == "requested" and read_submission(RunDir(run.path.parent / evaluation.run_id)) is None


def evaluation_run_id(run: RunDir, step: int) -> str:
    """Return the id of the run that evaluates the checkpoint of ``step``.

    A step that is trained again after a rollback has another checkpoint, and so another evaluation. In the place of the
    end of a long run id is a hash of the whole id.
    """
    again = sum(rollback.to_step < step for rollback in read_rollbacks(run))
    end = f"-evaluation-{step:08d}" + (f"-{again}" if again else "")
    if len(run.run_id) + len(end) <= LONGEST_RUN_ID:
        return run.run_id + end
    unique = f"-{hashlib.sha256(run.run_id.encode()).hexdigest()[:_HASH_CHARACTERS]}"
    return run.run_id[: LONGEST_RUN_ID - len(unique) - len(end)] + unique + end


def submit_evaluation(run: RunDir, step: int) -> SubmittedEvaluation:
    """Submit the job that evaluates the checkpoint of ``step``; a second call returns the same job.

    Raises UsageError without tasks, InfeasibleError if the weights do not fit on the device, and the errors of a
    submission.
    """
    record = read_record(run)
    require_tasks(run, record)
    if record.spec.cluster.traits.shared_run_directory:
        known = [checkpoint.step for checkpoint in list_checkpoints(checkpoint_folder(run, record.spec))]
        if step not in known:
            params = {"run": run.run_id, "step": step, "steps": known}
            raise UsageError(Reason("runs.evaluation-without-checkpoint", params))
    spec = evaluation_spec(run, record, step)
    with locked(run.path / "evaluation.lock"):
        made = create_run(
            spec,
            inference_plan(spec),
            evaluation_run_id(run, step),
            root=run.path.parent,
            stored_secrets=read_document(run.secrets),
            hub=record.hub,
        )
        if read_evaluation(run, step) is None:  # from now on retention keeps the checkpoint
            write_evaluation(run, Evaluation(step, made.run.run_id, "requested", 0.0))
        before = read_submission(made.run)
        submission = submit_run(made.run, made.record, backend_for(spec.cluster.scheduler))
    if before is None:
        record_event(run, "evaluation-submitted", step=step, evaluation=made.run.run_id, job_id=submission.job_id)
    return SubmittedEvaluation(step, made.run.run_id, submission.job_id)


def submit_due_evaluations(run: RunDir) -> list[SubmittedEvaluation]:
    """Submit a job for each checkpoint that has none. Raises as submit_evaluation()."""
    return [submit_evaluation(run, step) for step in due_steps(run, read_record(run))]


def require_tasks(run: RunDir, record: RunRecord) -> None:
    """Raise UsageError if the run has no ``evaluation.tasks``."""
    if not record.spec.evaluation.tasks:
        raise UsageError(Reason("runs.evaluation-without-tasks", {"run": run.run_id}))


def evaluation_spec(run: RunDir, record: RunRecord, step: int) -> RunSpec:
    """Return the spec of the run that evaluates a checkpoint: the run's model and data, on one device."""
    spec, variables = record.spec, {RUN_VARIABLE: run.run_id, STEP_VARIABLE: str(step)}
    if not may_be_frozen(spec) and is_reference(getattr(spec.model, "weights", None)):
        variables[WHOLE_CHECKPOINT] = "1"
    raw = spec.model_dump(mode="json", by_alias=True, include={"schema_version", "model", "data", "env", "secret_env"})
    raw |= {
        "name": f"{spec.name[:180]} evaluation",
        "training": {"global_batch_size": 1, "micro_batch_size": 1, "steps": 1, "precision": spec.training.precision},
        "evaluation": {"every": 0},
        "layout": dict.fromkeys(_ONE, 1) | {"zero_stage": "auto"},
        "cluster": evaluation_cluster(spec.cluster, spec.evaluation.job).model_dump(mode="json", by_alias=True),
        "restarts": {"crash": 1},
        "code": {"engine": ENGINE},
        "env": {**spec.env, **variables},
    }
    return RunSpec.model_validate(raw)


def inference_plan(spec: RunSpec) -> RunPlan:
    """Return a plan for one device. Its memory and time are those of a training step, which an evaluation does not run.

    Raises InfeasibleError if the weights alone do not fit on the device.
    """
    from scaletrain_cli.plan import PlanInfeasibleError
    from scaletrain_cli.plan.planning import plan_or_raise

    try:
        plan: RunPlan = plan_or_raise(spec, compared=False)
    except PlanInfeasibleError as error:
        if error.plan is None:
            raise
        plan = error.plan
    weight_bytes = plan.model.parameters * (4 if spec.training.precision in ("fp32", "tf32") else 2)
    if weight_bytes > plan.memory.capacity:
        params = {"weight_bytes": weight_bytes, "capacity_bytes": plan.memory.capacity, "gpu": spec.cluster.gpu_name}
        raise InfeasibleError(Reason("runs.evaluation-does-not-fit", params))
    return plan


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def follow_evaluations(run: RunDir, asked_for_last: Callable[[float], bool] = _pause) -> Iterator[SubmittedEvaluation]:
    """Submit and yield an evaluation of each checkpoint until the run is over and all have one.

    ``asked_for_last(seconds)`` waits up to that time and returns True if this process is asked to end; it then looks
    for checkpoints a last time. A failure is recorded once as the event ``evaluation-not-submitted``, and tried again.
    """
    problem, record = None, read_record(run)
    require_tasks(run, record)
    last = False
    while True:
        # Before the checkpoints are listed: the last one must not be missed.
        last = last or asked_for_last(0.0)
        over = last or is_over(run, run_status(run))
        try:
            yield from submit_due_evaluations(run)
            problem = None
        except (ScaletrainError, OSError) as error:
            failure = Reason("runs.evaluation-not-submitted", {"run": run.run_id, "error": str(error)})
            if failure != problem:
                record_event(run, "evaluation-not-submitted", message=sentences(failure), **failure.to_document())
            problem = failure
        if over:
            return
        last = asked_for_last(_POLL_SECONDS if problem is None else _RETRY_SECONDS)


def record_left_evaluations(run: RunDir, record: RunRecord) -> None:
    """Record an event that names the checkpoints without an evaluation, if there are any."""
    if steps := due_steps(run, record):
        left = Reason("runs.evaluations-left", {"run": run.run_id, "steps": steps})
        record_event(run, "evaluation-not-submitted", message=sentences(left), **left.to_document())
