"""The one form of each kind of row for fine-tuning, and the error of a row that cannot be used."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from scaletrain_cli.errors import sentence
from scaletrain_cli.reasons import Reason

Message = dict[str, Any]
ASSISTANT = "assistant"


class RowError(Exception):
    """A row cannot be used; ``reason`` says why, without the file and the number of the row."""

    def __init__(self, code: str, **params: Any) -> None:
        super().__init__(code)
        self.reason = Reason(f"data.{code}", params)

    def at(self, where: str) -> Reason:
        """Return the reason with the file and the number of the row, and with what to do."""
        remedies = " ".join(map(sentence, self.reason.remedies))
        params = {"where": where, "problem": self.reason}
        return Reason("data.row-and-remedy", params | {"remedy": remedies}) if remedies else Reason("data.row", params)


class PlainText(NamedTuple):
    """A row whose tokens are all in the loss."""

    text: str


class Answer(NamedTuple):
    """A prompt and its answer, both text or both messages. ``variables``: of the chat template, by name."""

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}


class Conversation(NamedTuple):
    """Messages, and the weight of each in the loss; None for messages that are not of the assistant.

    ``variables``: of the chat template, by name.
    """

    messages: list[Message]
    weights: list[float | None]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}


class Pair(NamedTuple):
    """Two answers to the same prompt."""

    chosen: Answer
    rejected: Answer


Example = PlainText | Answer | Conversation | Pair
