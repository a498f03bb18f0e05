"""The Containerfile of training pods, and the commands that build and push it.

k8s/Containerfile is the one of this project itself: render() with ScaletrainSource.CONTEXT, which a test compares.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from scaletrain_cli.errors import Place, Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.secret_text import SECRET_FORM

PYTHON_IMAGE = "python:3.11-slim-bookworm"
# The images of NVIDIA with a compiler, by the CUDA version; Ubuntu 24.04 has Python 3.12, Ubuntu 22.04 Python 3.10.
CUDA_IMAGES = {
    "12.4": "nvidia/cuda:12.4.1-devel-ubuntu22.04",
    "12.6": "nvidia/cuda:12.6.3-devel-ubuntu24.04",
    "12.8": "nvidia/cuda:12.8.1-devel-ubuntu24.04",
    "12.9": "nvidia/cuda:12.9.1-devel-ubuntu24.04",
    "13.0": "nvidia/cuda:13.0.1-devel-ubuntu24.04",
}
TOOLS = ("docker", "podman", "buildah")
CONTEXT_NAME = "scaletrain"  # of the additional build context with this project
# What the image of this project is built from, in the checkout.
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")
PROJECT_FOLDERS = ("recipes", "slurm", "k8s", "grafana", "scaletrain_cli")
_VENV = "/opt/venv"


class ScaletrainSource(Enum):
    """The place from which the build installs this package."""

    CONTEXT = "context"  # the build context is the checkout
    CHECKOUT = "checkout"  # the checkout is an additional build context
    INDEX = "index"  # a package index


@dataclass(frozen=True)
class Image:
    """An image to build on ``base``. ``uid``: the user that it runs as, not root; ``version``: that of this package."""

    source: "Source"
    scaletrain: ScaletrainSource
    base: str = PYTHON_IMAGE
    uid: int = 1000
    version: str = ""
    tag: str = "REGISTRY/scaletrain:TAG"

    @property
    def has_python(self) -> bool:
        """Return whether the base image is one of Python's own."""
        return self.base.startswith("python:")


def render(image: Image) -> str:
    """Return the Containerfile. It contains no secret, and no file of the build context but those that it names."""
    return "\n".join([_head(image), _system(image), *_packages(image), _user(image)])


def _head(image: Image) -> str:
    compiler = "Its CUDA compiler\n# builds DeepSpeed operators on first use (CPU offload)."
    if image.has_python:
        compiler = "There is no CUDA compiler in it, so\n# DeepSpeed operators that are compiled on first use (CPU "
        compiler += "offload) are not available."
    begin = "# The image of a training pod. Build it from the root of the repository:"
    if image.scaletrain is not ScaletrainSource.CONTEXT:
        begin = "# The image of a training pod. Build it from the folder of this file:"
    file = "k8s/Containerfile" if image.scaletrain is ScaletrainSource.CONTEXT else "Containerfile"
    command = build_command("docker", image, file, Path())
    return f"""\
{begin}
#   {command}
# The CUDA libraries and NCCL come with torch's wheel, the driver from the node. {compiler}
FROM {image.base}
"""


def _system(image: Image) -> str:
    names = ["gcc", "ibverbs-providers", "libc6-dev", "libibverbs1", "librdmacm1"]
    names += [] if image.has_python else ["python3", "python3-dev", "python3-venv"]
    packages = " ".join([*names, "tini"])
    environment = "" if image.has_python else "ENV DEBIAN_FRONTEND=noninteractive\n"
    return f"""\
# tini: passes SIGTERM on and reaps what a killed rank leaves behind, as PID 1 must. The ibverbs libraries let NCCL use
# InfiniBand and RoCE, without which it falls back to TCP, and only its log shows it. gcc: torch.compile.
{environment}RUN apt-get update \\
    && apt-get install -y --no-install-recommends \\
        {packages} \\
    && rm -rf /var/lib/apt/lists/*
"""


