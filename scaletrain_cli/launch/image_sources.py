"""Read the packages of an image for training pods: from the user's lock file or requirements, or our constraints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scaletrain_cli.errors import Place, Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.secret_text import SECRET_FORM

Kind = Literal["uv.lock", "requirements", "pyproject", "constraints"]
# The files that are looked for in a project folder, the most exact first.
_LOOKED_FOR: tuple[tuple[str, Kind], ...] = (
    ("uv.lock", "uv.lock"),
    ("requirements.txt", "requirements"),
    ("pyproject.toml", "pyproject"),
)
_UV_PACKAGE = re.compile(r'^\[\[package\]\]\nname = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)
_UV_NAME = re.compile(r'^name = "([^"]+)"', re.MULTILINE)
_UV_ROOT = re.compile(r'^source = \{ (?:virtual|editable|directory) = "\." \}', re.MULTILINE)
_UV_DEPENDENCIES = re.compile(r"^dependencies = \[(.*?)^\]", re.MULTILINE | re.DOTALL)
_UV_DEPENDENCY = re.compile(r'\{ name = "([^"]+)"')
_PROJECT = re.compile(r"^\[project\][^\n]*\n(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_STRING = r""""[^"\n]*"|'[^'\n]*'"""
_DEPENDENCIES = re.compile(rf"^dependencies\s*=\s*\[((?:[\s,]|{_STRING}|#[^\n]*)*)\]", re.MULTILINE)
_NAMED = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)
_PINNED = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;,#]+)", re.MULTILINE)
_INCLUDED = re.compile(r"^\s*(?:(-r|--requirement)|-c|--constraint)[ =]\s*(\S+)", re.MULTILINE)
_LOCAL = re.compile(r"^\s*(?:(?:-e|--editable)[ =]\s*\S*|(?:\.{1,2}|/|file:)\S*)", re.MULTILINE)
# Packages of a torch wheel whose version is that of CUDA, in CUDA 13 and before.
_CUDA_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
_OWN = "scaletrain"


@dataclass(frozen=True)
class Source:
    """The files to install from. ``folder``: the build context; ``files``: paths in it, the first one is the source.

    ``packages``: the pinned versions by name, as far as the files name them. ``installs_scaletrain``: whether the
    build installs this package from the files; a constraint, an extra or a dependency group alone does not.
    """

    kind: Kind
    folder: Path
    files: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    installs_scaletrain: bool = False

    @property
    def cuda(self) -> str | None:
        """Return the CUDA version that torch is built for, such as ``12.8``; None if the files do not say it."""
        found = next((self.packages[name] for name in _CUDA_PACKAGES if name in self.packages), None)
        return None if found is None else ".".join(found.split(".")[:2])


def find_source(path: Path) -> Source:
    """Return the source for a project folder, or for a lock file, requirements or pyproject.toml.

    A folder without any of them gives ScaleTrain's own constraints. Raises UsageError for a file that does not exist,
    cannot be used in an image, or contains a secret.
    """
    if path.is_dir():
        found = next(((path / name, kind) for name, kind in _LOOKED_FOR if (path / name).is_file()), None)
        if found is None:
            return Source("constraints", path)
        file, kind = found
    elif path.is_file():
        file, kind = path, _kind_of(path)
    else:
        raise UsageError(Reason("container.no-source", {"path": str(path)}))
    source = _read(file, kind)
    problems = tuple(problem for name in source.files for problem in _problems(source.folder / name, kind))
    if problems:
        raise UsageError(Reason("container.unusable-source", {"path": str(file)}), problems)
    return source


def _kind_of(path: Path) -> Kind:
    if path.name == "uv.lock":
        return "uv.lock"
    if path.suffix == ".toml":
        return "pyproject"
    if path.suffix in (".txt", ".in"):
        return "requirements"
    raise UsageError(Reason("container.unknown-source", {"path": str(path)}))


def _read(file: Path, kind: Kind) -> Source:
    folder = file.parent
    if kind == "uv.lock":
        text = _text(file)
        if not (folder / "pyproject.toml").is_file():
            raise UsageError(Reason("container.lock-without-project", {"path": str(file)}))
        packages = dict(_UV_PACKAGE.findall(text))
        installed = _installed_by_lock(text, _project_dependencies(_text(folder / "pyproject.toml")))
        return Source(kind, folder, ("uv.lock", "pyproject.toml"), packages, _OWN in installed)
    if kind == "pyproject":
        return Source(kind, folder, (file.name,), {}, _OWN in _project_dependencies(_text(file)))
    found = tuple(_with_included(file.name, folder))
    texts = {name: _text(folder / name) for name, _ in found}
    packages = {_name(name): version for text in texts.values() for name, version in _PINNED.findall(text)}
    named = {_name(name) for file_name, installs in found if installs for name in _NAMED.findall(texts[file_name])}
    return Source(kind, folder, tuple(texts), packages, _OWN in named)


def _project_dependencies(text: str) -> set[str]:
    """Return the names in ``[project].dependencies`` of a pyproject.toml."""
    project = _PROJECT.search(text)
    found = _DEPENDENCIES.search(project[1]) if project is not None else None
    if found is None:
        return set()
    strings = re.findall(rf"#[^\n]*|({_STRING})", found[1])
    return {_name(match[1]) for string in strings if (match := _NAMED.match(string[1:-1]))}


def _installed_by_lock(text: str, requested: Collection[str]) -> set[str]:
    """Return the packages that ``uv sync --no-dev`` installs from a uv.lock for these, and for the project itself."""
    needs: dict[str, set[str]] = {}
    left = set(requested)
    for block in text.split("[[package]]")[1:]:
        name, listed = _UV_NAME.search(block), _UV_DEPENDENCIES.search(block)
        found = set(_UV_DEPENDENCY.findall(listed[1])) if listed is not None else set()
        if _UV_ROOT.search(block):
            left |= found
        elif name is not None:
            needs.setdefault(name[1], set()).update(found)
    installed: set[str] = set()
    while left:
        installed |= left
        left = set().union(*(needs.get(name, set()) for name in left)) - installed
    return installed


def _name(given: str) -> str:
    """Return the name of a package as indexes write it."""
    return re.sub(r"[-_.]+", "-", given).lower()


def _with_included(name: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield a file of requirements and those that it includes, relative to the folder, and whether it installs them.

    A constraints file, and what it includes, installs nothing. A file that is included in both ways comes twice.
    """
    left, seen = [(name, True)], set()
    while left:
        each = left.pop(0)
        if each in seen:
            continue
        seen.add(each)
        yield each
        path, installs = each
        beside = Path(path).parent
        included = _INCLUDED.findall(_text(folder / path))
        left += [(str(beside / other), installs and bool(requirement)) for requirement, other in included]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(Reason("container.unreadable", {"path": str(path), "said": said})) from error


def _problems(path: Path, kind: Kind) -> Iterator[Problem]:
    """Yield what a file has that an image must not have, or cannot install."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        where = Place(str(path), number)
        if SECRET_FORM.search(line):
            yield Problem.because(where, "", Reason("container.secret"))
        if kind == "requirements" and _LOCAL.match(line):
            yield Problem.because(where, "", Reason("container.local-requirement", {"line": line.strip()}))
        if kind == "requirements" and (match := _INCLUDED.match(line)) and ".." in Path(match[2]).parts:
            yield Problem.because(where, "", Reason("container.outside-context", {"file": match[2]}))
