"""The text of events, in the log of rank 0 as in `scaletrain events`."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrain_cli.event_texts import event_sentence


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "spike", "step": 7, "then": "training continues"}, "at step 7; training continues"),
        (
            {"event": "loss-scale-collapsed", "step": 90, "fell_from": 65536.0, "loss_scale": 2.0, "within_steps": 40},
            "at step 90: the loss scale fell from 65536 to 2 within 40 steps",
        ),
        (
            {"event": "dead-gradients", "step": 9, "norms": [0.0, 1e-12]},
            "at step 9: gradient norms of the last 2 steps: 0, 1e-12",
        ),
        (
            {"event": "flat-loss", "step": 200, "first_losses": 6.2, "recent_losses": 6.19, "noise": 0.1},
            "at step 200: the loss has not fallen, 6.2000 at first and 6.1900 recently",
        ),
        (
            {"event": "data-wait", "step": 50, "rank": 3, "share": 0.12, "steps": 49, "workers": 0, "prefetch": 2},
            "rank 3 waited for data 12 % of the time of the last 49 steps; raise data.loader.workers (0) and "
            "data.loader.prefetch (2), or use faster storage",
        ),
        (
            {"event": "finding", "severity": "error", "change": "worse", "step": 90, "text": "the loss diverges"},
            "error, worse than before, at step 90: the loss diverges",
        ),
        (
            {"event": "finding-cleared", "severity": "error", "seconds": 90.0, "step": 95, "text": "the loss rises"},
            "after 90 s, at step 95: the loss rises",
        ),
        (
            {"event": "resumed", "step": 16, "lost_steps": 1, "saved_step": 8},
            "from step 16, of a copy in host memory; 1 step to repeat",
        ),
        (
            {"event": "memory-copies", "step": 4, "every": 4, "blocked_seconds": 0.002},
            "the state is copied to host memory every 4 steps, which blocks training for 2.00 ms",
        ),
        ({"event": "stage", "step": 5, "last_step": 12, "tensors": 27}, "steps 5 to 12 train 27 tensors"),
        (
            {"event": "stopped-early", "step": 40, "validation_losses": [2.0, 2.5]},
            "at step 40: the validation loss does not improve; its last values are 2.0000, 2.5000",
        ),
        (
            {"event": "stopped-early", "step": 40, "metric": "validation_top1", "values": [0.5, 0.25]},
            "at step 40: the validation top1 does not improve; its last values are 0.5000, 0.2500",
        ),
        (
            {"event": "validation-held-back", "sequences": 16, "of": 4000},
            "the last 16 of 4,000 training sequences are used for validation: the validation split is too small",
        ),
        (
            {"event": "batch-norm-images", "step": 40, "before": 16, "now": 8},
            "BatchNorm normalizes 8 images together from step 41 on, and 16 before: the layout has changed, and the "
            "loss may",
        ),
        (
            {"event": "damaged-data", "file": "/d/train.bin", "problem": "chunk 3 has changed"},
            "/d/train.bin: chunk 3 has changed; the run stops",
        ),
        (
            {
                "event": "goodput",
                "goodput": 0.5,
                "wall_seconds": 120.0,
                "save_seconds": 0.05,
                "restore_seconds": 50.0,
                "evaluation_seconds": 5.0,
                "rollback_seconds": 0.0,
                "lost_work_seconds": 4.0,
                "idle_seconds": 0.0,
            },
            "50 % of 2 min; save 50.0 ms, set-up 50 s, evaluation 5 s, rollback 0 ms, lost work 4 s, idle 0 ms",
        ),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_an_event_of_the_engine_has_a_text(event: dict[str, Any], text: str) -> None:
    assert event_sentence(event) == text
