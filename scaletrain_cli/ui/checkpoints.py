"""The screens of `checkpoint` and `evaluation`: tables by step, and one evaluation."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.table import Table

from scaletrain_cli.rundir.checkpoints import Entry
from scaletrain_cli.rundir.evaluations import Evaluation, Validation
from scaletrain_cli.text import bytes_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, show, stdout_console, titled_table

_TITLES = ("step", "age", "size", "ranks", "clean", "attempt", "")
_MIRRORED = "mirrored"


def show_entries(entries: Sequence[Entry], mirrored: Collection[int] | None = None) -> None:
    """Print a table of checkpoints in the given order; the latest without a problem is marked.

    ``mirrored``: steps of the checkpoints in the mirror; None if the run has none.
    """
    titles = _TITLES if mirrored is None else (*_TITLES[:-1], _MIRRORED, _TITLES[-1])
    table = titled_table(titles, "r" * (len(titles) - 1) + "w")
    valid = [entry for entry in entries if not entry.problem]
    for entry in entries:
        checkpoint = entry.checkpoint
        stated = ["", "", "", ""]
        if checkpoint is not None:
            clean = "yes" if checkpoint.clean else "no"
            stated = [bytes_text(checkpoint.size_bytes), str(checkpoint.world_size), clean, str(checkpoint.attempt)]
        note = (
            escaped_text("latest", "bold")
            if valid and entry is valid[-1]
            else escaped_text(entry.problem and f"invalid: {entry.problem}", "red")
        )
        if mirrored is not None:
            stated.append("yes" if checkpoint is not None and entry.step in mirrored else "no")
        table.add_row(str(entry.step), seconds_text(max(0, round(time.time() - entry.written))), *stated, note)
    show(stdout_console(), table)


def entry_json(entry: Entry, mirrored: Collection[int] | None = None) -> dict[str, Any]:
    """Return the same as a JSON object; ``mirrored`` is null if the run has no mirror."""
    checkpoint = entry.checkpoint
    return {
        "name": entry.path.name,
        "step": entry.step,
        "written": entry.written,
        "problem": entry.problem or None,
        "bytes": checkpoint.size_bytes if checkpoint else None,
        "world_size": checkpoint.world_size if checkpoint else None,
        "clean": checkpoint.clean if checkpoint else None,
        "attempt": checkpoint.attempt if checkpoint else None,
        "mirrored": None if mirrored is None else checkpoint is not None and entry.step in mirrored,
    }


_MOST_COLUMNS = 8
_WORST_CLASSES = 10


def show_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print a table with a row per evaluation and a column per metric, without standard errors."""
    names = list(dict.fromkeys(name for one in evaluations for name in one.metrics if not name.endswith("_stderr")))
    shown = names[:_MOST_COLUMNS]
    table = titled_table(("step", "state", *shown), "w" * (2 + len(shown)))
    for one in evaluations:
        values = [f"{one.metrics[name]:.4f}" if name in one.metrics else "" for name in shown]
        table.add_row(str(one.step), escaped_text(_state(one), "red" if one.errors else ""), *values)
    show(stdout_console(), table)


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the metrics, errors and generated texts of one evaluation."""
    console = stdout_console()
    show(console, escaped_text(f"step {evaluation.step}, {_state(evaluation)}, run {evaluation.run_id}"))
    _show_metrics(evaluation.metrics)
    for task, error in evaluation.errors.items():
        show(console, escaped_text(f"{task}: {error}", "red"))
    for one in evaluation.generations:
        show(console, escaped_text(f"{one['task']}: {one['prompt']}", "bold"))
        show(console, escaped_text(one["text"]))


def _show_metrics(metrics: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in metrics.items():
        table.add_row(escaped_text(name), _value(value))
    show(stdout_console(), table)


def show_validations(validations: Sequence[Validation]) -> None:
    """Print a table with a row per validation of the training job and a column per metric."""
    names = list(dict.fromkeys(name for one in validations for name in one.metrics))[:_MOST_COLUMNS]
    table = titled_table(("step", *map(_short, names)), "w" * (1 + len(names)))
    for one in validations:
        table.add_row(str(one.step), *(_value(one.metrics.get(name)) for name in names))
    show(stdout_console(), table)


def show_validation(validation: Validation) -> None:
    """Print the metrics of one validation of the training job, its worst classes and its sample answers."""
    console = stdout_console()
    show(console, escaped_text(f"validation after step {validation.step}"))
    _show_metrics(validation.metrics)
    for key, title in (("classes", "classes"), ("zero_shot_classes", "zero-shot classes")):
        if classes := validation.details.get(key):
            _show_classes(classes, title)
    for answer in validation.details.get("answers", ()):
        show(console, escaped_text(f"{answer['sample']}: {answer['prompt']}", "bold"))
        show(console, escaped_text(answer["answer"]))
        show(console, escaped_text(f"expected: {answer['expected']}", "dim"))


def _show_classes(classes: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the classes with the lowest accuracy or average precision; of equal ones those with more samples first."""
    measures = [name for name in classes[0] if name not in ("class", "samples")]
    seen = [one for one in classes if one[measures[0]] is not None]
    worst = sorted(seen, key=lambda one: (one[measures[0]], -one["samples"]))[:_WORST_CLASSES]
    others = len(classes) - len(seen)
    without = f"; {whole_text(others)} without a sample" if others else ""
    which = f"the {len(worst)} lowest of {whole_text(len(seen))} {title}" if len(worst) < len(seen) else title
    show(stdout_console(), escaped_text(f"{which}{without}", "dim"))
    table = titled_table(("class", "samples", *measures), "w" * (2 + len(measures)))
    for one in worst:
        row = (str(one["class"]), whole_text(one["samples"]), *(_value(one[name]) for name in measures))
        table.add_row(*map(escaped_text, row))
    show(stdout_console(), table)


def _short(name: str) -> str:
    """Return the name of a measure for a column, on two lines if it is long."""
    for long, short in (("recall_at_", "recall@"), ("/image_to_text", "\nto text"), ("/text_to_image", "\nto image")):
        name = name.replace(long, short)
    return name.replace("zero_shot_", "zero-shot\n")


def _value(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"


def _state(evaluation: Evaluation) -> str:
    return f"failed: {', '.join(evaluation.errors)}" if evaluation.errors else evaluation.state
