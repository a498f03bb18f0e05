"""The same spec trains the same model in every layout, and the run directory has its measured values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.rundir.journal import read_metrics
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import STEPS, drill_spec, submit_drill

pytestmark = pytest.mark.drill


def test_a_fresh_model_starts_near_ln_v_and_learns(undisturbed: Undisturbed) -> None:
    drill = undisturbed()
    (first,) = drill.events("first-loss")
    assert first["loss"] == pytest.approx(math.log(512), rel=0.02)
    assert first["plausible"]
    assert drill.validation_losses()[-1] < first["loss"] - 0.3


def test_metrics_jsonl_has_the_measured_values(undisturbed: Undisturbed) -> None:
    lines = read_metrics(undisturbed().run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[4]["learning_rate"] == pytest.approx(1e-3)  # the end of the warm-up
    assert all(0 < line["grad_norm"] < 100 for line in lines)
    assert all(line["tokens_per_second"] > 0 and line["memory_bytes"] > 10**8 for line in lines)
    assert all(line["mfu"] is None for line in lines)  # not known for a CPU
    assert [line["step"] for line in lines if "validation_loss" in line] == [20, 40]


@pytest.mark.long
def test_a_run_trains_on_a_corpus_of_the_user(tmp_path: Path) -> None:
    rows = [{"text": f"the {n} quick brown foxes jump over {n * n} lazy dogs " * 30} for n in range(120)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(row) for row in rows))
    settings: dict[str, Any] = {"training__steps": 6, "data__tokenizer__vocab_size": 300, "evaluation__every": 0}
    prepare_data(spec := drill_spec(corpus, **settings))
    run = ForkedRun.create(spec)
    run.attempts_to_end()
    assert run.events("finished"), run.log()


def test_a_corpus_that_is_not_there_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    drill = submit_drill(tmp_path / "nothing.jsonl")
    drill.wait_for_end()
    (ended,) = drill.events("attempt-ended")
    assert (ended["exit_code"], ended["requeue"]) == (2, False)
    assert "nothing.jsonl" in ended["message"]
