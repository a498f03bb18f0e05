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
    """A folder of a git working tree, copied into the run at submission; ``engine`` runs this copy.

    Files ignored by git or by ``.scaletrainignore`` (gitignore syntax) are left out.
    """

    path: Text | None = Field(default=None, description="folder of a git working tree; null: no code is kept")
    uncommitted: Annotated[Literal["patch", "refuse"], _WITH_A_FOLDER] = Field(
        default="patch",
        description="patch: include uncommitted changes and keep them as a patch too; refuse: reject them",
    )
    max_size: Annotated[PositiveBytes, _WITH_A_FOLDER] = Field(
        default=50_000_000, description="maximum total size of the files, before compression"
    )
    on_nodes: AbsoluteFolder | None = Field(
        default=None,
        description="folder of the image or a volume that already holds the code; compared, not copied",
    )
    engine: ModuleName | None = Field(
        default=None,
        description="module that each rank runs instead of the built-in engine: python -P -m MODULE RUN_DIR",
    )
    import_root: RelativeFolder = Field(
        default=".", description="folder below path that is added to sys.path, e.g. src"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each setting without effect, or that points outside of the tree."""
        if self.on_nodes is not None and self.path is None:
            yield "on_nodes", "requires code.path, with which it is compared. Set code.path."
        if self.import_root != "." and self.path is None:
            yield "import_root", "is a folder below code.path. Set code.path."
        if ".." in self.import_root.split("/"):
            yield "import_root", "must be below code.path. Remove '..'."


Budget = Annotated[
    int | Literal["unlimited"],
    or_word("unlimited", partial(parse_whole, minimum=0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "unlimited"}]}),
]


class TokenizerSpec(Section):
    """``bpe`` is trained on the corpus; ``file`` reads a Hugging Face ``tokenizer.json``."""

    kind: Literal["bpe", "file"] = "bpe"
    vocab_size: Annotated[Whole, used_when(where("data.tokenizer.kind", "bpe"))] = 32000
    path: Text | None = None


class DataSpec(Section):
    """Training text: ``python-stdlib``, a prepared dataset, or text, jsonl or parquet files (path or glob)."""

    source: Text
    tokenizer: TokenizerSpec = LEFT_OUT
    validation_split: Fraction = 0.05
    loss_mask: Literal["none", "document_starts"] = Field(
        default="none", description="document_starts: exclude the first token of each document from the loss"
    )
    skip: tuple[tuple[Whole, Whole], ...] = Field(
        default=(), description="ranges of batches to skip: [[first, last], ...], counted from 1"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each setting that contradicts another one."""
        if (self.tokenizer.kind == "file") != (self.tokenizer.path is not None):
            yield "tokenizer.path", "is required with kind: file, and not allowed otherwise."
        for first, last in self.skip:
            if first > last:
                yield "skip", f"[{first}, {last}] has its first batch after its last. Use [{last}, {first}]."


class CheckpointSpec(Section):
    """Checkpoint interval and retention. ``dir: auto`` is the run directory."""

    every: AutoWhole = "auto"
    keep: Whole = 3
    keep_every: Whole | None = Field(default=None, description="also keep checkpoints whose step is a multiple of this")
    asynchronous: bool = Field(default=True, alias="async")
    dir: Text = "auto"


class SpikeSpec(Section):
    """Spike detection: loss above ``factor`` times its median, or loss or gradient norm far outside its spread.

    After ``retries`` rollbacks to the same checkpoint the run stops.
    """

    factor: Positive = 3.0
    patience: Whole = Field(default=3, description="consecutive steps above the threshold that count as a spike")
    action: Literal["warn", "rollback"] = "rollback"
    retries: Annotated[
        WholeOrZero, used_when(where("guard.spike.action", "rollback"), where("guard.nan", "rollback"))
    ] = Field(default=3, description="rollbacks to the same checkpoint before the run stops")


class GuardSpec(Section):
    """Reactions to NaN, spikes and hangs. ``hang`` is the maximum time without a heartbeat in a step.

    ``preflight``: measure devices and links before step 1; ``auto`` does so on GPUs.
    """

    nan: Literal["stop", "rollback"] = "stop"
    spike: SpikeSpec = LEFT_OUT
    hang: AutoSeconds = "auto"
    preflight: Literal["auto", "always", "never"] = "auto"


class RestartsSpec(Section):
    """Maximum number of restarts, by the reason of the failure."""

    preemption: Budget = "unlimited"
    node: WholeOrZero = 10
    crash: WholeOrZero = 3
    oom: WholeOrZero = 0


class PlannerSpec(Section):
    """Framework and search space of the planner; only ``deepspeed`` can be submitted.

    ``attention``: kernel that is modeled; ``auto`` follows the framework and the device.
    ``autocast``: vision networks compute in 16 bits over fp32 weights (torch.autocast).
    ``search``: values of ``auto`` in the layout: those the engine runs, or all that can be modeled.
    """

    framework: Literal["deepspeed", "fsdp", "megatron", "nanotron"] = "deepspeed"
    attention: Literal["auto", "flash", "materialised"] = "auto"
    autocast: bool = False
    search: Literal["engine", "everything"] = "engine"
