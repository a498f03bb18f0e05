"""The section ``code`` of a run spec: the user's program, and the folder that is copied for it."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import AnyText, Matching, PositiveBytes, Text
from scaletrain_cli.spec.section import Section, used_when, where_not

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ModuleName = Annotated[
    str, Matching(rf"{_NAME}(\.{_NAME})*", 256, "must be the dotted name of a Python module, such as train or my.train")
]
RelativeFolder = Annotated[
    str, Matching(r"[^/\x00\n][^\x00\n]*", 4096, "must be a relative path of a folder, on one line")
]
AbsoluteFolder = Annotated[str, Matching(r"/[^\x00\n]*", 4096, "must be the absolute path of a folder, on one line")]
_WITH_A_FOLDER = used_when(where_not("code.path", None))


class CodeSpec(Section):
    """A folder of a git working tree, copied into the run at submission; ``engine`` or ``command`` run this copy.

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
        default=None, description="folder of the image or a volume that already holds the code; compared, not copied"
    )
    engine: ModuleName | None = Field(
        default=None,
        description="module that each rank runs instead of the built-in engine: python -P -m MODULE RUN_DIR",
    )
    command: tuple[AnyText, ...] | None = Field(
        default=None, description="words of the command line that each rank runs instead of the built-in engine"
    )
    processes_per_node: Annotated[Literal["auto", 1], used_when(where_not("code.command", None))] = Field(
        default="auto", description="auto: one process per rank; 1: one that starts its ranks, such as torchrun"
    )
    import_root: RelativeFolder = Field(
        default=".", description="folder below path that is added to sys.path, e.g. src"
    )

    @property
    def own_program(self) -> bool:
        """Return whether the ranks run a program of the user's instead of the built-in engine."""
        return self.engine is not None or self.command is not None

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.engine is not None and self.command is not None:
            yield "command", "cannot be combined with code.engine. Remove one of them."
        if self.command is not None and (not self.command or not self.command[0]):
            yield "command", "must begin with a program, such as [python, train.py]."
        if self.on_nodes is not None and self.path is None:
            yield "on_nodes", "requires code.path, with which it is compared. Set code.path."
        if self.import_root != "." and self.path is None:
            yield "import_root", "is a folder below code.path. Set code.path."
        if ".." in self.import_root.split("/"):
            yield "import_root", "must be below code.path. Remove '..'."
