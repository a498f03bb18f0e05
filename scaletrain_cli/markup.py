"""HTML pages without outside references, and their pieces: escaped text, tables, bars, numbers with units."""

import base64
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from scaletrain_cli.text import bytes_text, count_text, dollars_text, percent_text, seconds_text, visible, whole_text

_LONGEST = 2000
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'{script_policy}" />
<meta name="generator" content="ScaleTrain" />
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def document(title: str, body: Iterable[str], script: str = "") -> str:
    """Return an HTML document of parts of HTML, light and dark, also on paper. It may run no script but ``script``."""
    parts, script_policy = list(body), ""
    if script:
        parts.append(f"<script>{script}</script>")
        script_policy = f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    style = files("scaletrain_cli").joinpath("page.css").read_text(encoding="utf-8")
    return _PAGE.format(script_policy=script_policy, title=safe(title), style=style, body="\n".join(parts))


def safe(text: object) -> str:
    """Return text of users, programs and files for HTML, with control characters escaped, cut to 2,000 characters."""
    shown = str(text)
    return escape(visible(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."))


def prose(text: object) -> str:
    """Return a sentence for HTML; what is between backquotes is code."""
    parts = safe(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def value_text(value: Any, unit: str) -> str:
    """Return a value with its unit: bytes, seconds, usd, share, steps, per_second, hertz, ... or none."""
    if isinstance(value, str):  # as "nan" is recorded
        return value
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "bytes":
        return bytes_text(value)
    if unit == "seconds":
        return seconds_text(max(0.0, value))
    if unit == "usd":
        return dollars_text(value)
    if unit == "share":
        return percent_text(max(0.0, value))
    if unit == "steps":
        return whole_text(round(value))
    if unit == "per_second":
        return f"{count_text(value)}/s"
    if unit == "bytes_per_second":
        return f"{bytes_text(value)}/s"
    if unit in _SUFFIXES:
        factor, suffix = _SUFFIXES[unit]
        return f"{value / factor:,.0f} {suffix}"
    return f"{value:.4g}"


_SUFFIXES = {"hertz": (1e6, "MHz"), "celsius": (1.0, "°C"), "watts": (1.0, "W")}


def time_text(seconds: Any) -> str:
    """Return a time in UTC to the second; empty for none."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < 4e9:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], kinds: str, caption: str = "") -> str:
    """Return a table of cells of HTML. ``kinds``, by column: l text, t text in one line, n number, b bar.

    A row of one cell belongs to the row above it and has all columns.
    """
    classes = {"l": "", "t": ' class="t"', "n": ' class="n"', "b": ' class="bar"'}
    head = "".join(
        f'<th scope="col"{classes[kind]}>{safe(title)}</th>' for title, kind in zip(titles, kinds, strict=True)
    )
    stacks = "t" in kinds and "b" not in kinds  # on a narrow screen each row is a paragraph
    starts = [
        f"<td{classes[kind]}" + (f' data-label="{safe(title)}"' if stacks and title and kind != "l" else "")
        for title, kind in zip(titles, kinds, strict=True)
    ]
    body = "\n".join(
        f"<tr>{''.join(f'{start}>{cell}</td>' for cell, start in zip(row, starts, strict=True))}</tr>"
        if len(row) > 1
        else f'<tr class="more"><td colspan="{len(titles)}">{row[0]}</td></tr>'
        for row in rows
    )
    named = f"<caption>{safe(caption)}</caption>" if caption else ""
    kind = "wide stack" if stacks else "wide"
    return f'<div class="{kind}"><table>{named}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def stacked_bar(parts: Iterable[tuple[str, float, str]], name: str) -> str:
    """Return one bar of (CSS class, share, text) parts that add up to at most 1."""
    filled = "".join(
        f'<i class="{kind}" style="width:{100 * share:.3f}%" title="{safe(text)}"></i>'
        for kind, share, text in parts
        if share > 0
    )
    return f'<div class="track" role="img" aria-label="{safe(name)}">{filled}</div>'


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """Return a part that opens on a click. ``summary`` is text, ``body`` HTML."""
    return f"<details{' open' if is_open else ''}><summary>{safe(summary)}</summary>{body}</details>"


def axis_place(value: float, low: float, high: float, *, logarithmic: bool) -> float:
    """Return the place of a value on an axis between two other values, 0 to 1 within it."""
    if logarithmic:
        return math.log(value / low) / math.log(high / low) if value > 0 else 0.0
    return (value - low) / (high - low)


def tiles(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Return tiles of (label, value, note, CSS class); all are text but the class."""
    cells = (
        f'<div class="tile {kind}"><span>{safe(name)}</span><b>{safe(value)}</b><small>{safe(note)}</small></div>'
        for name, value, note, kind in rows
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def plain_value(value: Any) -> str:
    """Return a value of a spec as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
