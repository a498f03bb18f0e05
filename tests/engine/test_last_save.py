from types import SimpleNamespace
from typing import Any

import pytest

from scaletrain_cli.engine.trainer import LoopState, Trainer


@pytest.mark.parametrize(("last_step", "saves"), [(7, True), (9, False)])
def test_a_run_that_a_signal_reaches_at_its_end_is_not_finished_before_its_state_is_saved(
    last_step: int, saves: bool
) -> None:
    """As one that an evaluation stops early. What does not end before the grace period is repeated by an attempt."""
    done: list[tuple[Any, ...]] = []
    rank: Any = SimpleNamespace(
        context=SimpleNamespace(
            heartbeat=SimpleNamespace(beat=lambda *_: None),
            spec=SimpleNamespace(cluster=SimpleNamespace(grace_seconds=30.0)),
        ),
        step_sync=SimpleNamespace(seconds_to_save=lambda step, grace: (20.0, 25.0)),
        checkpointer=SimpleNamespace(committed_step=5, finish=lambda: done.append(("finish",))),
        save=lambda step, wait: done.append(("save", step, wait)),
    )
    unsaved = Trainer._save_before_exit(rank, LoopState(7, last_step, False, []))
    assert done == ([("save", 7, True)] if saves else [("finish",)])
    assert unsaved.get("saved_step") == (None if saves else 5)
