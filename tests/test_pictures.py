"""The pictures are those that their scripts draw, and no page has charts that a browser draws askew."""

import runpy

from tests.cli.command_line import PROJECT

FOLDER = PROJECT / "docs" / "pictures"


def test_the_stored_pictures_are_those_of_the_script() -> None:
    script = runpy.run_path(str(FOLDER / "flow.py"))
    drawn = {f"flow-{name}.svg": script["picture"](colors) for name, colors in script["COLORS"].items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("flow-*.svg")} == drawn


def test_the_picture_of_a_plan_is_what_plan_prints() -> None:
    drawn = runpy.run_path(str(FOLDER / "screens.py"))["plan"]()
    assert (FOLDER / "plan.svg").read_text(encoding="utf-8") == drawn, "run: python docs/pictures/screens.py plan"


def test_pictures_are_small_and_load_nothing() -> None:
    pictures = [path for path in FOLDER.iterdir() if path.suffix in (".svg", ".png")]
    assert len(pictures) >= 6
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []
    assert [path.name for path in FOLDER.glob("*.svg") if "url(http" in path.read_text(encoding="utf-8")] == []


def test_no_page_has_a_chart_in_braille() -> None:
    """A browser takes Braille from another font, in which the newest points are beyond the frame of the chart."""
    pages = [*(PROJECT / "docs").rglob("*.md"), PROJECT / "README.md"]
    assert [page.name for page in pages if any("\u2801" <= sign <= "\u28ff" for sign in page.read_text("utf-8"))] == []
