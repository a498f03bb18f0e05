"""The stand-in hub, and a cache of its own for each test."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants  # noqa: F401, TID253  # reads the environment, which tests change, when it is imported
import pytest

from scaletrain_cli.hub import client
from scaletrain_cli.hub.cache import HubSettings
from scaletrain_cli.launch import hub_fetch
from scaletrain_cli.launch.hub_fetch import Fetch, FetchProgress
from scaletrain_cli.launch.node import hub as node_files
from scaletrain_cli.spec.hub_files import HubUse
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


@pytest.fixture
def fetched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch in the process of the test: one of its own, as in test_fetch.py and test_nodes.py, takes a second."""

    def fetch(
        uses: Sequence[HubUse], commits: Mapping[str, str], environment: Mapping[str, str], **_: Any
    ) -> FetchProgress:
        return Fetch(HubSettings.from_environment(environment)).run(uses, commits)

    for module in (hub_fetch, node_files):
        monkeypatch.setattr(module, "fetch", fetch)


def forget() -> None:
    """Forget the answers that this process remembers, as a new process would."""
    client._answers.clear()