def _packages(image: Image) -> Iterator[str]:
    if image.source.kind == "constraints" and image.has_python:
        yield from _own_constraints(image)
        return
    python = "python" if image.has_python else "python3"
    yield f"""\
# uv in an environment of its own; the packages of the run are in {_VENV}, whose python is the first one in the path.
RUN {python} -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv && /opt/uv/bin/uv venv {_VENV}
ENV PATH={_VENV}/bin:/opt/uv/bin:$PATH VIRTUAL_ENV={_VENV} UV_PROJECT_ENVIRONMENT={_VENV} UV_NO_CACHE=1
WORKDIR /opt/project
"""
    if image.source.kind != "constraints":
        yield _own_packages(image.source)
    if not image.source.installs_scaletrain:
        yield _scaletrain(image)


def _own_packages(source: "Source") -> str:
    """Return the lines that install the user's packages. Only these files are copied: each run brings its code."""
    first = source.files[0]
    install = {
        "uv.lock": "uv sync --frozen --no-dev --no-install-project",
        "requirements": f"uv pip install -r {shlex.quote(first)}",
        "pyproject": f"uv pip install -r {shlex.quote(first)}",
    }[source.kind]
    copies = [
        f"COPY {' '.join(name for name in source.files if str(Path(name).parent) == folder)} {folder}/"
        for folder in sorted({str(Path(name).parent) for name in source.files})
    ]
    what = "The packages of the project" if source.kind != "pyproject" else "The packages of the project, not pinned"
    lines = "\n".join(copies)
    return f"""\
# {what}. Its code is not in the image: each run brings a snapshot of it.
{lines}
RUN {install}
"""


def _scaletrain(image: Image) -> str:
    """Return the lines that install this package, without a change of the installed versions."""
    freeze = "uv pip freeze > /tmp/installed.txt"
    if image.scaletrain is ScaletrainSource.INDEX:
        return f"""\
# ScaleTrain, with the installed versions.
RUN {freeze} \\
    && uv pip install -c /tmp/installed.txt 'scaletrain[train,wandb]=={image.version}'
"""
    if image.source.kind == "constraints":
        versions, install = "the versions that it is tested with", "uv pip install -c constraints.txt"
    else:
        versions, install = "the installed versions", f"{freeze} \\\n    && uv pip install -c /tmp/installed.txt"
    return f"""\
# ScaleTrain, with {versions}.
WORKDIR /opt/scaletrain
{_copies(image)}
RUN {install} '.[train,wandb]'
"""


def _copies(image: Image) -> str:
    origin = "" if image.scaletrain is ScaletrainSource.CONTEXT else f"--from={CONTEXT_NAME} "
    files = f"COPY {origin}{' '.join(PROJECT_FILES)} ./"
    return "\n".join([files, *(f"COPY {origin}{folder} {folder}" for folder in PROJECT_FOLDERS)])


def _own_constraints(image: Image) -> Iterator[str]:
    """Yield the lines that install this package with its own constraints into the image's Python."""
    if image.scaletrain is ScaletrainSource.INDEX:
        yield f"""\
# ScaleTrain with the newest packages that it allows; without a checkout there is no list of tested versions.
RUN python -m pip install --no-cache-dir 'scaletrain[train,wandb]=={image.version}'
"""
        return
    origin = "" if image.scaletrain is ScaletrainSource.CONTEXT else f"--from={CONTEXT_NAME} "
    yield f"""\
# torch in a layer of its own: it is by far the largest, and changes least. The build machine need not have a GPU.
WORKDIR /opt/scaletrain
COPY {origin}.ci/install_torch.sh .ci/
RUN python -m pip install --no-cache-dir 'pip>=24' \\
    && PIP_NO_CACHE_DIR=1 .ci/install_torch.sh python cuda
"""
    yield f"""\
{_copies(image)}
RUN python -m pip install --no-cache-dir -c constraints.txt '.[train,wandb]'
"""


