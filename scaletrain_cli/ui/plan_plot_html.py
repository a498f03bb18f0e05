"""The page of a plan: the pictures, the numbers behind them, and what the terminal says. One file, no scripts."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rich.console import Console

from scaletrain_cli.plan.advice.answer import Answer
from scaletrain_cli.plan.advice.pictures import Pictures
from scaletrain_cli.ui.plan_answer import show_answer
from scaletrain_cli.ui.plan_memory_view import PARTS
from scaletrain_cli.ui.units import bytes_text, count_text, percent_text, seconds_text, whole_text

_WIDTH = 110  # of the terminal's text, in characters
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 0 0 1.5rem; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 13px; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(found: Answer, pictures: Pictures, svg: str) -> str:
    """A whole HTML document around the picture."""
    picture = svg[svg.index("<svg") :]
    body = [picture, *_memory(found), *_scaling(found, pictures), "<h2>Plan</h2>", f"<pre>{escape(_text(found))}</pre>"]
    return _PAGE.format(title=escape(f"{found.spec.name}: plan"), body="\n".join(body))


def _memory(found: Answer) -> Iterator[str]:
    memory = found.plan.memory
    named = len(memory.by_stage) > 1
    rows = [
        [
            f"stage {index}" if named else "rank",
            *(bytes_text(getattr(stage, part)) for part in PARTS),
            bytes_text(stage.peak),
            percent_text(stage.peak / memory.capacity),
        ]
        for index, stage in enumerate(memory.by_stage)
    ]
    yield f"<h2>Memory of one rank, of {bytes_text(memory.capacity)}</h2>"
    yield _table(["", *PARTS.values(), "together", "of the device"], rows)


def _scaling(found: Answer, pictures: Pictures) -> Iterator[str]:
    if not pictures.scaling:
        return
    yield "<h2>Scaling, same global batch</h2>"
    yield _table(
        ["ranks", "step", f"{found.spec.unit} per second", "efficiency"],
        (
            [
                whole_text(point.gpus),
                seconds_text(point.step_seconds),
                count_text(point.tokens_per_second),
                percent_text(point.efficiency),
            ]
            for point in pictures.scaling
        ),
    )


def _text(found: Answer) -> str:
    """What the terminal shows, without colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=stream, width=_WIDTH, highlight=False, markup=False, emoji=False)
    show_answer(found, everything=True, console=console)
    stream.flush()
    stream.seek(0)
    return stream.read()


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
