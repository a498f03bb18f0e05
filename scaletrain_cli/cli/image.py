"""`scaletrain image`: write a Containerfile for training pods, and show how to build and push it."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli import __version__
from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.project_files import checkout
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.ui.console import document, say, suggest
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.image_file import Image, Source

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[PATH]", help="Project folder, uv.lock, requirements.txt or pyproject.toml.", show_default=False
        ),
    ] = Path(),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write (default: Containerfile in that folder), - for stdout.",
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", metavar="NAME", help="Name of the image, with its registry.")
    ] = None,
    cuda: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION|auto",
            help="Base image with the compiler of this CUDA version; auto: that of the locked torch.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Base image: Debian or Ubuntu with Python 3.10 or newer."),
    ] = None,
    uid: Annotated[int, typer.Option(metavar="N", help="User of the pods, as cluster.kubernetes.run_as_user.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Write a Containerfile for the pods of runs, and show the commands that build and push it.

    The packages are those of uv.lock, requirements.txt or pyproject.toml in the folder, in this order; without any of
    them those that ScaleTrain is tested with. ScaleTrain is added where the files do not name it. The code of your
    project is not in the image: each run brings a snapshot of it.
    Never overwrites an existing file, and contains no secret.
    """
    from scaletrain_cli.launch.image_file import TOOLS, build_command, find_source, notes, render

    if uid == 0:
        raise UsageError(Reason("container.root"))
    source = find_source(path)
    image = _image(source, base, cuda, uid, tag)
    text = render(image)
    to_stdout = str(output) == "-"
    target = output or source.folder / "Containerfile"
    if not to_stdout:
        try:
            create_file(target, text, public=True)  # replaces nothing, not even a file that appeared meanwhile
        except FileExistsError as error:
            raise UsageError(Reason("container.exists", {"path": str(target)})) from error
        except OSError as error:
            said = error.strerror or str(error)
            raise UsageError(Reason("container.not-written", {"path": str(target), "said": said})) from error
    # As the build command names it, which runs in the folder of the context.
    full, context = target.resolve(), source.folder.resolve()
    named = full.relative_to(context) if full.is_relative_to(context) else full
    file = "Containerfile" if to_stdout else str(named)
    place = checkout()
    commands = [
        {"tool": tool, "build": build_command(tool, image, file, place), "push": shlex.join([tool, "push", image.tag])}
        for tool in list(filter(shutil.which, TOOLS)) or TOOLS
    ]
    about_image = tuple(notes(image))
    if as_json:
        answer: dict[str, object] = {
            "file": None if to_stdout else str(target),
            "text": text,
            "context": str(source.folder),
        }
        answer |= {"base": image.base, "source": source.kind, "files": list(source.files), "cuda": source.cuda}
        print_json(answer | {"commands": commands, "notes": [note.to_json() for note in about_image]})
    elif to_stdout:
        typer.echo(document(text), nl=False)
    if not to_stdout:
        say(f"wrote {target}")
    for note in about_image:
        say(str(note))
    where = "" if source.folder == Path() else f", in {source.folder}"
    suggest({one[kind]: f"{kind} it with {one['tool']}{where}" for one in commands for kind in ("build", "push")})


def _image(source: Source, base: str | None, cuda: str | None, uid: int, tag: str | None) -> Image:
    """Return the image for the options. Raises UsageError."""
    from scaletrain_cli.launch.image_file import CUDA_IMAGES, PYTHON_IMAGE, Image, ScaletrainSource

    known = list(CUDA_IMAGES)
    if cuda is not None and base is not None:
        raise UsageError(Reason("container.cuda-and-base"))
    if cuda == "auto":
        if source.cuda is None:
            file = source.files[0] if source.files else str(source.folder)
            raise UsageError(Reason("container.cuda-not-found", {"file": file, "known": known}))
        cuda = source.cuda
    if cuda is not None and cuda not in CUDA_IMAGES:
        raise UsageError(Reason("container.unknown-cuda", {"given": cuda, "known": known}))
    place = checkout()
    origin = ScaletrainSource.INDEX if place is None else ScaletrainSource.CHECKOUT
    if place is not None and source.kind in ("constraints", "pyproject") and source.folder.resolve() == place.resolve():
        origin, source = ScaletrainSource.CONTEXT, replace(source, kind="constraints", files=(), packages={})
    slug = re.sub(r"[^a-z0-9]+", "-", source.folder.resolve().name.lower()).strip("-") or "scaletrain"
    chosen = base or (CUDA_IMAGES[cuda] if cuda is not None else PYTHON_IMAGE)
    return Image(source, origin, chosen, uid, __version__, tag or f"REGISTRY/{slug}:{__version__}")
