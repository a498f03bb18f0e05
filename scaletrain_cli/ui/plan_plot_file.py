"""Where a picture of a plan goes: checked before the work, written at once or not at all."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.errors import MissingPackageError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.safe_files import create_file, replace_file

if TYPE_CHECKING:
    from scaletrain_cli.plan.advice.answer import Answer
    from scaletrain_cli.plan.advice.pictures import Pictures

_KINDS = (".html", ".svg", ".png")
_DOTS_PER_INCH = 144


def check_plot_file(path: Path) -> None:
    """Raise UsageError if the picture cannot be drawn or written there; leaves nothing behind."""
    if path == Path():  # what an empty word becomes
        raise UsageError("--plot needs the name of a file that ends in .html, .svg or .png.")
    if path.suffix.lower() not in _KINDS:
        raise UsageError(f"--plot {path}: the name must end in .html, .svg or .png.")
    if path.is_dir():
        raise UsageError(f"--plot {path}: that is a folder. Give the name of a file.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}.")
    try:
        probe = _beside(path)
        create_file(probe, b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--plot {path}: it cannot be written there: {error.strerror or error}.") from error
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("--plot needs matplotlib.", install_command("plot"))


def write_plot(path: Path, found: Answer, pictures: Pictures) -> None:
    """Draw the plan in the format of the file's ending. An existing picture is replaced. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks of its font cache on stderr
    from scaletrain_cli.ui.plan_plot import draw, image

    kind = path.suffix.lower()[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks, which then are boxes
        figure = draw(found.spec, found.plan, pictures)
        data = image(figure, "svg" if kind == "html" else kind, _DOTS_PER_INCH)
    if kind == "html":
        from scaletrain_cli.ui.plan_plot_html import page

        data = page(found, pictures, data.decode()).encode()
    replace_file(path, data, public=True)


def _beside(path: Path) -> Path:
    """Return a name that nobody can guess in the same folder."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")
