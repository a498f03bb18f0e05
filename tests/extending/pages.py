"""Files that a page of docs/ holds as titled code blocks, so that a test runs exactly what a reader sees."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r'^```(?P<language>\w+) title="(?P<title>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


def files_of(page: str, heading: str) -> dict[str, str]:
    """Return the text of every titled block under ``## heading`` of docs/``page``, by its title.

    Raises LookupError for a heading that the page does not have.
    """
    sections = re.split(r"^## ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next((text for text in sections if text.partition("\n")[0].strip() == heading), None)
    if section is None:
        raise LookupError(f"docs/{page} has no section {heading!r}")
    return {block["title"]: block["text"] for block in _BLOCK.finditer(section)}


def write_files(page: str, heading: str, folder: Path) -> dict[str, Path]:
    """Write every titled block of a section below ``folder``; return the paths by title."""
    written = {}
    for title, text in files_of(page, heading).items():
        path = folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written[title] = path
    return written


def install(page: str, heading: str, folder: Path) -> None:
    """Write a section's package below ``folder``, with the metadata that ``pip install`` makes of its pyproject.toml.

    With ``folder`` on PYTHONPATH, Python finds the package and its entry points.
    """
    written = write_files(page, heading, folder)
    text = written["pyproject.toml"].read_text(encoding="utf-8")
    name, version = (re.findall(rf'^{key} = "(.+)"$', text, flags=re.MULTILINE)[0] for key in ("name", "version"))
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:.+ = ".+"\n)+)', text, flags=re.MULTILINE)
    lines = [f"[{group}]\n{entries.replace(chr(34), '')}" for group, entries in groups]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
