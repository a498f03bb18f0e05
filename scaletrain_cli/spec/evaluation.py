"""The section ``evaluation``: validation loss during training, and tasks that separate jobs run on checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, WithJsonSchema

from scaletrain_cli.spec.cluster import ClusterSpec
from scaletrain_cli.spec.quantities import Matching, NonNegative, Text, Whole, WholeOrZero, valid_if
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not
from scaletrain_cli.spec.shared_paths import DataPath

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

# "a photo of a {}." (arXiv:2103.00020, section 3.1.4), and the seven templates whose mean OpenAI found to be the best
# subset of its 80 for ImageNet (github.com/openai/CLIP, notebooks/Prompt_Engineering_for_ImageNet.ipynb).
TEMPLATES = (
    "a photo of a {}.",
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)


Template = Annotated[
    Text, AfterValidator(valid_if(lambda value: "{}" in value, "must contain {}, the place of the name of the class"))
]


# The name of the images of evaluation.zero_shot among the datasets of a run; no source of data can have it.
ZERO_SHOT = "evaluation.zero_shot"


class ZeroShotSpec(Section):
    """Classification of other images by the texts of their classes, in which nothing is trained (arXiv:2103.00020).

    The feature of a class is the mean of those of its prompts. Metrics: ``validation_zero_shot_top1`` and ``_top5``.
    """

    source: DataPath = Field(
        description="as data.source: images with labels; of several splits that for validation, else that for testing"
    )
    classes: Text | None = Field(
        default=None,
        description="file with a class name per line, in the order of the labels; null: the names of the source",
    )
    templates: Annotated[tuple[Template, ...], Field(min_length=1, max_length=1000)] = Field(
        default=TEMPLATES, description="prompts; {} is the place of the name of the class"
    )


_WITH_PAIRS = used_when(where("model.family", "clip"))
_WITH_VALIDATION = used_when(where_not("evaluation.every", 0))
_WITH_IMAGES_IN_ROWS = used_when(where("model.family", "llava"))
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
    batches: Annotated[Whole, _WITH_VALIDATION] = 20
    retrieval_pairs: Annotated[WholeOrZero, _WITH_PAIRS, _WITH_VALIDATION] = Field(
        default=5000, description="pairs of the validation split among which retrieval is measured; 0: none"
    )
    zero_shot: Annotated[ZeroShotSpec | None, _WITH_PAIRS, _WITH_VALIDATION] = Field(
        default=None, description="labeled images that are classified in each validation; null: none"
    )
    sample_answers: Annotated[WholeOrZero, _WITH_IMAGES_IN_ROWS, _WITH_VALIDATION] = Field(
        default=0, description="llava: first rows of the validation split of which each validation writes answers"
    )
    tasks: tuple[Task, ...] = ()
    job: Annotated[EvaluationJobSpec, _WITH_TASKS] = LEFT_OUT

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        names = [task.name for task in self.tasks]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "tasks", f"has several tasks with the name {name}. Give each another name."

    def metric_names(self, objective: str, loss: str, outputs: int) -> tuple[str, ...]:
        """Return the names of metrics that can be known before the first evaluation; of lm_eval the prefixes.

        ``objective``, ``loss``: of the run, by the names of ``training``. ``outputs``: numbers that a model of images
        has for each image. With ``bce``, top-1 and top-5 are measured only where each image has one class.
        """
        ends = {"loss": ("/loss", "/perplexity"), "generation": (), "lm_eval": ("/",)}
        of_tasks = tuple(f"{task.name}{end}" for task in self.tasks for end in ends[task.kind])
        measures = ("loss", *self._measures(objective, loss, outputs)) if self.every else ()
        return (*(f"validation_{name}" for name in measures), *of_tasks)

    def _measures(self, objective: str, loss: str, outputs: int) -> tuple[str, ...]:
        """Return the names of what a validation measures beside the loss."""
        if objective == "classification":
            top5 = ("top5",) if outputs > 5 else ()
            return ("top1", *top5, *(("mean_average_precision",) if loss == "bce" else ()))
        if objective == "regression":
            return ("mae", "rmse")
        if objective != "contrastive" or loss == "nt_xent":
            return ()
        directions = ("image_to_text", "text_to_image") if self.retrieval_pairs else ()
        recalls = tuple(f"recall_at_{k}/{direction}" for k in (1, 5, 10) for direction in directions)
        return (*recalls, *(("zero_shot_top1", "zero_shot_top5") if self.zero_shot else ()))


def evaluation_cluster(cluster: ClusterSpec, job: EvaluationJobSpec) -> ClusterSpec:
    """Return the cluster section of an evaluation job: the run's, on one node with one GPU, with the job's keys.

    Raises pydantic's ValidationError.
    """
    one = {"nodes": 1, "spare_nodes": 0, "gpus_per_node": 1, "spot": False}
    return ClusterSpec.model_validate(_merged(cluster.model_dump(mode="json", by_alias=True) | one, job.cluster))


def cluster_problems(cluster: ClusterSpec, job: EvaluationJobSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted key of the spec, message) for each problem of ``evaluation.job.cluster``."""
    key = "evaluation.job.cluster"
    try:
        job_cluster = evaluation_cluster(cluster, job)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            unknown = detail["type"] == "extra_forbidden"
            message = "is not a key of the section cluster. Remove it" if unknown else detail["msg"].rstrip(".").lower()
            yield ".".join((key, *map(str, detail["loc"]))), f"{message}."
        return
    if job_cluster.nodes != 1 or job_cluster.gpus_per_node != 1:
        yield key, "must keep nodes: 1 and gpus_per_node: 1, because an evaluation is one process on one device."
    yield from ((f"{key}.{name}", message) for name, message in job_cluster.inconsistencies())


def _merged(raw: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = {name: (raw.get(name), value) for name, value in given.items()}
    changed = {
        name: _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for name, (old, new) in both.items()
    }
    return raw | changed
