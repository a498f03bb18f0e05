"""One dataset and one undisturbed run per layout, shared by all drills of a session."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.spec import DataSpec
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.training_runs import Drill, drill_spec
from tests.prepared_text import prepared_text

Undisturbed = Callable[..., Drill]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Part of Python's standard library, as 512 byte-pair tokens."""
    source = Path(os.__file__).parent
    data = DataSpec.model_validate({"source": f"{source}/[a-d]*.py", "tokenizer": {"kind": "bpe", "vocab_size": 512}})
    return prepared_text(data, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the undisturbed run with these overrides; it is trained once, without a node agent."""
    finished: dict[str, Drill] = {}

    def run(**overrides: Any) -> Drill:
        key = repr(sorted(overrides.items()))
        if key not in finished:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SCALETRAIN_RUNS", str(tmp_path_factory.mktemp("undisturbed")))
                forked = ForkedRun.create(drill_spec(dataset, **{"checkpoint__keep": 4, **overrides}))
                forked.attempts_to_end()
            finished[key] = Drill(forked.run, LocalBackend())
        return finished[key]

    return run


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Return a generator: the same each time in `make test`, in a long test a new one.

    The seed is shown if the test fails, so that it can be repeated.
    """
    new = time.time_ns() % 10**9 if request.node.get_closest_marker("long") else 1
    seed = int(os.environ.get("DRILL_SEED", new))
    print(f"repeat with DRILL_SEED={seed}")
    return random.Random(seed)
