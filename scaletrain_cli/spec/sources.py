"""Sections of ``data``: sources, the stages of their mixture, and how batches are read."""

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.corpus_files import FOLDER, IMAGE_FORMATS, SHARDS
from scaletrain_cli.spec.quantities import Bytes, Epochs, Matching, Text, not_a_switch, or_word, valid_if
from scaletrain_cli.spec.section import Section
from scaletrain_cli.spec.shared_paths import DataPath
from scaletrain_cli.text import did_you_mean

SourceName = Annotated[
    str, Matching(r"[a-z0-9][a-z0-9_-]*", 64, "must consist of a-z, 0-9, - and _, begin with a letter or digit")
]
Weight = Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=1e9)]
SourceFormat = Literal[
    "auto",
    "txt",
    "md",
    "code",
    "jsonl",
    "parquet",
    "arrow",
    "megatron",
    "npy",
    "raw_uint16",
    "raw_uint32",
    "image_folder",
    "webdataset",
]


def _start(value: Any) -> Any:
    """Return the start of a stage: a share of the run below 1, or a step from 2 on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("stage_start", "must be a share of the run below 1, such as 0.9, or a step")
    if isinstance(value, float) and not 0 < value < 1:
        raise PydanticCustomError("stage_start", "must be more than 0 and below 1 as a share of the run")
    if isinstance(value, int) and not 2 <= value <= 10**9:
        raise PydanticCustomError("stage_start", "must be a step from 2 to 1e9, or a share of the run below 1")
    return value


class SourceFieldsSpec(Section):
    """The fields of one source of images, as data.images.fields."""

    image: Text = "auto"
    label: Text = "auto"
    caption: Text = "auto"


class SourceSpec(Section):
    """One source of text, rows or images. Its share of the samples comes from ``weight`` or from ``epochs``."""

    name: SourceName = Field(description="name in weights, steps, metrics and reports")
    path: DataPath = Field(
        description="file, folder or glob, python-stdlib, sklearn-digits, hf://datasets/org/name@revision, "
        "s3://bucket/path, gs://, az://, https://, or a prepared dataset"
    )
    weight: Weight | None = Field(default=None, description="share of the samples, in proportion to other weights")
    epochs: Epochs | None = Field(
        default=None,
        description="times that the source is read in the run, or per epoch of it; others share the rest by weight",
    )
    format: SourceFormat = Field(
        default="auto", description="auto: by the suffix of each file; of images: that of data.format"
    )
    validation_path: DataPath | None = Field(
        default=None, description="rows to validate on, in place of validation_split of the source"
    )
    field: Text = Field(default="text", description="column of jsonl, parquet and arrow files with the text")
    fields: SourceFieldsSpec | None = Field(
        default=None, description="names of the parts of a sample of images; null: data.images.fields"
    )


class StageSpec(Section):
    """Weights of the sources from a step on, until the next stage."""

    start: Annotated[
        int | float,
        BeforeValidator(_start),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                    {"type": "integer", "minimum": 2, "maximum": 10**9},
                ]
            }
        ),
    ] = Field(description="first step with these weights, or the share of the run's steps before it, such as 0.9")
    weights: Annotated[dict[SourceName, Weight], Field(min_length=1)] = Field(
        description="weight of each source by its name; sources that are left out have 0"
    )

    def first_step(self, total_steps: int) -> int:
        """Return the first step of the stage, counted from 1, in a run of ``total_steps``."""
        if isinstance(self.start, int):
            return self.start
        return int(Fraction(repr(self.start)) * total_steps) + 1  # 0.29 as it is written, not the nearest float


MOST_WORKERS = 64  # processes of each rank that read


class LoaderSpec(Section):
    """Settings of the reading of batches. They never change the contents of a batch."""

    workers: Annotated[
        int | Literal["auto"],
        or_word(
            "auto",
            valid_if(
                lambda value: type(value) is int and 0 <= value <= MOST_WORKERS,
                f"must be a whole number from 0 to {MOST_WORKERS}",
            ),
        ),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_WORKERS}, {"const": "auto"}]}),
    ] = Field(default="auto", description="processes of each rank that read; 0: a thread")
    prefetch: Annotated[int, Field(strict=True, ge=1, le=1024)] = Field(
        default=2, description="number of batches that are read ahead; at least one for each worker"
    )
    pin_memory: bool = Field(default=True, description="copy batches to GPUs from page-locked memory, asynchronously")

    def read_ahead(self, processes: int) -> int:
        """Return the number of batches that are read ahead: with fewer than ``processes``, some would be idle."""
        return max(self.prefetch, processes)


class CacheSpec(Section):
    """Files of remote prepared data on each node, shared by its ranks; the least recently used ones are removed."""

    size: Annotated[
        Bytes,
        AfterValidator(
            valid_if(lambda size: size >= 1 << 20, "must be at least 1 MiB, since remote data are read in such blocks")
        ),
    ] = Field(default=100 * 10**9, description="most bytes on each node, at least 1 MiB")
    path: Text | None = Field(default=None, description="folder on the nodes; null: below TMPDIR")


def source_inconsistencies(sources: Sequence[SourceSpec]) -> Iterator[tuple[str, str]]:
    """Yield (key relative to ``data``, message) for each contradiction among the sources."""
    names = [source.name for source in sources]
    for number, source in enumerate(sources):
        if source.name in names[:number]:
            yield f"sources.{number}.name", f"{source.name} is the name of an earlier source. Names must differ."
        if source.weight is not None and source.epochs is not None:
            yield f"sources.{number}.epochs", "and weight both set the share of the source. Give one of them."
        elif len(sources) > 1 and source.weight is None and source.epochs is None:
            yield f"sources.{number}.weight", "or epochs is required with more than one source."
    if sources and all(source.weight == 0 for source in sources):
        yield "sources.0.weight", "must be above 0 for at least one source."


def format_inconsistencies(sources: Sequence[SourceSpec], parts: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (key relative to ``data``, message) for each setting of a source that is for other data.

    ``parts``: of a sample of images that the run reads, as in SourceFieldsSpec; empty for text.
    """
    for number, source in enumerate(sources):
        key = f"sources.{number}"
        if parts:
            for part, given in (source.fields or SourceFieldsSpec()).model_dump().items():
                if given != "auto" and part not in parts:
                    yield f"{key}.fields.{part}", f"has no effect: this run reads no {part}. Remove it."
            if source.format not in ("auto", *IMAGE_FORMATS):
                yield f"{key}.format", f"must be auto or {' or '.join(IMAGE_FORMATS)} for images."
            if source.field != SourceSpec.model_fields["field"].default:
                yield f"{key}.field", "is the column of a text. For images set fields."
            if source.validation_path is not None:
                yield f"{key}.validation_path", "is for rows. For images set data.validation_split."
        else:
            if source.format in (FOLDER, SHARDS):
                yield f"{key}.format", "is a format of images."
            if source.fields is not None:
                yield f"{key}.fields", "names parts of images. For text set field."


