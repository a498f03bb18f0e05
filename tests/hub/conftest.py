"""The stand-in hub, and a cache of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants  # noqa: F401, TID253  # reads the environment, which tests change, when it is imported
import pytest

from scaletrain_cli.hub import client
from tests.hub.server import Hub

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(client, "_PAUSE_SECONDS", 0.01)
    forget()
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    forget()


def forget() -> None:
    """Forget the answers that this process remembers, as a new process would."""
    client._listings.clear()
    client._unanswered.clear()
