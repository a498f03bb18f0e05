"""The Containerfile of training pods, and the commands that build and push it.

k8s/Containerfile is the one of this project itself: render() with ScaletrainSource.CONTEXT, which a test compares.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scaletrain_cli.launch.image_sources import Source
from scaletrain_cli.reasons import Reason

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

    source: Source
    scaletrain: ScaletrainSource
    base: str = PYTHON_IMAGE
    uid: int = 1000
    version: str = ""
    tag: str = "REGISTRY/scaletrain:0.1.0"

    @property
    def has_python(self) -> bool:
        """Return whether the base image is one of Python's own."""
        return self.base.startswith("python:")

    @property
    def uses_uv(self) -> bool:
        """Return whether the user's files are installed with uv, into a virtual environment."""
        return self.source.kind != "constraints" or not self.has_python


def render(image: Image) -> str:
    """Return the Containerfile. It contains no secret, and no file of the build context but those that it names."""
    parts = [_head(image), _system(image), *_packages(image), _user(image)]
    return "\n".join(parts)


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
    if not image.uses_uv:
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


def _own_packages(source: Source) -> str:
    """Return the lines that install the user's packages. Only these files are copied: each run brings its code."""
    first = source.files[0]
    install = {
        "uv.lock": "uv sync --frozen --no-dev --no-install-project",
        "requirements": f"uv pip install -r {shlex.quote(first)}",
        "pyproject": f"uv pip install -r {shlex.quote(first)}",
    }[source.kind]
    folders = sorted({str(Path(name).parent) for name in source.files})
    copies = [
        f"COPY {' '.join(name for name in source.files if str(Path(name).parent) == folder)} {folder}/"
        for folder in folders
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


def push_command(tool: str, image: Image) -> str:
    """Return the command that pushes the image."""
    return shlex.join([tool, "push", image.tag])


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


def tools_for(installed: Sequence[str]) -> tuple[str, ...]:
    """Return the tools to show commands for: the installed ones, else all of them."""
    return tuple(tool for tool in TOOLS if tool in installed) or TOOLS