def stage_inconsistencies(stages: Sequence[StageSpec], sources: Sequence[SourceSpec]) -> Iterator[tuple[str, str]]:
    """Yield (key relative to ``data``, message) for each contradiction between stages and sources."""
    names: Collection[str] = [source.name for source in sources]
    distinct = len(set(names)) == len(names)  # else a name is wrong, and with it those that refer to it
    for number, stage in enumerate(stages):
        for name in stage.weights:
            if name not in names and distinct:
                guess = did_you_mean(name, names)
                yield f"stages.{number}.weights", f"{name} is no source. {guess}Sources: {', '.join(sorted(names))}."
        if not any(stage.weights.values()):
            yield f"stages.{number}.weights", "must be above 0 for at least one source."
    for number, source in enumerate(sources):
        if stages and source.epochs is not None:
            yield f"sources.{number}.epochs", "cannot be kept with data.stages, which set the shares. Use weight."


def stage_order_problems(stages: Sequence[StageSpec], total_steps: int) -> Iterator[tuple[str, str]]:
    """Yield (key relative to ``data``, message) for stages that begin after the run, or not after the one before."""
    before = 1
    for number, stage in enumerate(stages):
        first = stage.first_step(total_steps)
        if first > total_steps:
            yield f"stages.{number}.start", f"must not exceed the {total_steps} steps of the run."
        elif first <= before:
            yield f"stages.{number}.start", f"is step {first}, which must be after step {before}, where another begins."
        before = max(before, first)
