"""Labels and captions of samples: from what is stored to numbers and text."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.data.images.samples import ImageSettings
from scaletrain_cli.reasons import Reason

_LARGEST_CLASS = 2**31 - 2
_NOT_LABELED = -1  # as the datasets library marks examples of a test split
MOST_CAPTION_BYTES = 1 << 20
_LONGEST_SHOWN = 40
_NUMBER = re.compile(r"-?\d{1,18}")
_IN_JSON = "json:"


class TargetError(Exception):
    """A label or a caption cannot be used."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def target_of(value: Any, settings: ImageSettings, classes: Mapping[str, int]) -> list[float]:
    """Return the class number, the class numbers in order, or the numbers of a label; empty without targets.

    ``value``: as stored: a number, a list, or the bytes of a member. ``classes``: numbers by name; empty if the source
    has no names. Raises TargetError.
    """
    if settings.targets == "none":
        return []
    if isinstance(value, bytes):
        value = _parsed(value, settings)
    if value is None:
        raise TargetError(Reason("images.no-label"))
    if settings.targets == "class":
        return [_class_of(value, classes)]
    if settings.targets == "classes":
        if not isinstance(value, list):
            value = [value]
        return sorted({_class_of(each, classes) for each in value})
    found = value if isinstance(value, list) else [value]
    numbers = [each for each in found if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) != len(found) or not found or not all(map(math.isfinite, numbers)):
        raise TargetError(Reason("images.label-not-numbers", {"given": _shown(value)}))
    return list(map(float, numbers))


def _parsed(content: bytes, settings: ImageSettings) -> Any:
    """Return the value of a member: a number, a list, or the name of a class."""
    if not (text := _decoded(content).strip()):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if settings.targets == "class" and not isinstance(value, int) else value


def _class_of(value: Any, classes: Mapping[str, int]) -> int:
    if isinstance(value, str):
        if value in classes:
            return classes[value]
        if not _NUMBER.fullmatch(value.strip()):
            if classes:
                raise TargetError(Reason("images.class-unknown", {"given": _shown(value), "classes": len(classes)}))
            raise TargetError(Reason("images.class-without-names", {"given": _shown(value)}))
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TargetError(Reason("images.label-not-a-class", {"given": _shown(value)}))
    if value == _NOT_LABELED:
        raise TargetError(Reason("images.no-label"))
    if not 0 <= value <= (len(classes) - 1 if classes else _LARGEST_CLASS):
        raise TargetError(Reason("images.class-beyond", {"given": value, "classes": len(classes)}))
    return value


def caption_of(value: Any) -> bytes:
    """Return a caption in UTF-8, without white space around it. Raises TargetError."""
    if value is None:
        raise TargetError(Reason("images.no-caption"))
    if isinstance(value, list) and value:  # several captions of one image: the first one
        value = value[0]
    if isinstance(value, bytes):
        value = _decoded(value)
    if not isinstance(value, str):
        raise TargetError(Reason("images.caption-not-text", {"given": _shown(value)}))
    if not (found := value.strip().encode("utf-8", "replace")):
        raise TargetError(Reason("images.no-caption"))
    if len(found) > MOST_CAPTION_BYTES:
        raise TargetError(Reason("images.caption-too-long", {"bytes": len(found), "most": MOST_CAPTION_BYTES}))
    return found


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TargetError(Reason("images.not-utf-8", {"error": str(error)})) from error


def json_value(content: bytes | None, key: str) -> Any:
    """Return the value of a key of a JSON object; None if it has no such key, or is missing. Raises TargetError."""
    if content is None:
        return None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise TargetError(Reason("images.not-json", {"error": str(error)})) from error
    if not isinstance(found, dict):
        raise TargetError(Reason("images.not-json", {"error": "it must be an object"}))
    return found.get(key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


@dataclass(frozen=True)
class Member:
    """The part of a sample that a field of the spec names: the first of some suffixes, or a key of a JSON member."""

    suffixes: tuple[str, ...]
    json_key: str | None = None

    @classmethod
    def of(cls, field: str, usual: tuple[str, ...]) -> "Member":
        """Return the member of a field such as auto, cls, jpg;png or json:caption; auto: ``usual``."""
        if field == "auto":
            return cls(usual)
        if field.startswith(_IN_JSON):
            return cls(("json",), field.removeprefix(_IN_JSON))
        return cls(tuple(part.strip().lower().removeprefix(".") for part in field.split(";")))

    def suffix_in(self, members: Mapping[str, Any]) -> str | None:
        """Return the suffix of the member among those of a sample; None if it has none."""
        return next((suffix for suffix in self.suffixes if suffix in members), None)

    def value(self, members: Mapping[str, bytes]) -> Any:
        """Return the content of the member, or the value of its JSON key; None if it is missing. Raises TargetError."""
        if (suffix := self.suffix_in(members)) is None:
            return None
        return members[suffix] if self.json_key is None else json_value(members[suffix], self.json_key)
