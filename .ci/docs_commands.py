"""For mkdocs: one page per verb, written from the command line itself, and the section of the navigation that has them.

Usage, arguments, options, defaults and exit codes are those of --help; what an exit code means for a verb is a row of
docs/exit-codes.md. Examples are the command lines of the documentation, which tests/test_documented_commands.py runs,
and "See also" names the pages that have most of them.
"""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File

from scaletrain_cli.cli.app import GROUPS, app

PROJECT = Path(__file__).parents[1]
DOCS = PROJECT / "docs"
GUIDES = {
    path: path.read_text(encoding="utf-8")
    for path in (*sorted(DOCS.rglob("*.md")), PROJECT / "slurm" / "README.md", PROJECT / "k8s" / "README.md")
}
_BLOCKS = re.compile(r"^```(?:sh|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Typer sets marks of its own around those that a verb has in the name of an argument.
_TYPER_BRACKETS = ((r"\{(.*?)\}", r"\1"), (r"\[(\[.*\])\]", r"\1"), (r"\.{3}(\]?)\.{3}", r"...\1"))
# The default and the range of a value, as Typer shows them, and in words.
_VALUES = ((r"  \[(.*)\]$", r" (\1)"), (r"\b([\d.]+)<=x<=([\d.]+)", r"\1 to \2"), (r"\bx>=([\d.]+)", r"at least \1"))
_EXAMPLES, _SEE_ALSO = 8, 5


def on_config(config: Any) -> Any:
    """Fill the section Commands of the navigation."""
    section = next(item for item in config.nav if "Commands" in item)
    section["Commands"] = [{"All commands": "commands/index.md"}]
    for title, verbs in GROUPS.items():
        section["Commands"].append({title: [{verb.name: f"commands/{verb.name}.md"} for verb in verbs]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the page of each verb, and their table."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Yield ``(path in docs, Markdown)`` of the table and of each verb."""
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="scaletrain", max_content_width=10_000)
    table = ["# Commands\n", "`scaletrain --help` prints this list, and `scaletrain VERB --help` what is on a page."]
    for title, verbs in GROUPS.items():
        table += [f"\n## {title}\n", "| command | |", "|---|---|"]
        for verb in verbs:
            table.append(f"| [{verb.name}]({verb.name}.md) | {_prose(verb.summary)} |")
            command = root.get_command(context, verb.name)
            text = "".join(_sections(command, context, "scaletrain", verb.name, 1))
            yield f"commands/{verb.name}.md", text + _see_also(f"scaletrain {verb.name}")
    yield "commands/index.md", "\n".join(table) + "\n"


def _sections(command: Any, parent: Any, words: str, name: str, level: int) -> Iterator[str]:
    """Yield what --help says about a command, then its sub-commands."""
    words = f"{words} {name}"
    context = command.context_class(command, info_name=name, parent=parent, max_content_width=10_000)
    yield f"{'#' * level} {words}\n\n{_prose(command.help)}\n\n"
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        usage = " ".join([words, *command.collect_usage_pieces(context)])
        for brackets, without in _TYPER_BRACKETS:
            usage = re.sub(brackets, without, usage)
        yield f"```text\n{usage}\n```\n\n"
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows := [each.get_help_record(context) for each in command.params if each.param_type_name == kind]:
                yield _heading(level, title) + "".join(_definition(kind, *row) for row in rows)
        if examples := _examples(words):
            yield _heading(level, "Examples") + "```sh\n" + "\n".join(examples) + "\n```\n\n"
        yield _heading(level, "Exit codes") + _exit_codes(command.epilog, words.removeprefix("scaletrain "))
    for each, subcommand in subcommands.items():
        yield from _sections(subcommand, context, words, each, level + 1)


def _heading(level: int, title: str) -> str:
    return f"## {title}\n\n" if level == 1 else f"**{title}**\n\n"  # those of sub-commands are not in the contents


def _definition(kind: str, name: str, text: str) -> str:
    if kind == "argument":
        name = re.sub(r" <[^>]*>$", "", name)  # its Python type
    for shown, words in _VALUES:
        text = re.sub(shown, words, text)
    return f"`{name}`\n:   {_prose(text)}\n\n"


def _exit_codes(epilog: str, name: str) -> str:
    codes = epilog.removeprefix("Exit codes: ").rstrip(".").split("; ")
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", GUIDES[DOCS / "exit-codes.md"].split("## By verb")[1], re.MULTILINE)
    detail = next(text for verbs, text in rows if f"`{name}`" in verbs)
    detail = re.sub(r"\]\((?=#)", "](../exit-codes.md", re.sub(r"\]\((?=\w)", "](../", detail))
    listed = "".join(f"- `{code.partition(' ')[0]}` {code.partition(' ')[2]}\n" for code in codes)
    return listed + (f"\nIn detail: {detail}.\n\n" if re.search("[a-z]", detail) else "\n")


def _examples(words: str) -> list[str]:
    """Return command lines of the guides, those of the guides that name the command most first, each once."""
    found: dict[str, str] = {}
    for guide in _guides(words):
        for block in _BLOCKS.findall(GUIDES[guide]):
            for line in re.sub(r" *\\\n *", " ", block).splitlines():
                line = line.removeprefix("$ ")
                if re.match(rf"{words}(?= |$)", line):
                    found.setdefault(re.split(r"\s+#", line)[0], re.sub(r"\s+# ", "  # ", line))
    return [line if len(line) < 120 else line.replace(" --", " \\\n    --") for line in [*found.values()][:_EXAMPLES]]


def _guides(words: str) -> list[Path]:
    counts = Counter({path: len(re.findall(rf"\b{words}\b(?!-)", text)) for path, text in GUIDES.items()})
    return [path for path, count in counts.most_common() if count]


def _see_also(words: str) -> str:
    titles = {path: GUIDES[path].splitlines()[0].strip("# ") for path in _guides(words)[:_SEE_ALSO]}
    links = (f"- [{title}]({os.path.relpath(path, DOCS / 'commands')})\n" for path, title in titles.items())
    return f"## See also\n\n{''.join(links)}"


def _prose(text: str) -> str:
    """Return the text of a help as Markdown: options as code, marks of Markdown and HTML escaped."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][a-z-]*)", html.escape(text, quote=False))
    for place, part in enumerate(parts):
        if place % 2:
            parts[place] = f"`{html.unescape(part.strip('`'))}`"
        else:
            parts[place] = re.sub(r"([\\*_\[\]#{}|])", r"\\\1", part)
    return "".join(parts)
