"""The section ``evaluation``: validation loss during training, and tasks that separate jobs run on checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, WithJsonSchema

from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.quantities import Matching, NonNegative, Text, Whole, WholeOrZero
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where_not

TaskName = Annotated[str, Matching(r"[A-Za-z0-9_.-]+", 64, "must consist of letters, digits, '_', '-' and '.'")]
Words = Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]


class LossTask(Section):
    """Mean loss per token over other documents, as ``NAME/loss`` (nats) and ``NAME/perplexity``."""

    kind: Literal["loss"]
    name: TaskName
    source: Text = Field(description="as data.source: files with text")
    documents: Whole = Field(default=200, description="number of documents, from the beginning of the source")


class GenerationTask(Section):
    """Continuations of fixed prompts, kept with the results. ``temperature: 0`` always takes the likeliest token."""

    kind: Literal["generation"]
    name: TaskName
    prompts: Words
    max_new_tokens: Whole = 64
    temperature: NonNegative = 0.0


class LmEvalTask(Section):
    """Tasks of lm-evaluation-harness, started as a command; metrics are ``NAME/TASK/METRIC``."""

    kind: Literal["lm_eval"]
    name: TaskName
    tasks: Words
    num_fewshot: WholeOrZero | None = Field(default=None, description="null: the default of each task")
    limit: Whole | None = Field(default=None, description="number of examples per task; null: all")
    batch_size: Text = "auto"
    apply_chat_template: bool = False
    include_path: Text | None = Field(default=None, description="folder with task files (YAML) of your own")
    command: Words = Field(default=("lm-eval",), description="program of lm-evaluation-harness, with its arguments")


TASKS: dict[str, type[Section]] = {"loss": LossTask, "generation": GenerationTask, "lm_eval": LmEvalTask}


def _kind(task: Any) -> str | None:
    kind = task.get("kind") if isinstance(task, dict) else getattr(task, "kind", None)
    return kind if kind in TASKS else None


Task = Annotated[
    Annotated[LossTask, Tag("loss")]
    | Annotated[GenerationTask, Tag("generation")]
    | Annotated[LmEvalTask, Tag("lm_eval")],
    Discriminator(
        _kind, custom_error_type="task_kind", custom_error_message="must have `kind`: loss, generation or lm_eval"
    ),
]

_WITH_TASKS = used_when(where_not("evaluation.tasks", ()))


class EvaluationJobSpec(Section):
    """The jobs that run ``evaluation.tasks``: one per checkpoint, on one node, apart from the training job."""

    submit: Literal["auto", "manual"] = Field(
        default="auto",
        description="auto: submitted when a checkpoint is committed, where the back end can; "
        "manual: by `scaletrain evaluation submit`",
    )
    every: Whole = Field(default=1, description="only checkpoints whose step is a multiple of this")
    cluster: Annotated[dict[str, Any], WithJsonSchema({"type": "object"})] = Field(
        default={}, description="keys of the section cluster that differ: by default one node with one GPU"
    )


class EvaluationSpec(Section):
    """Validation loss every ``every`` steps over ``batches`` global batches; ``every: 0`` turns it off.

    ``tasks`` are run on each checkpoint by a job of its own, which never holds the nodes of the training job.
    """

    every: WholeOrZero = 500
    batches: Annotated[Whole, used_when(where_not("evaluation.every", 0))] = 20
    tasks: tuple[Task, ...] = ()
    job: Annotated[EvaluationJobSpec, _WITH_TASKS] = LEFT_OUT

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each setting that contradicts another one."""
        names = [task.name for task in self.tasks]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "tasks", f"has several tasks with the name {name}. Give each another name."

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of metrics that can be known before the first evaluation; of lm_eval the prefixes."""
        ends = {"loss": ("/loss", "/perplexity"), "generation": (), "lm_eval": ("/",)}
        of_tasks = tuple(f"{task.name}{end}" for task in self.tasks for end in ends[task.kind])
        return (*(("validation_loss",) if self.every else ()), *of_tasks)


def evaluation_cluster(cluster: ClusterSpec, job: EvaluationJobSpec) -> ClusterSpec:
    """Return the cluster section of an evaluation job: the run's, on one node with one GPU, with the job's keys.

    Raises pydantic's ValidationError.
    """
    raw = cluster.model_dump(mode="json", by_alias=True) | {"nodes": 1, "gpus_per_node": 1, "spot": False}
    return ClusterSpec.model_validate(_merged(raw, job.cluster))


def cluster_problems(cluster: ClusterSpec, job: EvaluationJobSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted key of the spec, message) for each problem of ``evaluation.job.cluster``."""
    key = "evaluation.job.cluster"
    try:
        found = evaluation_cluster(cluster, job)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            unknown = detail["type"] == "extra_forbidden"
            message = "is not a key of the section cluster. Remove it" if unknown else detail["msg"].rstrip(".").lower()
            yield ".".join((key, *map(str, detail["loc"]))), f"{message}."
        return
    if found.nodes != 1 or found.gpus_per_node != 1:
        yield key, "must keep nodes: 1 and gpus_per_node: 1, because an evaluation is one process on one device."
    yield from ((f"{key}.{name}", message) for name, message in found.inconsistencies())


def _merged(raw: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = {name: (raw.get(name), value) for name, value in given.items()}
    changed = {
        name: _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for name, (old, new) in both.items()
    }
    return raw | changed
