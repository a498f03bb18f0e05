"""Curves in characters: points in Braille cells (2 x 4 a cell), or one point a cell where Braille cannot be encoded."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a cell
_LABEL_COLUMNS = 8
_LOG_RANGE = 30.0  # the highest value over the lowest, from which the axis is logarithmic
_FEWEST_ROWS = 4
_GROUP, _GROUPS = 5, 100  # points whose median is taken at least, and how many groups there are about
_MARK_CELLS = 4  # between two marks of a line


@dataclass(frozen=True)
class Line:
    """Points of one measure in the order of ``x``; NaN in ``y`` is left out.

    ``mark``: draw this character for each point. ``band_style``: of cells that points touch away from their mean.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: str = ""
    mark: str = ""
    band_style: str = ""


@dataclass(frozen=True)
class Mark:
    """A vertical mark at ``x``; its ``label`` stands on the axis."""

    x: float
    label: str
    style: str = ""


def plot(
    lines: Sequence[Line],
    columns: int,
    rows: int,
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    marks: Sequence[Mark] = (),
    levels: Mapping[str, float] | None = None,
    unicode: bool = True,
    logarithmic: bool | None = None,
) -> list[Text]:
    """Return ``rows`` lines of ``columns`` characters: the curves, axes with figures, and the marks on the x axis.

    ``levels``: horizontal lines by label, such as the planned value. A cell that several lines touch has the style of
    the last one. Values above ``ceiling`` are marked at the top. Without ``logarithmic`` the axis is so if all values
    are positive and spread over a factor of 30.
    """
    known = [[(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)] for line in lines]
    values = [y for points in known for _, y in points] + list((levels or {}).values())
    top = ceiling([y for line, points in zip(lines, known, strict=True) if not line.mark for _, y in points])
    values = [min(value, top) for value in values]
    height, width = rows - 2, columns - _LABEL_COLUMNS - 1
    if not values or height < _FEWEST_ROWS - 2 or width < 8:
        blank = [Text("no values yet".center(columns)[:columns], "dim")] if rows > 0 else []
        return [*(Text("") for _ in range((rows - 1) // 2)), *blank, *(Text("") for _ in range(rows // 2))][:rows]
    is_log = min(values) > 0 and (max(values) / min(values) >= _LOG_RANGE if logarithmic is None else logarithmic)
    scale: Callable[[float], float] = math.log10 if is_log else float
    low, high = _span([scale(value) for value in values])
    xs = [x for points in known for x, _ in points] or [0.0, 1.0]
    left, right = min(xs), max(xs)
    right = right if right > left else left + 1.0
    canvas = _Canvas(width, height, unicode)

    def place(x: float, y: float) -> tuple[int, int]:
        across = round((x - left) / (right - left) * (canvas.across - 1))
        return across, round((high - scale(min(y, top))) / (high - low) * (canvas.down - 1))

    for mark in marks:
        if left <= mark.x <= right:
            canvas.rule(place(mark.x, values[0])[0], mark.style)
    for value in (levels or {}).values():
        canvas.level(place(left, value)[1], "dim")
    for line, points in zip(lines, known, strict=True):
        if line.mark:
            # The last point, and those before it that are far enough from the next one that is kept.
            kept: list[tuple[int, int]] = []
            for point in reversed([place(x, y) for x, y in points]):
                if not kept or kept[-1][0] - point[0] >= (canvas.cell_columns * _MARK_CELLS):
                    kept.append(point)
            for across, down in kept:
                canvas.put(across, down, line.mark, line.style)
        else:
            canvas.curve([place(x, y) for x, y in points], line.style, line.band_style or line.style)
    for points in known:
        for x, y in points:
            if y > top:
                canvas.put(*place(x, y), "▲" if unicode else "^", "bold red")
    drawn = canvas.rows()
    ticks = _ticks(low, high, is_log, height, y_text)
    out = []
    for number, row in enumerate(drawn):
        label = Text(ticks.get(number, "").rjust(_LABEL_COLUMNS)[:_LABEL_COLUMNS], "dim")
        out.append(Text.assemble(label, (("┤" if number in ticks else "│") if unicode else "|", "dim"), row))
    out.append(_axis(width, [(place(mark.x, values[0])[0], mark) for mark in marks if left <= mark.x <= right], canvas))
    return [*out, _x_labels(width, left, right, x_text)]


def ceiling(values: Sequence[float]) -> float:
    """Return the value above which points of a curve are marked instead of drawn; infinity if that is not needed.

    A spike of a few points would leave no height for all others. The curve without spikes is that of the medians of
    groups of neighbors. Room for the noise above it is half of its range, or a third of that of 99 % of the values.
    Points are only left out if all would else have to share less than half of the height.
    """
    if len(values) < 4 * _GROUP:
        return math.inf
    size = max(_GROUP, len(values) // _GROUPS)
    groups = [sorted(values[start : start + size]) for start in range(0, len(values) - _GROUP + 1, size)]
    medians = [group[len(group) // 2] for group in groups]
    low, ordered = min(values), sorted(values)
    likely = ordered[int(0.99 * len(ordered))]
    top = max(max(medians) + 0.5 * (max(medians) - low), likely + (likely - low) / 3)
    return top if ordered[-1] - low > 2 * (top - low) > 0 else math.inf


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, apart from one another."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high


def _ticks(low: float, high: float, is_log: bool, height: int, y_text: Callable[[float], str]) -> dict[int, str]:
    """Return the labels of round values by row: about every third row has one."""
    wanted = max(2, min(6, height // 3))
    labels: dict[int, str] = {}
    for value in _round_values(low, high, wanted, is_log):
        row = round((high - value) / (high - low) * (height - 1))
        if row not in labels:
            labels[row] = y_text(10**value if is_log else value)
    return labels


def _round_values(low: float, high: float, wanted: int, is_log: bool) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten within the span; for logarithms 1, 2 and 5 of each power."""
    if is_log and high - low >= 0.8:
        powers = range(math.floor(low), math.ceil(high) + 1)
        digits = (1,) if high - low >= wanted else (1, 3) if high - low > wanted / 2 else (1, 2, 5)
        return [v for power in powers for digit in digits if low <= (v := power + math.log10(digit)) <= high]
    if is_log:
        return [math.log10(v) for v in _round_values(10**low, 10**high, wanted, False) if v > 0]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= 0.7 * rough)
    first, last = math.ceil(low / unit), math.floor(high / unit)
    return [number * unit for number in range(first, last + 1)]


def _axis(width: int, marks: Sequence[tuple[int, Mark]], canvas: "_Canvas") -> Text:
    axis = Text(" " * _LABEL_COLUMNS, "dim")
    cells: list[tuple[str, str]] = [("─" if canvas.unicode else "-", "dim")] * width
    free = 0
    for across, mark in sorted(marks, key=lambda placed: placed[0]):
        cell = across // canvas.cell_columns
        if cell < free or cell + len(mark.label) > width:
            continue
        for offset, character in enumerate(mark.label):
            cells[cell + offset] = (character, mark.style or "bold")
        free = cell + len(mark.label) + 1
    axis.append("└" if canvas.unicode else "+", "dim")
    for character, style in cells:
        axis.append(character, style)
    return axis


def _x_labels(width: int, left: float, right: float, x_text: Callable[[float], str]) -> Text:
    """Return the values at both ends and in the middle, as far as they fit."""
    first, middle, last = x_text(left), x_text((left + right) / 2), x_text(right)
    row = list(" " * (_LABEL_COLUMNS + 1 + width))
    row[_LABEL_COLUMNS + 1 : _LABEL_COLUMNS + 1 + len(first)] = first
    row[len(row) - len(last) :] = last
    at = _LABEL_COLUMNS + 1 + (width - len(middle)) // 2
    if at > _LABEL_COLUMNS + 2 + len(first) and at + len(middle) + 1 < len(row) - len(last):
        row[at : at + len(middle)] = middle
    return Text("".join(row)[: _LABEL_COLUMNS + 1 + width], "dim")


class _Canvas:
    """Cells of characters; coordinates are points, from the upper left."""

    def __init__(self, columns: int, rows: int, unicode: bool) -> None:
        self.unicode = unicode
        self.cell_columns, self.cell_rows = (2, 4) if unicode else (1, 1)
        self.across, self.down = columns * self.cell_columns, rows * self.cell_rows
        self._columns = columns
        self._dots = [[0] * columns for _ in range(rows)]
        self._characters: list[list[str]] = [[""] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]

    def dot(self, across: int, down: int, style: str) -> None:
        row, column = down // self.cell_rows, across // self.cell_columns
        self._dots[row][column] |= _DOTS[down % 4][across % 2] if self.unicode else 1
        self._styles[row][column] = style

    def put(self, across: int, down: int, character: str, style: str) -> None:
        """Place a character of its own in the cell."""
        row, column = down // self.cell_rows, across // self.cell_columns
        self._characters[row][column], self._styles[row][column] = character, style

    def rule(self, across: int, style: str) -> None:
        """Draw a vertical line that curves may cover."""
        for row in self._characters:
            row[across // self.cell_columns] = "┊" if self.unicode else ":"
        for styles in self._styles:
            styles[across // self.cell_columns] = style or "dim"

    def level(self, down: int, style: str) -> None:
        """Draw a horizontal line that curves may cover."""
        row = down // self.cell_rows
        self._characters[row] = ["┈" if self.unicode else "."] * self._columns
        self._styles[row] = [style] * self._columns

    def curve(self, points: Sequence[tuple[int, int]], style: str, band_style: str) -> None:
        """Draw from the lowest to the highest point of each column, and straight lines over columns without points.

        The cells at the mean of each column have ``style``, the others ``band_style``.
        """
        columns: dict[int, list[int]] = {}
        for across, down in points:
            columns.setdefault(across, []).append(down)
        before: tuple[int, int] | None = None
        for across in sorted(columns):
            downs = columns[across]
            if before is not None:
                self._join(before, (across, downs[0]), style if across - before[0] > 1 else band_style)
            for down in range(min(downs), max(downs) + 1):
                self._cover(across, down, band_style)
            before = (across, downs[-1])
        for across, downs in columns.items():
            row = round(sum(downs) / len(downs)) // self.cell_rows
            self._styles[row][across // self.cell_columns] = style

    def _join(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
        for number in range(1, length):
            share = number / length
            across = start[0] + round((end[0] - start[0]) * share)
            self._cover(across, start[1] + round((end[1] - start[1]) * share), style)

    def _cover(self, across: int, down: int, style: str) -> None:
        row, column = down // self.cell_rows, across // self.cell_columns
        self._characters[row][column] = ""
        self.dot(across, down, style)

    def rows(self) -> list[Text]:
        out = []
        for dots, characters, styles in zip(self._dots, self._characters, self._styles, strict=True):
            text = Text()
            for bits, character, style in zip(dots, characters, styles, strict=True):
                drawn = chr(_BRAILLE + bits) if self.unicode else "*"
                text.append(character or (drawn if bits else " "), style or None)
            out.append(text)
        return out
