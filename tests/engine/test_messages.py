from pathlib import Path

import pytest

from scaletrain_cli.engine.process_group import Ranks, decode, encode
from scaletrain_cli.rundir.checkpoints import Checkpoint, FileDigest
from scaletrain_cli.worker.loop_adapter import StepDecision

CHECKPOINT = Checkpoint(Path("/runs/r/step-1"), 1, 2, True, 1, {"a": FileDigest(3, "ab")})


VALUES: list[object] = [None, True, 3, 2.5, float("inf"), "é", [1, [2]], (1, (2, [3])), {1: "a", "b": (2,)}, {1, 2}]
VALUES += [Path("/x"), CHECKPOINT, (Path("/runs"), ""), [CHECKPOINT, None], Ranks(0, 2, 0)]
FORGED = [
    "subprocess:Popen",
    "builtins:exec",
    "scaletrain_cli.engine.process_group:Path",
    "scaletrain_cli.errors:Problems",
]
FORGED += [
    "scaletrain_cli.engine.process_group:sys.modules",
    "scaletrain_cli.rundir.record:RunRecord.__init__",
    "x",
    "",
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_unchanged_after_encoding_and_decoding(value: object) -> None:
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize("value", [b"bytes", StepDecision.SAVE, object(), {"a": object()}])
def test_a_value_that_json_would_change_is_rejected(value: object) -> None:
    with pytest.raises(TypeError, match="do not send each other"):
        encode(value)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_message_creates_no_object_of_another_type(name: str) -> None:
    with pytest.raises(ValueError, match="no value that ranks send"):
        decode(f'{{"{name}":["echo"]}}'.encode())
