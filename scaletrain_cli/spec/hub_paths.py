"""The paths of a run spec that may be references to the Hugging Face Hub."""

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from scaletrain_cli.hub.reference import is_reference, parse_reference
from scaletrain_cli.spec.quantities import Text
from scaletrain_cli.spec.shared_paths import REMOTE_SCHEMES

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