def _user(image: Image) -> str:
    shared = "" if image.has_python else "--non-unique "
    return f"""\
# Not root, as the namespace requires. Compilers write their caches to the home folder.
RUN useradd {shared}--uid {image.uid} --create-home trainer
USER {image.uid}
WORKDIR /home/trainer
ENV PYTHONUNBUFFERED=1

ENTRYPOINT ["tini", "--", "scaletrain"]
CMD ["--help"]
"""


def build_command(tool: str, image: Image, file: str, checkout: Path | None) -> str:
    """Return the command that builds the image with one tool, run in the folder of the build context."""
    context = []
    if image.scaletrain is ScaletrainSource.CHECKOUT and not image.source.installs_scaletrain:
        place = "SCALETRAIN_CHECKOUT" if checkout is None or checkout == Path() else str(checkout)
        context = ["--build-context", f"{CONTEXT_NAME}={place}"]
    return shlex.join([tool, "build", "-f", file, *context, "-t", image.tag, "."])


def notes(image: Image) -> Iterator[Reason]:
    """Yield what to know about the image before it is built."""
    source = image.source
    if source.kind == "constraints":
        yield Reason("container.note-own-constraints", {"folder": str(source.folder)})
    if source.kind == "pyproject":
        yield Reason("container.note-not-pinned", {"file": source.files[0]})
    if image.scaletrain is ScaletrainSource.INDEX and not source.installs_scaletrain:
        yield Reason("container.note-index", {"version": image.version})
    if source.cuda is not None:
        yield Reason("container.note-cuda", {"file": source.files[0], "cuda": source.cuda})
    if image.tag.startswith("REGISTRY/"):
        yield Reason("container.note-registry")


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
        version = next((self.packages[name] for name in _CUDA_PACKAGES if name in self.packages), None)
        return None if version is None else ".".join(version.split(".")[:2])


def find_source(path: Path) -> Source:
    """Return the source for a project folder, or for a lock file, requirements or pyproject.toml.

    A folder without any of them gives ScaleTrain's own constraints. Raises UsageError for a file that does not exist,
    cannot be used in an image, or contains a secret.
    """
    if path.is_dir():
        chosen = next(((path / name, kind) for name, kind in _LOOKED_FOR if (path / name).is_file()), None)
        if chosen is None:
            return Source("constraints", path)
        file, kind = chosen
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
    files = tuple(_with_included(file.name, folder))
    texts = {name: _text(folder / name) for name, _ in files}
    packages = {_name(name): version for text in texts.values() for name, version in _PINNED.findall(text)}
    named = {_name(name) for file_name, installs in files if installs for name in _NAMED.findall(texts[file_name])}
    return Source(kind, folder, tuple(texts), packages, _OWN in named)


def _project_dependencies(text: str) -> set[str]:
    """Return the names in ``[project].dependencies`` of a pyproject.toml."""
    project = _PROJECT.search(text)
    listed = _DEPENDENCIES.search(project[1]) if project is not None else None
    if listed is None:
        return set()
    strings = re.findall(rf"#[^\n]*|({_STRING})", listed[1])
    return {_name(match[1]) for string in strings if (match := _NAMED.match(string[1:-1]))}


def _installed_by_lock(text: str, requested: Collection[str]) -> set[str]:
    """Return the packages that ``uv sync --no-dev`` installs from a uv.lock for these, and for the project itself."""
    needs: dict[str, set[str]] = {}
    left = set(requested)
    for block in text.split("[[package]]")[1:]:
        name, listed = _UV_NAME.search(block), _UV_DEPENDENCIES.search(block)
        dependencies = set(_UV_DEPENDENCY.findall(listed[1])) if listed is not None else set()
        if _UV_ROOT.search(block):
            left |= dependencies
        elif name is not None:
            needs.setdefault(name[1], set()).update(dependencies)
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
        entry = left.pop(0)
        if entry in seen:
            continue
        seen.add(entry)
        yield entry
        path, installs = entry
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
