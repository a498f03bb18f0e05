"""Check sources that are already tokenized: no step reads their text, and their ids are those of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scaletrain_cli.errors import UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.resource_checks.files import token_ids_of
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home

if TYPE_CHECKING:
    from scaletrain_cli.data.sources.records import SourceFile

_FILES_READ = 2


def token_source_problem(
    view: View, name: str, files: Sequence[SourceFile], *, reads_ids: bool = True
) -> Reason | None:
    """Return why the files of a source cannot be used with the settings, if they hold tokens.

    ``reads_ids``: compare their first ids with the tokenizer. Raises UsageError if only some of them hold tokens.
    """
    from scaletrain_cli.data.pipeline.chain import applies
    from scaletrain_cli.data.pipeline.tasks import Source

    source = Source(name, tuple(files), "")
    if not source.is_tokenized:
        return None
    if view.spec.data.tokenizer.kind == "bpe":
        return Reason("data.tokens-without-tokenizer", {"source": name})
    try:
        for step in view.spec.data.prepare:
            applies(step, source)
    except UsageError as error:
        return error.reason
    return _id_problem(view, files) if reads_ids else None


def _id_problem(view: View, files: Sequence[SourceFile]) -> Reason | None:
    """Return the problem of the first id that the tokenizer does not have, among the beginnings of some files."""
    from scaletrain_cli.data.sources.beginning import read_beginning
    from scaletrain_cli.data.sources.records import Columns, TokenRecord

    size = _size_of_vocabulary(view)
    if size is None:
        return None
    for file in files[:: -(-len(files) // _FILES_READ)]:
        for record in read_beginning(file, Columns()).documents:
            if isinstance(record, TokenRecord) and len(record.tokens) and (found := int(record.tokens.max())) >= size:
                return Reason("sources.id-outside-vocabulary", {"id": found, "size": size})
    return None


def _size_of_vocabulary(view: View) -> int | None:
    """Return the number of ids of the tokenizer; None if it cannot be read here, which is another problem."""
    path = view.spec.data.tokenizer.path
    if path is None or is_reference(path) or view.unseen(path):
        return None
    try:
        return max(token_ids_of(view.folder / expand_home(path), view.spec).values()) + 1
    except (OSError, UsageError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
