"""Draw docs/pictures/flow-light.svg and flow-dark.svg, the way of a run from its spec to its restarts.

``python docs/pictures/flow.py`` writes both; tests/test_pictures.py compares them with this script.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 680, 352
BOX_WIDTH, BOX_HEIGHT = 196, 96
COLUMNS, ROWS = (4, 242, 480), (8, 192)
FONTS = "-apple-system, Segoe UI, Helvetica, Arial, sans-serif"
DASHES = " stroke-dasharray='5 4'"
_KINDS = ("text", "dim", "box", "edge", "way", "back")
COLORS = {
    "light": dict(zip(_KINDS, ("#1f2328", "#59636e", "#f6f8fa", "#8c959f", "#0969da", "#bc4c00"), strict=True)),
    "dark": dict(zip(_KINDS, ("#f0f6fc", "#9198a1", "#151b23", "#656c76", "#4493f8", "#f0883e"), strict=True)),
}
# (column, row, title, lines below it)
BOXES = (
    (0, 0, "run spec", ("one YAML file: model,", "data, training, cluster")),
    (1, 0, "plan", ("layout, memory, time,", "cost: does it fit?")),
    (2, 0, "job", ("sbatch, JobSet,", "or a local process")),
    (2, 1, "node agents", ("one per node: start", "ranks and watch them")),
    (1, 1, "training", ("one rank per GPU,", "DeepSpeed ZeRO")),
    (0, 1, "checkpoint", ("files with hashes,", "complete or not there")),
)


def picture(colors: dict[str, str]) -> str:
    """Return the SVG in these colors."""
    top, bottom = (row + BOX_HEIGHT // 2 for row in ROWS)
    below_job, above_agents, below_all = ROWS[0] + BOX_HEIGHT, ROWS[1], ROWS[1] + BOX_HEIGHT
    between = (below_job + above_agents) // 2
    job_out, job_in = COLUMNS[2] + 128, COLUMNS[2] + 56
    checkpoint, agents = COLUMNS[0] + BOX_WIDTH // 2, COLUMNS[2] + BOX_WIDTH // 2
    arrows = [
        *(("way", f"M{COLUMNS[n] + BOX_WIDTH} {top}H{COLUMNS[n + 1] - 3}") for n in (0, 1)),
        *(("way", f"M{COLUMNS[n + 1]} {bottom}H{COLUMNS[n] + BOX_WIDTH + 3}") for n in (0, 1)),
        ("way", f"M{job_out} {below_job}V{above_agents - 3}"),
        ("back", f"M{job_in} {above_agents}V{below_job + 3}"),
        ("back", f"M{checkpoint} {below_all}v28H{agents}V{below_all + 3}"),
    ]
    notes = (
        (job_in - 10, between - 5, "end", "preempted, or a node is lost:"),
        (job_in - 10, between + 16, "end", "save, requeue, resume"),
        ((checkpoint + agents) // 2, below_all + 50, "middle", "a rank dies: restart on the same nodes, from there"),
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="{FONTS}">',
            "<title>run spec, plan, job, node agents, training, checkpoint; restart and requeue lead back</title>",
            *(
                f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0 8 4 0 8z" fill="{colors[kind]}"/></marker>'
                for kind in ("way", "back")
            ),
            *(
                f'<path d="{path}" fill="none" stroke="{colors[kind]}" stroke-width="2" marker-end="url(#{kind})"'
                f"{DASHES if kind == 'back' else ''}/>"
                for kind, path in arrows
            ),
            *(line for box in BOXES for line in _box(*box, colors)),
            *(_text(x, y, text, colors["back"], 16, anchor) for x, y, anchor, text in notes),
            "</svg>\n",
        ]
    )


def _box(column: int, row: int, title: str, lines: tuple[str, ...], colors: dict[str, str]) -> list[str]:
    x, y = COLUMNS[column], ROWS[row]
    return [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" fill="{colors["box"]}" '
        f'stroke="{colors["edge"]}"/>',
        _text(x + 12, y + 32, title, colors["text"], 20),
        *(_text(x + 12, y + 57 + 21 * n, line, colors["dim"], 16) for n, line in enumerate(lines)),
    ]


def _text(x: int, y: int, text: str, color: str, size: int, anchor: str = "start") -> str:
    weight = "bold" if size > 16 else "normal"
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" fill="{color}" {style}>{escape(text)}</text>'


def main() -> None:
    """Write both files."""
    for name, colors in COLORS.items():
        (FOLDER / f"flow-{name}.svg").write_text(picture(colors), encoding="utf-8")


if __name__ == "__main__":
    main()
