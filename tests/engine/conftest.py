"""The dataset of all tests that train parity rows."""

from pathlib import Path

import pytest

from tests.engine.parity.dataset import write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("parity"))
