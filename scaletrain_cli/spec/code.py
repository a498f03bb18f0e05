"""The code section: the user's own program, which working tree it is in, and what becomes of that at submission."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from scaletrain_cli.spec.quantities import Matching, PositiveBytes, Text
from scaletrain_cli.spec.section import Section, used_when, where_not

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
