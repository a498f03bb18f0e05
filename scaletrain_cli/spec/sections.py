"""The small sections of the run spec: code, data, checkpoint, guard, restarts, tracking and planner."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from scaletrain_cli.spec.quantities import (
    AutoSeconds,
    AutoWhole,
    Fraction,
    Matching,
    Positive,
    PositiveBytes,
    Text,
    Whole,
    WholeOrZero,
    or_word,
    parse_whole,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ModuleName = Annotated[
    str,
    Matching(rf"{_NAME}(\.{_NAME})*", 256, "must be the dotted name of a Python module, such as train or my.train"),
]
RelativeFolder = Annotated[
    str, Matching(r"[^/\x00\n][^\x00\n]*", 4096, "must be a relative path of a folder, on one line")
]
AbsoluteFolder = Annotated[str, Matching(r"/[^\x00\n]*", 4096, "must be the absolute path of a folder, on one line")]


_WITH_A_FOLDER = used_when(where_not("code.path", None))


class CodeSpec(Section):
    """A folder of a git working tree, kept with the run as it is at submission; ``engine`` runs that, nothing newer.

    What git ignores and what ``.scaletrainignore`` in it names (in gitignore's syntax) stays out.
    """

    path: Text | None = Field(default=None, description="the folder; left out, no code is kept")
    uncommitted: Annotated[Literal["patch", "refuse"], _WITH_A_FOLDER] = Field(
        default="patch", description="patch: what is not committed goes along and is kept as a patch too"
    )
    max_size: Annotated[PositiveBytes, _WITH_A_FOLDER] = Field(
        default=50_000_000, description="of all files together, before compression"
    )
    on_nodes: AbsoluteFolder | None = Field(
        default=None,
        description="folder of the image or of a volume that holds the tree already: compared, not sent",
    )
    engine: ModuleName | None = Field(
        default=None, description="module that each rank runs in place of this engine: python -P -m MODULE RUN_DIR"
    )
    import_root: RelativeFolder = Field(default=".", description="folder below path that imports begin in, as src")

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that has nothing to apply to, or leads out of the tree."""
        if self.on_nodes is not None and self.path is None:
            yield "on_nodes", "is compared with what code.path holds. Give code.path too."
        if self.import_root != "." and self.path is None:
            yield "import_root", "is a folder below code.path. Give code.path too."
        if ".." in self.import_root.split("/"):
            yield "import_root", "must stay below code.path. Leave out '..'."


Budget = Annotated[
    int | Literal["unlimited"],
    or_word("unlimited", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "unlimited"}]}),
]


class TokenizerSpec(Section):
    """``bpe`` is trained on the corpus itself; ``file`` reads a Hugging Face ``tokenizer.json``."""

    kind: Literal["bpe", "file"] = "bpe"
    vocab_size: Annotated[Whole, used_when(where("data.tokenizer.kind", "bpe"))] = 32000
    path: Text | None = None


class DataSpec(Section):
    """Text to train on: ``python-stdlib``, a prepared dataset, or text / jsonl / parquet files (path or glob)."""

    source: Text
    tokenizer: TokenizerSpec = LEFT_OUT
    validation_split: Fraction = 0.05
    loss_mask: Literal["none", "document_starts"] = Field(
        default="none", description="document_starts: no document's first token is predicted from the one before"
    )
    skip: tuple[tuple[Whole, Whole], ...] = Field(
        default=(), description="windows of batches that are not trained on: [[first, last], ...], counted from 1"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that contradicts another one."""
        if (self.tokenizer.kind == "file") != (self.tokenizer.path is not None):
            yield "tokenizer.path", "is needed with kind: file, and only there."
        for first, last in self.skip:
            if first > last:
                yield "skip", f"[{first}, {last}] begins after it ends. Write [{last}, {first}]."


class CheckpointSpec(Section):
    """When the full state is saved and how many are kept. ``dir: auto`` is the run directory."""

    every: AutoWhole = "auto"
    keep: Whole = 3
    keep_every: Whole | None = Field(default=None, description="also kept, for ever: each whose step is a multiple")
    asynchronous: bool = Field(default=True, alias="async")
    dir: Text = "auto"


class SpikeSpec(Section):
    """Loss above ``factor`` times its median, or loss or gradient norm far beyond its spread, and what to do about it.

    After ``retries`` rollbacks to the same checkpoint the run stops for good.
    """

    factor: Positive = 3.0
    patience: Whole = Field(default=3, description="steps in a row that make a spike")
    action: Literal["warn", "rollback"] = "rollback"
    retries: Annotated[
        WholeOrZero, used_when(where("guard.spike.action", "rollback"), where("guard.nan", "rollback"))
    ] = Field(default=3, description="rollbacks to one checkpoint before the run stops")


class GuardSpec(Section):
    """What ends or mends a run that goes wrong. ``hang`` is how long a rank may be silent in a step.

    ``preflight``: whether ranks measure their devices and links before step 1; ``auto`` does on GPUs.
    """

    nan: Literal["stop", "rollback"] = "stop"
    spike: SpikeSpec = LEFT_OUT
    hang: AutoSeconds = "auto"
    preflight: Literal["auto", "always", "never"] = "auto"


class RestartsSpec(Section):
    """How often a run may be restarted, by reason of its end."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0


class PlannerSpec(Section):
    """Whose memory and overlap habits are modelled; only ``deepspeed`` can be submitted.

    ``attention``: whether the scores are kept as a matrix; ``auto`` follows the framework and the device.
    ``autocast``: of vision networks, whether torch.autocast computes in 16 bits over fp32 weights.
    ``search``: what ``auto`` in the layout may become: what this engine runs, or everything that can be modelled.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "materialised"] = "auto"
    autocast: bool = False
    search: Literal["engine", "everything"] = "engine"
