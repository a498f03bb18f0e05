"""The base model that an exported adapter names: by its name and commit if it came from the hub."""

from types import SimpleNamespace
from typing import Any

from scaletrain_cli.cli.checkpoint import _base_on_hub

COMMIT = "0123456789abcdef" * 2 + "01234567"


def test_an_adapter_names_the_commit_of_its_base_model_on_the_hub() -> None:
    def record(weights: str | None) -> Any:
        spec = SimpleNamespace(model=SimpleNamespace(weights=weights))
        return SimpleNamespace(spec=spec, hub={"hf://org/name": COMMIT})

    assert _base_on_hub(record("hf://org/name")) == ["--base", "org/name", COMMIT]
    assert _base_on_hub(record("/models/x")) == []
    assert _base_on_hub(record(None)) == []
