"""A command line as its verb parses it, for verbs that run on another machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.cli.app import app, verb_words


@dataclass(frozen=True)
class CommandLine:
    """A command line as its verb parses it: ``verb`` has one or two words, ``rest`` follows them."""

    verb: tuple[str, ...]
    rest: tuple[str, ...]
    params: Mapping[str, Any]

    @property
    def json_words(self) -> list[str]:
        return ["--json"] if self.params.get("as_json") else []

    @property
    def quoted(self) -> list[str]:
        """All words, quoted for a shell."""
        return [shlex.quote(word) for word in (*self.verb, *self.rest)]

    def with_word(self, given: str, word: str) -> list[str]:
        """Return ``quoted`` with ``word``, which is quoted, in place of the argument ``given``."""
        place = next(place for place, each in enumerate(self.rest) if each == given or Path(each) == Path(given))
        words = self.quoted
        words[len(self.verb) + place] = word
        return words

    def with_option(self, names: Sequence[str], value: str) -> list[str]:
        """Return all words with ``value`` for the option ``names``: of its name and its letter, the name first.

        The option comes before the other words: after ``--`` it would be none.
        """
        kept, skip = [], False
        for word in self.rest:
            is_joined = word.startswith(f"{names[0]}=") or any(word.startswith(name) for name in names[1:])
            if not (skip or word in names or is_joined):
                kept.append(word)
            skip = not skip and word in names
        return [*self.verb, names[0], value, *kept]


def parsed(words: Sequence[str]) -> CommandLine:
    """Return the command line as its verb parses it; arguments that are missing or wrong are None."""
    import typer

    verb = verb_words(words)
    start = max((words.index(word) for word in verb), default=-1) + 1
    command: Any = typer.main.get_command(app)
    for word in verb:
        command = command.get_command(None, word)
    context = command.make_context(verb[-1] if verb else "scaletrain", list(words[start:]), resilient_parsing=True)
    return CommandLine(verb, tuple(words[start:]), context.params)
