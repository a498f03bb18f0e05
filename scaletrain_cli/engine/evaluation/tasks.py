"""Evaluate one checkpoint: copy its weights, run every task of the spec, and write the results into its run.

Run lm-evaluation-harness as a command, and read its results.
"""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scaletrain_cli.data.pipeline.tasks import documents
from scaletrain_cli.data.sources.listing import source_files
from scaletrain_cli.data.tokenizers.files import load_tokenizer
from scaletrain_cli.engine.checkpoint.adapter_export import exported_model
from scaletrain_cli.engine.checkpoint.export import export, remove_left_drafts
from scaletrain_cli.engine.checkpoint.tokenizer_export import text_files
from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.evaluation.inference import generate, load_model, mean_loss
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.errors import ExitCode, PreemptedError, ScaletrainError, UsageError
from scaletrain_cli.hub.cache import HubSettings
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, checkpoint_path, read_checkpoint, verify
from scaletrain_cli.rundir.evaluations import Evaluation, log_evaluation, read_evaluation, write_evaluation
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder, read_record
from scaletrain_cli.safe_files import closing_descriptor, open_to_append
from scaletrain_cli.spec.evaluation import GenerationTask, LmEvalTask, LossTask
from scaletrain_cli.spec.hub_files import with_local_files
from scaletrain_cli.spec.sources import SourceSpec
from scaletrain_cli.worker import Rank
from scaletrain_cli.worker.trackers import log_evaluations, start_trackers

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
            # waitid does not reap the process here.
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and not stopped():
                time.sleep(_POLL_SECONDS)
        finally:  # loaders and launchers leave children, which hold memory of the device
            os.killpg(process.pid, signal.SIGKILL)  # of the process that is not reaped yet, so the group is this one
            process.wait()
    if process.returncode != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-_END_CHARACTERS:]
        params = {"program": words[0], "exit_code": process.returncode, "end": end, "log": str(log)}
        raise ScaletrainError(Reason("engine.lm-eval-failed", params))
    if not (files := sorted(output.rglob("results_*.json"))):
        raise ScaletrainError(Reason("engine.lm-eval-without-results", {"program": words[0], "folder": str(output)}))
    return read_results(task.name, json.loads(files[-1].read_text(encoding="utf-8")))


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
    scores: dict[str, float] = {}
    for task, values in data["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and type(value) in (int, float) and math.isfinite(value):
                scores[f"{name}/{task}/{metric}" + ("" if kind == "none" else f"/{kind}")] = float(value)
    lower = [
        f"{name}/{task}/{metric}"
        for task, metrics in data.get("higher_is_better", {}).items()
        for metric, is_higher in metrics.items()
        if is_higher is False
    ]
    return Results(scores, sorted(lower), {key: data[key] for key in _VERSIONS if key in data})


logger = logging.getLogger(__name__)


def evaluate_checkpoint(rank: Rank) -> ExitCode:
    """Run the tasks of the checkpoint that the environment names; return the exit code.

    Tasks with a result are not run again after a restart. A task that fails does not keep the others from running.
    """
    own = rank.environment.run
    run = RunDir(own.path.parent / os.environ["SCALETRAIN_EVALUATED_RUN"])
    step, record = int(os.environ["SCALETRAIN_EVALUATED_STEP"]), read_record(run)
    # The node agent has fetched the files of the hub, and set the cache of this environment.
    record = replace(record, spec=with_local_files(record.spec, record.hub, HubSettings.from_environment(os.environ)))
    if Path(record.working_folder).is_dir():  # relative paths in the spec
        os.chdir(record.working_folder)
    evaluation = read_evaluation(run, step) or Evaluation(step, own.run_id, "requested", 0.0)
    copied = own.path / "weights"
    if not copied.is_dir():
        try:
            copy_weights(run, record, step, copied)
        except (ScaletrainError, OSError) as error:
            write_evaluation(run, replace(evaluation, state="failed", errors={"checkpoint": str(error)[:2000]}))
            raise
    evaluation = write_evaluation(run, replace(evaluation, state="running", errors={}))
    done = evaluation.finished_tasks()
    with_model = _ModelOnDemand(copied, record, lambda: rank.preemption.raised)
    for task in record.spec.evaluation.tasks:
        if rank.preemption.raised:
            raise PreemptedError(Reason("engine.evaluation-preempted"))
        if not _is_current(run, evaluation):
            logger.warning("step %d was rolled back; its evaluation ends", step)
            return ExitCode.DONE
        if task.name in done:
            continue
        began = time.monotonic()
        try:
            evaluation = write_evaluation(run, _run_task(task, evaluation, with_model, own))
        except Exception as error:  # of any library: the other tasks are run all the same
            if rank.preemption.raised:  # the signal has ended the command, too
                raise PreemptedError(Reason("engine.evaluation-preempted")) from error
            logger.error("task %s failed: %s", task.name, error)
            evaluation = replace(evaluation, errors={**evaluation.errors, task.name: str(error)[:2000]})
        logger.info("task %s took %.1f s", task.name, time.monotonic() - began)
    if not _is_current(run, evaluation):
        return ExitCode.DONE
    log_evaluation(run, evaluation)  # first: training may delete the checkpoint of an evaluation that is over
    evaluation = write_evaluation(run, replace(evaluation, state="failed" if evaluation.errors else "done"))
    record_event(
        run, "evaluated", step=step, evaluation=own.run_id, metrics=evaluation.metrics, failed=[*evaluation.errors]
    )
    shutil.rmtree(copied, ignore_errors=True)
    ends = [event["event"] for event in read_events(run) if event["event"] in ("started", "resumed", "finished")]
    if ends[-1:] == ["finished"]:  # otherwise rank 0 of the run passes the metrics on to its trackers
        trackers = start_trackers(run, record, rank.environment.attempt)
        log_evaluations(run, trackers, step)
        trackers.finish("finished")
    return ExitCode.DONE if not evaluation.errors else ExitCode.DO_NOT_REQUEUE


def _is_current(run: RunDir, evaluation: Evaluation) -> bool:
    """Return True if the run still has this evaluation: a rollback removes those of undone steps."""
    now = read_evaluation(run, evaluation.step)
    return now is not None and now.run_id == evaluation.run_id


def copy_weights(run: RunDir, record: RunRecord, step: int, output: Path) -> None:
    """Write the verified checkpoint as a Hugging Face folder; training may delete the checkpoint afterwards.

    Raises UsageError if the checkpoint is missing or damaged.
    """
    remove_left_drafts(output)  # also if the checkpoint has gone since
    path = checkpoint_path(checkpoint_folder(run, record.spec), step)
    checkpoint = read_checkpoint(path)
    problems = verify(checkpoint) if isinstance(checkpoint, Checkpoint) else [str(checkpoint)]
    if problems:
        raise UsageError(Reason("engine.not-a-checkpoint", {"path": str(path), "problem": "; ".join(problems)}))
    dtype = forward_dtype(record.spec.training.precision)
    export([path], record.spec, output, dtype, text_files(record.spec, run.path.parent, run))


class _ModelOnDemand:
    """The model and the tokenizer of the copied weights, loaded at the first use and released for other programs."""

    def __init__(self, folder: Path, record: RunRecord, stopped: Callable[[], bool]) -> None:
        self.folder, self.spec, self.stopped = folder, record.spec, stopped
        self.device = torch.device("cpu" if record.spec.cluster.gpu == "cpu" else "cuda")
        self.dtype = forward_dtype(record.spec.training.precision)
        self._model: CausalLM | None = None

    def model(self) -> CausalLM:
        if self._model is None:
            self._model = load_model(self.folder, exported_model(self.spec.transformer), self.device, self.dtype)
        return self._model

    def release(self) -> None:
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def tokenizer(self) -> Any:
        """Return the tokenizer. Raises UsageError if the weights were exported without one."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(Reason("engine.evaluation-without-tokenizer"))
        return load_tokenizer(str(path))

    def end_tokens(self) -> list[int]:
        """Return the ids that end a text as the folder states them for generation; empty if it does not."""
        paths = [self.folder / name for name in ("generation_config.json", "config.json")]
        stated = json.loads(next(path for path in paths if path.is_file()).read_text(encoding="utf-8"))
        ids = stated.get("eos_token_id")
        return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _run_task(
    task: LossTask | GenerationTask | LmEvalTask, evaluation: Evaluation, loaded: _ModelOnDemand, own: RunDir
) -> Evaluation:
    if isinstance(task, LossTask):
        return _loss(task, evaluation, loaded)
    if isinstance(task, GenerationTask):
        tokenizer, generations = loaded.tokenizer(), list(evaluation.generations)
        for number, prompt in enumerate(task.prompts):
            tokens = generate(
                loaded.model(),
                tokenizer.encode(prompt).ids,
                max_new_tokens=task.max_new_tokens,
                temperature=task.temperature,
                end_tokens=loaded.end_tokens(),
                seq_len=loaded.spec.transformer.seq_len,
                seed=loaded.spec.training.seed + number,
                device=loaded.device,
            )
            generations.append({"task": task.name, "prompt": prompt, "text": tokenizer.decode(tokens)})
        return replace(evaluation, generations=generations)
    loaded.release()
    output = own.path / "lm-eval" / task.name
    device, dtype = "cpu" if loaded.device.type == "cpu" else "cuda:0", str(loaded.dtype).removeprefix("torch.")
    log = own.path / f"lm-eval-{task.name}.log"
    results = run_lm_eval(task, loaded.folder, output, device, dtype, log, loaded.stopped)
    return replace(
        evaluation,
        metrics={**evaluation.metrics, **results.metrics},
        lower_is_better=[*evaluation.lower_is_better, *results.lower_is_better],
        versions={**evaluation.versions, task.name: results.versions},
    )


def _loss(task: LossTask, evaluation: Evaluation, loaded: _ModelOnDemand) -> Evaluation:
    tokenizer = loaded.tokenizer()
    source = SourceSpec(name="evaluation", path=task.source)
    texts = islice(documents(source_files(source, key="evaluation.tasks.source", evaluation=True)), task.documents)
    loss = mean_loss(
        loaded.model(), (tokenizer.encode(text).ids for text in texts), loaded.spec.transformer.seq_len, loaded.device
    )
    perplexity = math.exp(min(loss, 700.0))  # a finite number
    metrics = {f"{task.name}/loss": loss, f"{task.name}/perplexity": perplexity}
    return replace(evaluation, metrics={**evaluation.metrics, **metrics})
