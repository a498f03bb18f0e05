"""Draw the pictures of the guides from real output: a plan, `watch`, and the report of a small run.

``python docs/pictures/screens.py plan`` draws plan.svg; tests/test_pictures.py compares it with this script. With
``run`` a small model trains on two CPU processes for two to ten minutes and loses a rank on the way: watch.svg,
curves.svg and, where there is a Chromium, report.png are of this run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from scaletrain_cli.api import status
from scaletrain_cli.launch.view import Shown, read_view
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.ui.watch.layout import Choices, Page
from scaletrain_cli.ui.watch.screen import screen_lines

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1]
COLUMNS, CELL_WIDTH, ROW_HEIGHT, MARGIN = 100, 8, 17, 14
PLANNED = "recipes/llama-7b-h100.yaml"
SMALL = {
    "name": "llama-1m-cpu",
    **{"model.hidden_size": 96, "model.num_hidden_layers": 4, "model.num_attention_heads": 6},
    **{"model.num_key_value_heads": 3, "model.intermediate_size": 256, "model.vocab_size": 1024},
    **{"data.tokenizer.vocab_size": 1024, "training.steps": 800, "training.schedule.warmup_steps": 40},
    **{"evaluation.every": 100, "checkpoint.every": 100},
}
_CONSOLE = Console(color_system="truecolor", width=COLUMNS)


def terminal(title: str, lines: Sequence[Text]) -> str:
    """Return lines of a terminal as SVG, in which no character depends on the width of another one."""
    width = COLUMNS * CELL_WIDTH + 2 * MARGIN
    height = len(lines) * ROW_HEIGHT + 2 * MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13.3">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{SVG_EXPORT_THEME.background_color.hex}"/>',
    ]
    for row, line in enumerate(lines):
        column, y = 0, MARGIN + row * ROW_HEIGHT + 13
        for segment in line.render(_CONSOLE):
            text = segment.text.rstrip()
            if text:
                drawn.append(_words(text, column, y, segment.style or Style()))
            column += segment.cell_length
    return "\n".join([*drawn, "</svg>\n"])


def _words(text: str, column: int, y: int, style: Style) -> str:
    color = SVG_EXPORT_THEME.foreground_color if style.color is None else style.color.get_truecolor(SVG_EXPORT_THEME)
    weight = ' font-weight="bold"' if style.bold else ""
    shade = ' opacity="0.6"' if style.dim else ""
    places = " ".join(f"{MARGIN + (column + number) * CELL_WIDTH}" for number in range(len(text)))
    look = f'fill="{color.hex}"{weight}{shade} xml:space="preserve"'
    return f'<text x="{places}" y="{y}" {look}>{escape(text)}</text>'


def plan() -> str:
    """Return the picture of the output of `scaletrain plan`."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "scaletrain_cli", "plan", PLANNED]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
    shown = [Text(f"$ scaletrain plan {PLANNED}", "bold"), *map(Text.from_ansi, done.stdout.splitlines())]
    return terminal(f"scaletrain plan {PLANNED}", shown)


def run() -> None:
    """Train the small model, kill a rank on the way, and draw the pictures of this run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = folder
        settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
        _scaletrain("submit", "recipes/llama-10m-cpu.yaml", "--run-id", "small", "--yes", *settings)
        _wait_for_step(330)
        _scaletrain("exec", "small", "--rank", "1", "--", "sh", "-c", "kill -9 $SCALETRAIN_RANK_PID")
        _wait_for_step(620)
        shown = Shown(read_view(RunDir(Path(folder) / "small")))
        pages: tuple[tuple[str, Page, int], ...] = (("watch", "overview", 36), ("curves", "curves", 30))
        for name, page, rows in pages:
            lines = screen_lines(shown, Choices(page=page), COLUMNS, rows)
            (FOLDER / f"{name}.svg").write_text(terminal(f"scaletrain watch: {page}", lines), encoding="utf-8")
        _scaletrain("status", "small", "--wait", "1h")
        report = Path(folder) / "report.html"
        _scaletrain("report", "small", "-o", str(report))
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("no Chromium: report.png stays as it is", file=sys.stderr)
            return
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,940"]
        picture = FOLDER / "report.png"
        subprocess.run([browser, *options, f"--screenshot={picture}", report.as_uri()], check=True, capture_output=True)
        with Image.open(picture) as shot:  # a third of the size
            shot.convert("RGB").quantize(128).save(picture, optimize=True)


def _scaletrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "scaletrain_cli", *words], cwd=PROJECT, check=True)


def _wait_for_step(step: int) -> None:
    while (now := status("small")).step < step and now.state not in ("failed", "finished"):
        print(f"step {now.step}", file=sys.stderr)
        time.sleep(2)


if __name__ == "__main__":
    if sys.argv[1:] == ["plan"]:
        (FOLDER / "plan.svg").write_text(plan(), encoding="utf-8")
    elif sys.argv[1:] == ["run"]:
        run()
    else:
        sys.exit("usage: python docs/pictures/screens.py plan|run")
