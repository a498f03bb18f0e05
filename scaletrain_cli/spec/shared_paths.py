"""The kinds of paths in a run spec: object stores, the Hugging Face Hub, and folders that the nodes share."""

import os
import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from scaletrain_cli.hub.reference import is_reference, parse_reference
from scaletrain_cli.spec.quantities import Text

# Schemes of object stores and web servers that data are read from.
REMOTE_SCHEMES = ("s3", "gs", "az", "https", "http")
# Folders that each host has for itself.
_OWN = ("/tmp", "/var", "/run", "/dev", "/proc", "/scratch", "/local", "/localscratch", "/opt", "/usr", "/etc")


def is_shared(path: PurePosixPath) -> bool:
    """Return whether ``path`` is assumed to be the same on the nodes as here.

    False below folders that each host has for itself, and below a top-level folder that does not exist here.
    """
    if any(path.is_relative_to(folder) for folder in _OWN):
        return False
    return len(path.parts) < 2 or os.path.isdir(os.path.join("/", path.parts[1]))


def parent_of_glob(source: str) -> str:
    """Return the part of a path before the first component with a wildcard."""
    if os.path.lexists(source):
        return source
    parts: list[str] = []
    for part in PurePosixPath(source).parts:
        if set(part) & set("*?["):
            break
        parts.append(part)
    return str(PurePosixPath(*parts)) if parts else "."


_SCHEME = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9+.-]*)://")


def _checked(text: str) -> str:
    if is_reference(text):
        try:
            parse_reference(text)
        except ValueError as error:
            raise PydanticCustomError("hub", f"{error}") from error
    return text


def _checked_data(text: str) -> str:
    scheme = _SCHEME.match(text)
    if scheme is not None and not is_reference(text) and scheme["name"] not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in REMOTE_SCHEMES)
        raise PydanticCustomError("data_scheme", f"must be a local path, or begin with {known} or hf://datasets/")
    return _checked(text)


def _checked_model(text: str) -> str:
    if is_reference(_checked(text)) and parse_reference(text).kind != "model":
        raise PydanticCustomError("hub", "must name a model of the hub, not a data set: hf://org/name")
    return text


ModelPath = Annotated[Text, AfterValidator(_checked_model)]  # a local path, or hf://org/name
DataPath = Annotated[Text, AfterValidator(_checked_data)]  # a local path, or hf://datasets/org/name
