"""Run lm-evaluation-harness as a command, and read its results."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import closing_descriptor, open_to_append
from scaletrain_cli.spec.evaluation import LmEvalTask

_VERSIONS: tuple[str, ...] = ("lm_eval_version", "git_hash", "versions", "n-shot")
_POLL_SECONDS = 0.5
_END_CHARACTERS = 1000  # of the output of a failed command, in its error


class Results(NamedTuple):
    """Metrics ``TASK/METRIC`` of one call, the names of those of which the least is best, and versions."""

    metrics: dict[str, float]
    lower_is_better: list[str]
    versions: dict[str, Any]


def run_lm_eval(
    task: LmEvalTask, model: Path, output: Path, device: str, dtype: str, log: Path, stopped: Callable[[], bool]
) -> Results:
    """Run the command on a Hugging Face folder. Its output goes to ``log``. Raises ScaletrainError if it fails.

    The command is ended once ``stopped`` returns True, with all processes of its session.
    """
    words = command_line(task, model, output, device, dtype)
    with closing_descriptor(open_to_append(log)) as file:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            params: dict[str, Any] = {"program": words[0], "error": error.strerror or str(error)}
            raise ScaletrainError(Reason("engine.lm-eval-not-started", params)) from error
        try:
            while not _has_ended(process) and not stopped():
                time.sleep(_POLL_SECONDS)
        finally:  # loaders and launchers leave children, which hold memory of the device
            os.killpg(process.pid, signal.SIGKILL)  # of the process that is not reaped yet, so the group is this one
            process.wait()
    if process.returncode != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-_END_CHARACTERS:]
        params = {"program": words[0], "exit_code": process.returncode, "end": end, "log": str(log)}
        raise ScaletrainError(Reason("engine.lm-eval-failed", params))
    files = sorted(output.rglob("results_*.json"))
    if not files:
        raise ScaletrainError(Reason("engine.lm-eval-without-results", {"program": words[0], "folder": str(output)}))
    return read_results(task.name, json.loads(files[-1].read_text(encoding="utf-8")))


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True once the process has ended, without reaping it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def command_line(task: LmEvalTask, model: Path, output: Path, device: str, dtype: str) -> list[str]:
    """Return the command line of ``lm-eval run``."""
    words = [*task.command, "run", "--model", "hf", "--model_args", f"pretrained={model},dtype={dtype}"]
    words += ["--tasks", ",".join(task.tasks), "--batch_size", task.batch_size, "--device", device]
    words += ["--output_path", str(output)]
    words += [] if task.num_fewshot is None else ["--num_fewshot", str(task.num_fewshot)]
    words += [] if task.limit is None else ["--limit", str(task.limit)]
    words += [] if task.include_path is None else ["--include_path", task.include_path]
    return [*words, *(["--apply_chat_template"] if task.apply_chat_template else [])]


def read_results(name: str, data: dict[str, Any]) -> Results:
    """Return the results under ``NAME/TASK/METRIC``; metrics of filters other than ``none`` have the filter's name.

    Standard errors are ``..._stderr``.
    """
    found = dict(_metrics(name, data["results"]))
    higher = data.get("higher_is_better", {})
    lower = [
        f"{name}/{task}/{metric}"
        for task, metrics in higher.items()
        for metric, is_higher in metrics.items()
        if is_higher is False
    ]
    versions = {key: data[key] for key in _VERSIONS if key in data}
    return Results(found, sorted(lower), versions)


def _metrics(name: str, results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and type(value) in (int, float) and math.isfinite(value):
                yield f"{name}/{task}/{metric}" + ("" if kind == "none" else f"/{kind}"), float(value)
