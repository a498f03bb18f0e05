import sys
from pathlib import Path

import pytest

from scaletrain_cli.engine.evaluation.tasks import command_line, read_results, run_lm_eval
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.spec.evaluation import LmEvalTask
from tests.launch.conftest import is_running
from tests.waiting import wait_until

TASK = LmEvalTask(kind="lm_eval", name="harness", tasks=("a", "b"), num_fewshot=2, limit=10, apply_chat_template=True)


def test_the_harness_accepts_the_options_of_the_command_line(tmp_path: Path) -> None:
    parse = pytest.importorskip("lm_eval._cli.harness").HarnessCLI()._parser
    words = command_line(TASK, tmp_path / "model", tmp_path / "out", "cpu", "float32")
    assert words[0] == "lm-eval"
    found = parse.parse_args(words[1:])
    assert (found.tasks, found.num_fewshot, found.limit, found.device) == (["a", "b"], 2, 10.0, "cpu")
    assert str(found.output_path) == str(tmp_path / "out")
    assert found.apply_chat_template


def test_metrics_have_the_names_of_task_and_metric_and_the_direction_is_kept() -> None:
    data = {
        "results": {
            "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict-match": 0.25},
            "b": {"word_perplexity,none": 12.0, "word_perplexity_stderr,none": "N/A"},
        },
        "higher_is_better": {"a": {"acc": True, "exact_match": True}, "b": {"word_perplexity": False}},
        "versions": {"a": 1.0},
        "config": {"model": "hf"},
    }
    found = read_results("harness", data)
    assert found.metrics == {
        "harness/a/acc": 0.5,
        "harness/a/acc_stderr": 0.1,
        "harness/a/exact_match/strict-match": 0.25,
        "harness/b/word_perplexity": 12.0,
    }
    assert found.lower_is_better == ["harness/b/word_perplexity"]
    assert found.versions == {"versions": {"a": 1.0}}


@pytest.mark.parametrize("stopped", [False, True])
def test_no_child_of_the_command_outlives_it(tmp_path: Path, *, stopped: bool) -> None:
    """Such as the workers of a data loader, or what a wrapper script has started."""
    pids = tmp_path / "pids"
    both_started = f"while [ $(wc -w < {pids}) -lt 2 ]; do sleep 0.02; done"
    command = (
        "sh",
        "-c",
        f"(sleep infinity & echo $! >> {pids}; wait) & echo $! >> {pids}; {'wait' if stopped else both_started}",
    )
    task = TASK.model_copy(update={"command": command})

    def has_children() -> bool:
        return stopped and pids.is_file() and len(pids.read_text().split()) == 2

    with pytest.raises(ScaletrainError, match="exit code -9" if stopped else "wrote no results"):
        run_lm_eval(task, tmp_path, tmp_path / "out", "cpu", "float32", tmp_path / "log", has_children)
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 2
    wait_until(lambda: not any(is_running(pid) for pid in children), "the children have ended")


def test_a_failed_command_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    def run(*command: str, stopped: bool = False) -> None:
        task = TASK.model_copy(update={"command": command})
        run_lm_eval(task, tmp_path, tmp_path / "out", "cpu", "float32", tmp_path / "log", lambda: stopped)

    with pytest.raises(ScaletrainError, match="ended with exit code 3: no such task") as failed:
        run(sys.executable, "-c", "import sys; print('no such task'); sys.exit(3)")
    assert "its whole output" in str(failed.value.remedy).lower()
    with pytest.raises(ScaletrainError, match="cannot be started: No such file"):
        run("/no/such/program")
    with pytest.raises(ScaletrainError, match="wrote no results"):
        run(sys.executable, "-c", "")
    with pytest.raises(ScaletrainError, match="exit code -9"):
        run(sys.executable, "-c", "import signal; signal.pause()", stopped=True)
