"""The pictures of the README are those that their script draws."""

import runpy
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def test_the_stored_pictures_are_those_of_the_script() -> None:
    script = runpy.run_path(str(FOLDER / "flow.py"))
    drawn = {f"flow-{name}.svg": script["picture"](colors) for name, colors in script["COLORS"].items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")} == drawn
