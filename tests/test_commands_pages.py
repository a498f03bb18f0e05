"""The site has a page for each verb, with each of its options."""

import runpy

import typer

from scaletrain_cli.cli.app import BUILT_IN, app
from tests.cli.command_line import PROJECT

PAGES = dict(runpy.run_path(str(PROJECT / ".ci" / "docs_commands.py"))["pages"]())


def test_each_verb_has_a_page_with_all_its_options_and_a_line_in_the_table() -> None:
    root = typer.main.get_command(app)
    for verb in BUILT_IN:
        page = PAGES[f"commands/{verb}.md"]
        command = root.get_command(None, verb)  # type: ignore[attr-defined]
        commands = {verb: command} | {f"{verb} {name}": each for name, each in getattr(command, "commands", {}).items()}
        for words, each in commands.items():
            assert f"# scaletrain {words}\n" in page
            options = [name for option in each.params for name in option.opts if name.startswith("-")]
            assert [name for name in options if name not in page] == []
    assert PAGES.keys() == {f"commands/{name}.md" for name in ("index", *BUILT_IN)}
    assert [verb for verb in BUILT_IN if f"\n| [{verb}]({verb}.md) | " not in PAGES["commands/index.md"]] == []
