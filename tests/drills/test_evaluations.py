"""Evaluations of checkpoints are runs of their own: training never waits for them, and the best checkpoint is kept."""

import sys
from pathlib import Path

import pytest

from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.evaluations import best_step, read_evaluations
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.paths import RunDir
from tests.cli.command_line import scaletrain
from tests.drills.campaign.forked_attempts import ForkedRun
from tests.drills.training_runs import drill_spec, submit_drill
from tests.waiting import wait_until

pytestmark = pytest.mark.drill
TINY_TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/tiny.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


@pytest.mark.long
def test_each_checkpoint_is_evaluated_once(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    (tmp_path / "tiny.yaml").write_text(TINY_TASK.format(folder=tmp_path))
    (tmp_path / "tiny.jsonl").write_text('{"question": "import", "choices": [" os", " zzqx"], "answer": 0}\n')
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    # the first evaluation is submitted before the second checkpoint, also on a busy machine
    monkeypatch.setenv(VARIABLE, "slow-rank step=21 seconds=1.5")
    trained = tmp_path / "trained"
    after_training = f"until [ -e {trained} ]; do sleep 0.1; done; exit 1"
    text = tmp_path / "held-out.txt"
    text.write_text("def main():\n    return 0\n" * 50)
    tasks = [
        f"{{kind: loss, name: code, source: {text}}}",
        "{kind: generation, name: samples, prompts: ['import'], max_new_tokens: 3}",
        f"{{kind: lm_eval, name: harness, tasks: [tiny], include_path: {tmp_path}, batch_size: '1', "
        f"command: [{sys.executable}, -m, lm_eval]}}",
        f"{{kind: lm_eval, name: broken, tasks: [no_such_task], command: [sh, '-c', '{after_training}']}}",
    ]
    drill = submit_drill(
        dataset,
        evaluation__tasks=f"[{', '.join(tasks)}]",
        evaluation__job="{every: 20}",
        checkpoint__keep=1,
        checkpoint__keep_best="code/loss",
    )
    drill.wait_for_end()
    assert drill.events("finished"), drill.log()
    over = ("done", "failed")
    assert not {one.state for one in read_evaluations(drill.run)}.intersection(over), "training waits for no evaluation"
    trained.touch()
    wait_until(lambda: [one.state in over for one in read_evaluations(drill.run)] == [True, True], "both are evaluated")

    evaluations = read_evaluations(drill.run)
    assert [one.step for one in evaluations] == [20, 40]
    assert [one.run_id for one in evaluations] == [f"{drill.run.run_id}-evaluation-{n:08d}" for n in (20, 40)]
    for one in evaluations:
        assert set(one.metrics) >= {"code/loss", "code/perplexity", "harness/tiny/acc"}
        assert [each["prompt"] for each in one.generations] == ["import"]
        assert set(one.errors) == {"broken"}
        job = RunDir(drill.run.path.parent / one.run_id)
        wait_until(lambda job=job: run_status(job).state == "failed", "the job has ended")
    logged = {line["step"]: line["code/loss"] for line in read_metrics(drill.run) if "code/loss" in line}
    assert logged == {one.step: one.metrics["code/loss"] for one in evaluations}
    assert logged[40] < logged[20]
    assert best_step(drill.run, "code/loss", {20, 40}) == 40

    again = scaletrain("evaluation", "submit", drill.run.path, "--json")
    assert (again.code, [one["step"] for one in again.data["evaluations"]]) == (0, [])
    shown = scaletrain("evaluation", "list", drill.run.path)
    assert "failed: broken" in shown.out
    assert "samples: import" in scaletrain("evaluation", "show", drill.run.path).out


@pytest.mark.long
def test_the_checkpoint_with_the_least_validation_loss_is_kept(dataset: Path) -> None:
    spec = drill_spec(
        dataset,
        training__optimizer="{lr: 10.0}",  # reached so late that the loss first falls, and then rises
        training__schedule="{name: constant, warmup_steps: 40}",
        guard__spike="{action: warn}",
        evaluation__every=4,
        checkpoint__keep=1,
        checkpoint__keep_best="validation_loss",
        checkpoint__every=40,
    )
    drill = ForkedRun.create(spec)
    drill.attempts_to_end()
    losses = {line["step"]: line["validation_loss"] for line in read_metrics(drill.run) if "validation_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best < 40, losses
    assert best in [checkpoint.step for checkpoint in list_checkpoints(drill.run.checkpoints)]
