"""The tables of ``make parity``: one line per row, and what is said above them on the page."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = 0.05  # run beside plan


@dataclass(frozen=True)
class Table:
    """``columns``: their names up to that of the seconds. ``about``: the text for numbers of rows and of wrong ones.

    ``figures``: the cells of a row after its name and ranks, and whether they are within the limits.
    """

    columns: tuple[str, ...]
    rows: list[Any]
    name: Callable[[Any], str]
    figures: Callable[[Any], tuple[list[str], bool]]
    about: Callable[[int, int], str]

    @property
    def header(self) -> str:
        return f"| {' | '.join(self.columns)} | seconds | |\n{'|-' * (len(self.columns) + 2)}|"

    def measured(self, rows: list[Any]) -> Iterator[tuple[str, bool]]:
        """Yield the line of each row, and whether it is within its limits."""
        for row in rows:
            started = time.monotonic()
            try:
                cells, right = self.figures(row)
            except Exception as error:  # the other rows are worth their figures
                print(error)
                cells, right = [type(error).__name__, *[""] * (len(self.columns) - 3)], False
            cells = [self.name(row), str(row.ranks), *cells, f"{time.monotonic() - started:.1f}"]
            yield f"| {' | '.join(cells)} | {'' if right else 'WRONG'} |", right

    def page(self, lines: list[tuple[str, bool]]) -> str:
        wrong = sum(not right for _, right in lines)
        return "\n".join([self.about(len(lines), wrong), self.header, *(text for text, _ in lines)])
