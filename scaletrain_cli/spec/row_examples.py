"""The one form of each kind of row for fine-tuning, its images, and the error of a row that cannot be used."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from scaletrain_cli.errors import sentence
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.data import FORMATS_WITH_IMAGES, FieldsSpec

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


# The place of an image in a text, as in the files of LLaVA and of the datasets library.
IMAGE_MARK = "<image>"
TRAINED_IMAGE_TOKEN = 3  # id of IMAGE_MARK in a tokenizer that is trained on the rows


class GivenImage(NamedTuple):
    """An image of a row: its path as the row names it, or the bytes of its file, or both."""

    path: str
    content: bytes | None = None


def images_of(row: Mapping[str, Any], fields: FieldsSpec) -> tuple[GivenImage, ...]:
    """Return the images of a row, in order; of a row without the column none. Raises RowError."""
    columns = ("images", "image") if fields.images == "auto" else (fields.images,)
    column = next((name for name in columns if row.get(name) not in (None, "")), None)
    if column is None:
        return ()
    images = row[column]
    return tuple(_given_image(image, column) for image in (images if isinstance(images, list | tuple) else [images]))


def _given_image(given: Any, column: str) -> GivenImage:
    """Return an image given as a path, as bytes, or as {bytes, path}, which the datasets library writes."""
    path, content = given, None
    if isinstance(given, Mapping):
        path, content = given.get("path") or "", given.get("bytes")
    elif isinstance(given, bytes):
        path, content = "", given
    if not isinstance(path, str) or not isinstance(content, bytes | None) or not (path or content):
        raise RowError("image-column", column=column)
    return GivenImage(path, content)


def require_format_with_images(row_format: str) -> None:
    """Raise RowError for a format without a place for an image."""
    if row_format not in FORMATS_WITH_IMAGES:
        raise RowError("format-without-images", format=row_format, known=list(FORMATS_WITH_IMAGES))


def image_marks(example: Example) -> int:
    """Return the number of places of images in the text of an example."""
    marks = 0
    for _, content in contents_of(example.chosen if isinstance(example, Pair) else example):
        if isinstance(content, str):
            marks += content.count(IMAGE_MARK)
        elif isinstance(content, list):
            marks += sum(map(is_image_part, content))
    return marks


def contents_of(example: Example) -> Iterator[tuple[int, Any]]:
    """Yield the texts of an example, and the contents of its messages with their numbers."""
    if isinstance(example, Pair):
        yield from contents_of(example.chosen)
        yield from contents_of(example.rejected)
    elif isinstance(example, PlainText):
        yield 0, example.text
    else:
        parts = [example.messages] if isinstance(example, Conversation) else [example.prompt, example.completion]
        yield from ((0, part) for part in parts if isinstance(part, str))
        messages = [message for part in parts if not isinstance(part, str) for message in part]
        yield from ((number, message.get("content")) for number, message in enumerate(messages))


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Return True if a part of a message's content is the place of an image."""
    return part.get("type") == "image"
