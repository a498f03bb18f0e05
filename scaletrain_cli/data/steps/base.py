"""The interface of the steps that look at one document at a time.

A step is a pure function: the same document gives the same result on every machine, in every order and any number of
times. So a step that only removes documents can record its decisions, and a step that changes text can run again
where the text is needed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Document(NamedTuple):
    """One document. ``place`` is where it was read (``file:line``), ``columns`` the other columns of its row."""

    text: str
    source: str
    place: str
    columns: Mapping[str, Any] = NOTHING


class Kept(NamedTuple):
    """The document stays, with this text, which is the given object itself if the step changed nothing.

    ``counts`` says what the step found or changed: ``{"identifiers.email": 2}``, ``{"language.en": 1}``. It has no text
    of the document.
    """

    text: str
    counts: Mapping[str, int] = NOTHING


class Removed(NamedTuple):
    """The document is removed by ``rule``, the step and the key of the spec: ``gopher_quality.min_words``.

    ``measured`` is the value of the document and ``limit`` the allowed one. Neither has text of the document.
    """

    rule: str
    measured: float | str
    limit: float | str


class Step(Protocol):
    """A step, as ``step_of`` builds it from its section of the spec.

    ``version``: raised with every change of the results, so that earlier outputs are not used. ``changes_text``: the
    text of a document may change. ``depends_on``: what else the results depend on: versions of libraries and of
    Unicode, hashes of files.
    """

    version: int = 1
    changes_text: bool = False
    depends_on: Mapping[str, Any] = NOTHING

    def __call__(self, document: Document) -> Kept | Removed:
        """Return what becomes of a document. Raises DocumentError if its row does not have what the step needs."""
        ...


class DocumentError(UsageError):
    """A step cannot read a document (exit 2); ``data.on_bad`` decides what follows.

    ``reason`` does not name the document; ``place`` does, and the reader of the documents adds it to the message.
    """

    def __init__(self, place: str, reason: Reason) -> None:
        super().__init__(reason)
        self.place = place
