"""Parts of a page of `watch`, the choices made by keys, and lines of a given width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, RenderableType
from rich.text import Text

from scaletrain_cli.launch.view import RunView
from scaletrain_cli.ui.console import plain

Page = Literal["overview", "curves", "ranks", "nodes", "events", "findings", "logs", "help"]
PAGES: tuple[Page, ...] = ("overview", "curves", "ranks", "nodes", "events", "findings", "logs")
LABEL_COLUMNS = 9
# Renders to lines without a terminal: styles stay names, so that the terminal decides on colors.
_MEASURING = Console(width=80, color_system=None, force_terminal=False, _environ={})


@dataclass
class Choices:
    """The choices made by keys. ``halvings``: of the part of the run that curves show, up to now.

    ``order``: of the ranks, a place in ORDERS of pages.py. ``log``: the number of the log, from 0.
    """

    page: Page = "overview"
    scroll: int = 0
    by_time: bool = False
    halvings: int = 0
    order: int = 0
    log: int = 0
    unicode: bool = True


@dataclass(frozen=True)
class Content:
    """Lines of a page: ``head`` stays, ``body`` scrolls. ``from_end``: the last lines are shown first."""

    body: Sequence[Text]
    head: Sequence[Text] = ()
    from_end: bool = False


def cut(text: Text, width: int) -> Text:
    """Return the text on one line of at most ``width`` columns."""
    text = text.copy()
    text.truncate(width, overflow="ellipsis")
    return text


def rows_of(label: str, text: str, width: int, most: int) -> list[Text]:
    """Return a label and a text in at most ``most`` lines; the last one is cut."""
    lines = wrapped(Text(plain(text)), width - LABEL_COLUMNS)
    if len(lines) > most:
        lines = [*lines[: most - 1], Text(" ").join(lines[most - 1 :])]
    heads = [label, *[""] * most]
    return [
        cut(Text.assemble((head.ljust(LABEL_COLUMNS), "dim"), line), width)
        for head, line in zip(heads, lines, strict=False)
    ]


def wrapped(text: Text, width: int, indent: int = 0) -> list[Text]:
    """Return the text in lines of at most ``width`` columns; those after the first are indented."""
    lines = list(text.wrap(_MEASURING, max(10, width - indent), overflow="fold"))
    return [line if number == 0 else Text(" " * indent).append_text(line) for number, line in enumerate(lines)]


def rendered(renderable: RenderableType, width: int) -> list[Text]:
    """Return a rich renderable in lines."""
    rows = _MEASURING.render_lines(renderable, _MEASURING.options.update_width(width), pad=False)
    return [Text.assemble(*((segment.text, segment.style or "") for segment in row)) for row in rows]


def elsewhere_text(view: RunView) -> str:
    """Return what cannot be shown of a run whose directory is on a volume of the cluster."""
    return (
        "The run directory is on a volume of the cluster that this machine does not see: no curves, ranks, nodes, "
        f"events or findings. Run `scaletrain watch {view.run.run_id}` in a pod that mounts it."
    )


def joined(parts: Sequence[str]) -> str:
    """Return the texts that are not empty, separated by semicolons."""
    return "; ".join(part for part in parts if part)
