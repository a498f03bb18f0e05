import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scaletrain_cli.engine.checkpoint.snapshot import random_state, restore_random_state
from scaletrain_cli.errors import UsageError

CPU = torch.device("cpu")


def draws() -> list[Any]:
    return [random.random(), random.gauss(), *np.random.rand(3), *np.random.randn(1), *torch.rand(3).tolist()]


def test_the_same_numbers_follow_after_a_restore() -> None:
    random.gauss(), np.random.randn()  # both keep a second number back
    saved = random_state(CPU)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    restore_random_state(saved, CPU)
    assert draws() == expected


def test_a_pickled_random_state_is_rejected_and_not_executed(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    file = io.BytesIO()
    torch.save({"python": Payload()}, file)
    saved = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"not scaletrain\.random/v1: another version .* can run code"):
        restore_random_state(saved, CPU)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", "scaletrain.random/v9"),
        ("python", [3, [1, 2, 3], None]),
        ("python", [3, ["x"] * 625, None]),
        ("numpy", ["MT19937", [0] * 624, 100_000, 0, 0.0]),
        ("numpy", ["MT19937", [0] * 624, -1, 0, 0.0]),
        ("numpy", ["MT19937", [2**40] * 624, 3, 0, 0.0]),
        ("numpy", ["PCG64", [0] * 624, 3, 0, 0.0]),
        ("torch", "AAAA"),
        ("torch", "not base64"),
    ],
)
def test_a_forged_random_state_is_rejected(key: str, value: object) -> None:
    state = json.loads(random_state(CPU).numpy().tobytes()) | {key: value}
    saved = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(UsageError, match="random state is not"):
        restore_random_state(saved, CPU)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"null", b"\xff\xfe"])
def test_content_that_is_no_random_state_is_rejected(content: bytes) -> None:
    saved = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(UsageError, match="random state is not"):
        restore_random_state(saved, CPU)
