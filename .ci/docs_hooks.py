"""For mkdocs: pages of the project outside docs/ are pages of the site too, so that each link between them is checked.

README.md, CONTRIBUTING.md and CHANGELOG.md stand at the top of the site; every other file that a page links to stands
below the same path as in the project, a README as about.md: slurm/README.md would replace docs/slurm.md. The pages that
llms.txt links to are also there as Markdown, for agents.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File

PROJECT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
# In HTML of the README: its folder, and what is for dark pages, which the site has not.
_PICTURE = re.compile(r'(?<=src=")docs/|^ *<source .*dark.*>\n', re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that a page links to, and those that they link to."""
    waiting = [PROJECT / name for name in TOP]
    waiting += [path for page in (PROJECT / "docs").rglob("*.md") for path in _linked(page)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file() or path.is_relative_to(PROJECT / "docs"):
            continue
        seen.add(path)
        file = File.generated(config, str(_place(path)), abs_src_path=str(path))
        if any(other.dest_uri == file.dest_uri for other in files):
            raise BuildError(f"{path} would replace another page of the site, {file.dest_uri}.")
        files.append(file)
        if path.suffix == ".md":
            waiting += _linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn each link into one between places of the site, where docs/ is the top."""
    source = Path(page.file.abs_src_path or PROJECT / "docs" / page.file.src_uri)  # the latter: by docs_commands.py
    here = _place(source).parent

    def moved(found: re.Match[str]) -> str:
        target = (source.parent / found[1]).resolve()
        if not target.exists() or target.is_dir():
            return found[0] if not target.is_dir() else f"]({config['site_url'] or '#'})"
        return f"]({_relative(_place(target), here)}{found[2] or ''})"

    return _PICTURE.sub("", _LINK.sub(moved, markdown))


def on_post_build(config: Any) -> None:
    """Copy the pages that llms.txt links to, as they are, beside it."""
    for page in _linked(PROJECT / "docs" / "llms.txt"):
        shutil.copy(page, Path(config["site_dir"]) / _place(page))


def _linked(page: Path) -> list[Path]:
    return [(page.parent / found[1]).resolve() for found in _LINK.finditer(page.read_text(encoding="utf-8"))]


def _place(path: Path) -> Path:
    """Return where a file of the project stands in the site."""
    if path.is_relative_to(PROJECT / "docs"):
        return path.relative_to(PROJECT / "docs")
    place = path.relative_to(PROJECT)
    return place.with_name("about.md") if place.name == "README.md" and place.parts[:-1] else place


def _relative(target: Path, folder: Path) -> str:
    up = [".."] * len(folder.parts)
    return "/".join([*up, *target.parts])
