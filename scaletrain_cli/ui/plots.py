"""Plots that matplotlib draws into files: the check before a command begins, and the image, reproducibly."""

import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import MissingPackageError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.text import either

_DOTS_PER_INCH = 144
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "scaletrain",  # makes the output reproducible
}


def check_plot_file(path: Path, kinds: Sequence[str]) -> None:
    """Raise UsageError if the plot cannot be drawn or written there. Leaves no file behind."""
    if path == Path():  # an empty argument becomes this
        raise UsageError(f"--plot needs the name of a file that ends in {either(kinds)}.")
    if path.suffix.lower() not in kinds:
        raise UsageError(f"--plot {path}: the name must end in {either(kinds)}.")
    if path.is_dir():
        raise UsageError(f"--plot {path}: is a folder. Give the name of a file.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}.")
    try:
        probe = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        create_file(probe, b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror or error}.") from error
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("--plot needs matplotlib.", install_command("plot"))


def image(draw: Callable[[], Any], kind: str) -> bytes:
    """Return the matplotlib figure that ``draw`` makes as ``svg``, ``png`` or ``pdf``."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs messages about its font cache
    import matplotlib

    stream = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        warnings.simplefilter("ignore")  # about characters missing in the font
        draw().savefig(stream, format=kind, dpi=_DOTS_PER_INCH, metadata=dates.get(kind))
    return stream.getvalue()
