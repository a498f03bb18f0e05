"""The data section of the run spec: text for pretraining, and rows for fine-tuning."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from scaletrain_cli.errors import UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import EMBEDDED, ENDS_OF_TEXT, PYTHON_DOCSTRINGS, PYTHON_STDLIB, format_by_name
from scaletrain_cli.spec.images import ImagesSpec
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.preparation import AnyStep, preparation_inconsistencies
from scaletrain_cli.spec.quantities import Fraction, Matching, Text, Whole
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not
from scaletrain_cli.spec.shared_paths import DataPath, ModelPath
from scaletrain_cli.spec.sources import (
    CacheSpec,
    LoaderSpec,
    SourceSpec,
    StageSpec,
    source_inconsistencies,
    stage_inconsistencies,
)

NO_DATA = "none"  # data.source of a program of the user's whose spec has no data section
_WITH_TIKTOKEN = used_when(where("data.tokenizer.kind", "tiktoken"))


class TokenizerSpec(Section):
    """``bpe`` is trained on the corpus; ``file`` reads a Hugging Face ``tokenizer.json``.

    ``sentencepiece`` and ``tiktoken`` read a file of these libraries, and convert it to a tokenizer.json with the same
    tokens.
    """

    kind: Literal["bpe", "file", "sentencepiece", "tiktoken"] = "bpe"
    vocab_size: Annotated[Whole, used_when(where("data.tokenizer.kind", "bpe"))] = 32000
    path: ModelPath | None = Field(
        default=None,
        description="tokenizer.json of Hugging Face tokenizers, or hf://org/name@revision; with kind: sentencepiece "
        "or tiktoken a local file",
    )
    tokenizer_class: Annotated[
        Literal["PreTrainedTokenizerFast"] | None, used_when(where("data.tokenizer.kind", "file"))
    ] = Field(
        default=None,
        description="instead of that in tokenizer_config.json, also in exports: keeps the tokens of tokenizer.json "
        "where transformers would split texts in another way with the class of the folder",
    )
    encoding: Annotated[
        Literal["gpt2", "p50k_base", "cl100k_base", "o200k_base", "llama3", "qwen"] | None, _WITH_TIKTOKEN
    ] = Field(default=None, description="known split pattern and special tokens, which a tiktoken file does not have")
    pattern: Annotated[Text | None, _WITH_TIKTOKEN] = Field(
        default=None, description="instead of encoding: regular expression that splits the text"
    )
    special_tokens: Annotated[tuple[Text, ...], _WITH_TIKTOKEN] = Field(
        default=(), description="with pattern: special tokens, whose ids follow those of the file"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if (self.kind == "bpe") != (self.path is None):
            kinds = "file, sentencepiece or tiktoken"
            yield "path", f"is required with kind: {self.kind}." if self.path is None else f"requires kind: {kinds}."
        if self.kind in ("sentencepiece", "tiktoken") and is_reference(self.path):
            yield "path", f"must be a local file with kind: {self.kind}. Download it, or use its tokenizer.json."
        if self.kind == "tiktoken" and (self.encoding is None) == (self.pattern is None):
            yield "encoding", "is required with kind: tiktoken, or pattern instead of it."
        if self.special_tokens and self.encoding is not None:
            yield "special_tokens", f"has no effect with encoding: {self.encoding}, which has its own. Remove it."
        if self.kind == "tiktoken" and self.pattern is not None and not {*self.special_tokens} & {*ENDS_OF_TEXT}:
            yield "special_tokens", f"must have a token that ends documents: one of {', '.join(ENDS_OF_TEXT)}."


_WITH_ROWS = used_when(where("training.objective", "sft", "dpo"))
_WITH_TEXT = used_when(where("training.objective", "causal_lm"))
_WITH_TEXT_OR_IMAGES = used_when(where("training.objective", "causal_lm", *LOSSES_OF))
_WITH_IMAGES_IN_ROWS = used_when(where("model.family", "llava"))
_WITH_WORDS = used_when(where_not("model.family", "resnet", "convnext", "vit"))
# The name of the source in a spec with data.source.
ONLY_SOURCE = "source"


class FieldsSpec(Section):
    """Names of the columns and of the roles of the rows. Optional columns: tools, system, input, weight.

    Also read, under these names: history (alpaca), functions (as in OpenAI's first API), and chat_template_kwargs, the
    variables that a row gives to the chat template.
    """

    text: Text = "text"
    messages: Text = "messages"
    prompt: Text = "prompt"
    completion: Text = "completion"
    chosen: Text = "chosen"
    rejected: Text = "rejected"
    instruction: Text = "instruction"
    input: Text = "input"
    output: Text = "output"
    conversations: Text = "conversations"
    system: Text = "system"
    tools: Text = Field(default="tools", description="JSON schemas of the tools, as a list or as its JSON text")
    weight: Text = Field(default="weight", description="weight of the row in the loss; of a message: its key weight")
    images: Annotated[Text, _WITH_IMAGES_IN_ROWS] = Field(
        default="auto", description="llava: paths or bytes of the row's images; auto: images or image"
    )
    roles: dict[Text, Literal["system", "user", "assistant", "tool"]] = Field(
        default={}, description="names of roles in the rows, such as bing: assistant; usual ones are known"
    )


Date = Annotated[str, Matching(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", 10, "must be a date: YYYY-MM-DD")]
# What each objective can read; ``auto`` finds the format by the columns of the first row.
FORMATS_OF: dict[str, tuple[str, ...]] = {
    "causal_lm": ("text",),
    "sft": ("messages", "sharegpt", "prompt_completion", "alpaca", "text"),
    "dpo": ("preference",),
}
PACKINGS_OF: dict[str, tuple[str, ...]] = {
    "causal_lm": ("none", "documents"),
    "sft": ("none", "best_fit", "best_fit_split"),
    "dpo": ("none",),
}
# The settings that decide what rows become, beside the tokenizer and the chat template.
SETTINGS_OF_ROWS = {"format", "fields", "loss_on", "truncation", "packing", "on_bad"} | {
    "chat_template_date",
    "chat_template_kwargs",
}
# What llava can read: formats with a place for an image in their text. No packing cuts an image.
FORMATS_WITH_IMAGES = ("messages", "sharegpt", "prompt_completion")
PACKINGS_WITH_IMAGES = ("none", "best_fit")


class DataSpec(Section):
    """Training data: an embedded source, a prepared dataset, or files (path, folder or glob).

    Files are local or on the Hugging Face Hub: ``hf://datasets/org/name@revision``, with ``/path`` or ``/glob``.
    Embedded are ``python-stdlib``, text; ``python-docstrings``, questions and answers from the standard library, for
    ``sft`` and ``dpo``; and ``sklearn-digits``, images of digits.
    """

    source: DataPath | None = None
    sources: tuple[SourceSpec, ...] = Field(
        default=(), max_length=1000, description="several sources of text, rows or images, in place of source"
    )
    stages: Annotated[tuple[StageSpec, ...], used_when(where("data.mixes", True, setting="data.sources"))] = Field(
        default=(), max_length=1000, description="later weights of the sources, such as better data at the end"
    )
    prepare: Annotated[tuple[AnyStep, ...], _WITH_TEXT] = Field(
        default=(), max_length=100, description="steps before tokenization, in order"
    )
    on_bad: Literal["stop", "skip"] = Field(
        default="stop",
        description="a document, row or image that cannot be used ends the preparation, or is left out and counted",
    )
    images: Annotated[
        ImagesSpec, used_when(where("training.objective", *LOSSES_OF), where("model.family", "llava"))
    ] = LEFT_OUT
    tokenizer: Annotated[TokenizerSpec, _WITH_WORDS] = LEFT_OUT
    validation_split: Fraction = Field(default=0.05, description="share of the data; default 0 with validation_source")
    validation_source: Annotated[DataPath | None, _WITH_ROWS] = Field(
        default=None,
        description="rows to validate on, as source, in place of a part of source; of a folder with splits that for "
        "validation, else that for testing",
    )
    loss_mask: Annotated[Literal["none", "document_starts"], _WITH_TEXT] = Field(
        default="none", description="document_starts: exclude the first token of each document from the loss"
    )
    skip: tuple[tuple[Whole, Whole], ...] = Field(
        default=(), description="ranges of batches to skip: [[first, last], ...], counted from 1"
    )
    format: Literal[
        "auto",
        "text",
        "messages",
        "prompt_completion",
        "alpaca",
        "sharegpt",
        "preference",
        "image_folder",
        "webdataset",
        "parquet",
    ] = Field(
        default="auto",
        description="format of the rows, or of images; auto: by the objective and the columns of the first row, or by "
        "the files",
    )
    fields: Annotated[FieldsSpec, _WITH_ROWS] = LEFT_OUT
    chat_template: Annotated[ModelPath | None, _WITH_ROWS] = Field(
        default=None, description="Jinja file, also hf://org/name@revision/file; null: the tokenizer's own template"
    )
    chat_template_date: Annotated[Date, _WITH_ROWS] = Field(
        default="2024-07-26", description="current date for chat templates that write it, so that prompts never change"
    )
    chat_template_kwargs: Annotated[dict[Text, bool | int | float | str], _WITH_ROWS] = Field(
        default={},
        description="variables of the chat template, such as enable_thinking: false; those of a row's column "
        "chat_template_kwargs come first",
    )
    loss_on: Annotated[Literal["assistant", "last_assistant", "all"], used_when(where("training.objective", "sft"))] = (
        Field(
            default="assistant",
            description="tokens in the loss. assistant: all turns of the assistant, or the completion; "
            "last_assistant: the last of these turns; all: prompts too",
        )
    )
    truncation: Annotated[Literal["keep_start", "keep_end", "drop", "refuse"], _WITH_ROWS] = Field(
        default="keep_start",
        description="rows of more than model.seq_len tokens. drop: leave them out; refuse: end with an error",
    )
    packing: Annotated[
        Literal["none", "documents", "best_fit", "best_fit_split"],
        used_when(where("training.objective", "causal_lm", "sft")),
    ] = Field(
        default="none",
        description="documents (causal_lm): attention and positions within each document of a sequence; best_fit: "
        "(sft) several rows in a sequence, each with attention and positions of its own; best_fit_split: also cut rows",
    )

    loader: LoaderSpec = LEFT_OUT
    cache: Annotated[CacheSpec, _WITH_TEXT_OR_IMAGES] = LEFT_OUT

    @property
    def mixes(self) -> bool:
        """Return True if there are several sources."""
        return len(self.sources) > 1

    @property
    def all_sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources, also for a single ``data.source``."""
        if self.source is None:
            return self.sources
        return (SourceSpec(name=ONLY_SOURCE, path=self.source, validation_path=self.validation_source),)

    @property
    def only_source(self) -> str:
        """Return the path of the single source. Raises UsageError if there are several."""
        if self.source is None and len(self.sources) != 1:
            raise UsageError("data.sources names several sources, where one is needed. Use data.source.")
        return self.source if self.source is not None else self.sources[0].path

    @property
    def may_be_prepared(self) -> bool:
        """Return True if each source may be a prepared dataset, by the form of its path."""
        return all(
            not (path in EMBEDDED or is_reference(path) or path.startswith(("http:", "https:")))
            and not set("*?[") & set(path)
            and not format_by_name(path)[0]
            for _, path in self.paths()
        )

    def shown(self, source: str) -> str:
        """Return the keys that name a source, for messages."""
        return "data.source" if self.source is not None else f"the source {source} of data.sources"

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, path) of each source."""
        if self.source is not None:
            yield "data.source", self.source
        yield from ((f"data.sources.{number}.path", source.path) for number, source in enumerate(self.sources))

    def validation_paths(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, path) of the rows that are for validation alone."""
        keys = ["validation_source"] if self.source is not None else []
        keys += [f"sources.{number}.validation_path" for number in range(len(self.sources))]
        for key, section in zip(keys, self.all_sources, strict=True):
            if section.validation_path is not None:
                yield f"data.{key}", section.validation_path

    @model_validator(mode="before")
    @classmethod
    def _no_split_beside_validation_rows(cls, value: Any) -> Any:
        """Return a validation split of 0 unless it is set, if there are rows for validation."""
        if isinstance(value, dict) and value.get("validation_source") is not None:
            return {"validation_split": 0.0, **value}
        return value

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.validation_source is not None and self.validation_split:
            yield "validation_split", "has no effect with validation_source, which is validated on. Remove it."
        if self.validation_source is not None and self.sources:
            yield "validation_source", "belongs to data.source. For data.sources set validation_path of each."
        if self.source is None and not self.sources:
            yield "source", "is required, or sources."
        elif self.source is not None and self.sources:
            yield "sources", "and source both name the data. Give one of them."
        yield from source_inconsistencies(self.sources)
        yield from stage_inconsistencies(self.stages, self.sources)
        names = [source.name for source in self.all_sources]
        yield from ((f"prepare.{key}", message) for key, message in preparation_inconsistencies(self.prepare, names))
        for key, message in self.tokenizer.inconsistencies():
            yield f"tokenizer.{key}", message
        for first, last in self.skip:
            if first > last:
                yield "skip", f"[{first}, {last}] has its first batch after its last. Use [{last}, {first}]."
        if self.packing == "documents" and self.loss_mask != "none":
            yield "loss_mask", "has no effect with packing: documents, which excludes these tokens. Remove it."
        if self.packing == "best_fit_split" and self.truncation != "keep_start":
            yield "truncation", "has no effect with packing: best_fit_split, which cuts long rows. Remove it."
        if self.loss_on == "last_assistant" and self.format in ("prompt_completion", "text"):
            yield "loss_on", f"must be assistant or all with format: {self.format}, which has no turns."

    def recorded(self, key: str) -> str:
        """Return ``fields`` or ``chat_template_kwargs`` as dataset.json records them."""
        return json.dumps(self.model_dump(include={key}, exclude_defaults=True).get(key, {}), sort_keys=True)

    def recorded_template(self, folder: Path) -> str:
        """Return ``chat_template`` as dataset.json records it: the SHA-256 of its file, null, or "" if unreadable.

        ``folder``: the base of a relative path.
        """
        if self.chat_template is None:
            return "null"
        try:
            return f"SHA-256 {hashlib.sha256((folder / expand_home(self.chat_template)).read_bytes()).hexdigest()}"
        except OSError:
            return ""

    def differences(self, prepared: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str, str]]:
        """Yield (key, value, value when prepared) for each setting that is not known to be that of prepared rows.

        ``prepared``: dataset.json. ``folder``: the base of relative paths. Settings with their default value ask for
        nothing. The third is empty if it was not recorded, as in earlier versions, or cannot be compared here.
        ``packing`` is not among them: the plan depends on it.
        """
        given = {"truncation": self.truncation, "format": self.format, "template_date": self.chat_template_date}
        if prepared.get("objective") == "sft":
            given["loss_on"] = self.loss_on
        for name, value in given.items():
            key = "chat_template_date" if name == "template_date" else name
            recorded = str(prepared.get(name) or "")
            if value not in (recorded, type(self).model_fields[key].default):
                yield key, value, recorded
        if self.chat_template is not None:
            template, recorded = self.recorded_template(folder), str(prepared.get("chat_template") or "")
            if not template or template != recorded:
                yield "chat_template", str(self.chat_template), recorded if template else ""
        for key in ("fields", "chat_template_kwargs"):
            value, recorded = self.recorded(key), str(prepared.get(key) or "")
            if value not in ("{}", recorded):
                yield key, value, recorded

    def conversation_inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for each setting that rows with images cannot have."""
        if self.format not in ("auto", *FORMATS_WITH_IMAGES):
            yield "data.format", f"must be auto or {' or '.join(FORMATS_WITH_IMAGES)} with family: llava."
        if self.packing not in PACKINGS_WITH_IMAGES:
            yield "data.packing", f"must be {' or '.join(PACKINGS_WITH_IMAGES)} with family: llava."
        if self.truncation == "keep_end":
            yield "data.truncation", "must be keep_start, drop or refuse with family: llava. An image comes first."

    def objective_inconsistencies(self, objective: str) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for each setting that contradicts ``training.objective``."""
        allowed = FORMATS_OF[objective]
        if self.format not in ("auto", *allowed):
            yield "data.format", f"must be auto or {' or '.join(allowed)} with training.objective: {objective}."
        if self.packing not in PACKINGS_OF[objective]:
            allowed_here = ", ".join(PACKINGS_OF[objective])
            yield "data.packing", f"must be one of {allowed_here} with training.objective: {objective}."
        if objective == "causal_lm" and self.source == PYTHON_DOCSTRINGS:
            yield "data.source", "requires training.objective: sft or dpo. For plain text use python-stdlib."
        if objective != "causal_lm" and self.source == PYTHON_STDLIB:
            yield "data.source", f"is plain text. Use {PYTHON_DOCSTRINGS} or files with rows."
        if objective != "causal_lm" and self.mixes and self.tokenizer.path is None:
            yield "data.tokenizer.path", "is required with several sources of rows, which have one tokenizer."
        for number, source in enumerate(self.sources):
            key = f"data.sources.{number}"
            if objective == "causal_lm" and source.validation_path is not None:
                yield f"{key}.validation_path", "is for rows. For text set data.validation_split."
            if objective != "causal_lm" and source.format != "auto":
                yield f"{key}.format", "must be auto for rows: data.format is that of all sources."
            if objective != "causal_lm" and source.field != "text":
                yield f"{key}.field", "is the column of a text. For rows set data.fields."
            if objective == "causal_lm" and source.path == PYTHON_DOCSTRINGS:
                yield f"{key}.path", "has rows for sft and dpo. For plain text use python-stdlib."
