"""References to files of the Hugging Face Hub: ``hf://[datasets/]org/name[@revision][/path]``."""

import re
from dataclasses import dataclass
from typing import Literal

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

PREFIX = "hf://"
FORM = "hf://org/name, hf://org/name@revision or hf://org/name@revision/path"
DATASET_FORM = "hf://datasets/org/name, optionally with @revision and /path or /glob"
Kind = Literal["model", "dataset"]

# As the hub validates names of repositories (huggingface_hub, utils/_validators.py).
_NAME = re.compile(r"(?!-|\.)[A-Za-z0-9._-]{1,96}(?<!-|\.)")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,254}")
_SPECIAL_REVISION = re.compile(r"refs/(?:pr/\d+|convert/[A-Za-z0-9_.-]+)(?=/|$)")  # the only ones written with slashes
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OTHER_KINDS = ("spaces", "buckets", "kernels")
_DEFAULT_REVISION = "main"


class HubError(UsageError):
    """The hub does not give what a reference names (exit 2). ``temporary``: a later attempt may succeed."""

    code = "hub"

    def __init__(self, reason: Reason, *, temporary: bool = False) -> None:
        super().__init__(reason)
        self.why, self.temporary = reason, temporary


@dataclass(frozen=True)
class HubReference:
    """A repository at a revision, and a file, folder or glob in it; an empty ``path`` is the whole repository."""

    kind: Kind
    repo: str
    revision: str
    path: str = ""

    @property
    def is_pinned(self) -> bool:
        """Return True if the revision is a full commit hash, which never moves."""
        return is_commit(self.revision)

    @property
    def place(self) -> str:
        """Return the repository and revision as a person writes them: ``org/name@main``."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.repo}@{self.revision}"

    def below(self, name: str) -> str:
        """Return the path in the repository of a file in the folder ``path``."""
        return f"{self.path}/{name}" if self.path else name


def is_reference(text: str | None) -> bool:
    """Return True if the text names files of the hub and not a local path."""
    return text is not None and text.startswith(PREFIX)


def is_commit(revision: str) -> bool:
    """Return True for a full commit hash."""
    return _COMMIT.fullmatch(revision) is not None


def parse_reference(text: str) -> HubReference:
    """Return the parsed reference. Raises ValueError with what is wrong and what is allowed."""
    body = text.removeprefix(PREFIX)
    first, _, rest = body.partition("/")
    if first in _OTHER_KINDS:
        raise ValueError(f"{first} of the hub cannot be used; give {FORM}")
    kind: Kind = "dataset" if first == "datasets" else "model"
    if first in ("datasets", "models"):
        body = rest
    form = DATASET_FORM if kind == "dataset" else FORM
    repo, at, tail = body.partition("@")
    if at:
        revision, path = _revision_and_path(tail)
        names = repo.split("/")
    else:
        revision, parts = _DEFAULT_REVISION, body.split("/")
        names, path = parts[:2], "/".join(parts[2:])
    is_named = all(_NAME.fullmatch(name) and not name.endswith(".git") for name in names)
    if not 1 <= len(names) <= 2 or not is_named or any(mark in name for name in names for mark in ("--", "..")):
        raise ValueError(f"is not the name of a repository on the Hugging Face Hub; give {form}")
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"has no valid revision after @: a branch, a tag or a commit hash; give {form}")
    path = path.removesuffix("/")
    if path and (any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path or "\\" in path):
        raise ValueError(f"has a path that is not one within the repository; give {form}")
    return HubReference(kind, "/".join(names), revision, path)


def _revision_and_path(tail: str) -> tuple[str, str]:
    if (special := _SPECIAL_REVISION.match(tail)) is not None:
        return special[0], tail[special.end() :].removeprefix("/")
    revision, _, path = tail.partition("/")
    # A branch whose name has slashes is written with %2F, as huggingface_hub writes it.
    return revision.replace("%2F", "/").replace("%2f", "/"), path
