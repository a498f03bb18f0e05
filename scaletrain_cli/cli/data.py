"""`scaletrain data`: prepare the data of a spec ahead of its runs, report on them, and show what a model reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrain_cli.cli.options import (
    AsJson,
    Overrides,
    SpecPath,
    describe,
    require_replaceable,
    show_fetch,
    verb_group,
)
from scaletrain_cli.errors import ExitCode, SpecError, UsageError
from scaletrain_cli.launch import engine_process
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, find_run, runs_root
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.text import counted, visible, whole_text
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.spec import DataSpec, RunSpec

app = verb_group("Prepare, show, report on and upload training data.")
EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)
_PREPARE_EXIT_CODES = (*EXIT_CODES, ExitCode.SCHEDULER)
_NEEDS = ("tokenizers",)
_IMAGE_NEEDS = ("torch", "PIL")


@app.command(epilog=describe(_PREPARE_EXIT_CODES))
def prepare(
    spec: SpecPath,
    overrides: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of processes for text (default: the CPU cores)."),
    ] = None,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Queue the preparation as a job on CPU nodes of the spec's cluster, and return."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prepare the data of a spec ahead of its runs: the steps of data.prepare, then tokenization.

    A preparation that was stopped continues where it was. Prepared data are reused. Any number of these commands, on
    any machines that share the runs root, share the work.

    With --submit the work is done by tasks with --workers processes in total: an array, and a job after it that
    completes the work and fails if the data are not prepared, or one Indexed Job on Kubernetes. The id of the job that
    ends last is printed to stdout.
    """
    if submit:
        _queue_preparation(spec, overrides or (), workers, as_json)
        return
    from scaletrain_cli.spec import load_spec

    prepared = _engine_answer("prepare", load_spec(spec, overrides or ()), str(workers or 0))
    if as_json:
        print_json(prepared)
        return
    if "train_samples" in prepared:
        left_out = f", {whole_text(prepared['bad_samples'])} left out" if prepared["bad_samples"] else ""
        say(
            f"{whole_text(prepared['train_samples'])} training samples, "
            f"{whole_text(prepared['validation_samples'])} validation samples{left_out}"
        )
        for source in prepared["sources"]:
            typer.echo(visible(source["path"]))
        return
    say(
        f"{whole_text(prepared['train_tokens'])} training tokens, "
        f"{whole_text(prepared['validation_tokens'])} validation tokens, "
        f"vocabulary of {whole_text(prepared['vocab_size'])}"
    )
    for path in [source["path"] for source in prepared.get("sources", ())] or [prepared["path"]]:
        typer.echo(visible(path))


def _queue_preparation(spec: Path, overrides: Sequence[str], workers: int | None, as_json: bool) -> None:
    """Queue the preparation and print the id of the job that ends when the data are prepared."""
    from scaletrain_cli.launch.preparation import queue_preparation
    from scaletrain_cli.spec import load_spec

    preparation = queue_preparation(load_spec(spec, overrides), workers)
    if as_json:
        job = None if preparation is None else asdict(preparation[0]) | {"folder": str(preparation[1])}
        print_json({"prepared": preparation is None, "job": job})
    elif preparation is None:
        say("the data are prepared")
    else:
        queued, folder = preparation
        tasks = counted(queued.tasks, "task")
        if queued.others:
            say(f"queued {tasks} as job {queued.others}, and job {queued.job_id} after them")
            say(f"logs and the reason of a failure: {folder}")
        else:  # its files are not on this machine
            say(f"created job {queued.job_id} with {tasks}; its logs and its end are in the cluster")
        typer.echo(visible(queued.job_id))


@app.command(epilog=describe(EXIT_CODES))
def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|RUN",
            help="Path of the run spec (YAML); - reads stdin; or a run id, unique prefix or run directory.",
        ),
    ],
    overrides: Overrides = None,
    row: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="First row or image to show, counted from 1.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show the samples of this training step.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=0, help="Rank whose samples of the step to show (default: all)."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(metavar="M", min=1, help="Micro-batch of the step to show (default: all)."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows or samples to show.")] = 3,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source of data.sources (default: the first one).")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Show images of the validation split (default: training).")
    ] = False,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the images as the model gets them to a PNG file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show training data as the model gets them: samples of a step, rows for fine-tuning, or images.

    With --step the batch that the ranks read in that step: samples in their order, with source, documents, positions
    and the part in the loss marked. The data must be prepared.

    Without --step rows rendered and truncated. Reads only the first rows, and prepares nothing. Requires
    training.objective: sft or dpo.

    Of images their keys, sizes and labels or captions; the data must be prepared. With --png a sheet: each image as in
    evaluation and as in the first four passes of training, or with --step as the ranks get it, erased and mixed.
    """
    from scaletrain_cli.spec.losses import LOSSES_OF
    from scaletrain_cli.ui.data_images import show_images, show_rows, show_samples

    spec, run = _spec_or_run(target, overrides)
    of_images = spec.training.objective in LOSSES_OF
    sheet = "" if png is None else str(png.absolute())
    words: tuple[str, ...]
    names = [section.name for section in spec.data.all_sources]
    if source is not None and (of_images or step is not None or source not in names):
        raise UsageError(Reason("data.no-source-to-show", {"source": source, "names": names}))
    for option, asked in (("--png", png is not None), ("--validation", validation)):
        if asked and not of_images:
            raise UsageError(Reason("data.requires-images", {"option": option}))
    if validation and step is not None:
        raise UsageError(Reason("data.validation-or-step"))
    if png is not None:
        require_replaceable("--png", png)
    if step is None:
        for option, given in (("--rank", rank), ("--micro-batch", micro_batch)):
            if given is not None:
                raise UsageError(Reason("data.requires-step", {"option": option}))
        if spec.training.objective == "causal_lm":
            raise UsageError(Reason("data.nothing-to-show"))
        words = (str(row or 1), str(count), source or "")
        if of_images:
            words = (*words[:2], _word(run and run.path), "validation" if validation else "train", sheet)
        answer = _in_engine("show", spec, run, *words, needs=_IMAGE_NEEDS if of_images else (*_NEEDS, "jinja2"))
    else:
        if row is not None:
            raise UsageError(Reason("data.row-or-step"))
        words = (_word(run and run.path), str(step), _word(rank), _word(micro_batch), str(count), sheet)
        answer = _in_engine("step", spec, run, *words, needs=_IMAGE_NEEDS if of_images else (*_NEEDS, "torch"))
    if as_json:
        print_json(answer)
    elif of_images:
        show_images(answer)
    elif step is None:
        show_rows(answer)
    else:
        show_samples(answer)


@app.command(epilog=describe(EXIT_CODES))
def stats(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|DATASET|RUN",
            help="Path of the run spec (YAML); - reads stdin; or the folder of a prepared dataset; or a run id, unique "
            "prefix or run directory.",
        ),
    ],
    overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole report as one HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report of prepared data: documents and tokens after each step, and why documents were removed.

    Of images their sizes, classes, captions, and duplicates within and between the splits.

    Also languages, lengths, duplicates, kinds of characters, documents that cannot be read, and the mixture of the run.
    The data must be prepared. Examples of documents in the HTML page and the JSON have placeholders for mail addresses,
    IP addresses, phone numbers and keys.
    """
    from scaletrain_cli.data.images.compatibility import SCHEMA as IMAGE_INDEX
    from scaletrain_cli.data.report import IMAGE_REPORT, read_report
    from scaletrain_cli.rundir.documents import read_document
    from scaletrain_cli.ui.data_images import show_image_report
    from scaletrain_cli.ui.data_page import page
    from scaletrain_cli.ui.data_report import show_report

    if html is not None:
        require_replaceable("--html", html)
    if Path(target, "dataset.json").is_file():
        if overrides:
            raise UsageError(Reason("data.set-requires-spec", {"target": target}))
        dataset = read_document(Path(target, "dataset.json")) or {}
        if dataset.get("schema") == IMAGE_INDEX:
            report = engine_process.run_engine_command("stats", os.path.abspath(target), needs=())
        else:
            report = read_report({str(dataset.get("source") or Path(target).name): Path(target)})
        name = report["sources"][0]["source"]
    elif os.path.isdir(target) and not os.path.lexists(os.path.join(target, "run.json")):
        params = {"folder": target, "error": "it has neither dataset.json nor, as a run, run.json"}
        raise UsageError(Reason("engine.not-a-dataset", params))
    else:
        spec, run = _spec_or_run(target, overrides)
        name, report = spec.name, _in_engine("stats", spec, run, _word(run and run.path), needs=_NEEDS)
    of_images = report["schema"] == IMAGE_REPORT
    if html is not None and of_images:
        raise UsageError(Reason("data.images-without-page"))
    if html is not None:
        replace_file(html, page(report, name), public=True)
    if as_json:
        print_json(report)
        return
    if of_images:
        show_image_report(report)
        return
    show_report(report)
    if html is not None:
        say(f"wrote {html}")


@app.command(epilog=describe(EXIT_CODES))
def upload(
    spec: SpecPath,
    destination: Annotated[
        str, typer.Argument(metavar="URL", help="Folder of an object store: s3://, gs:// or az://.")
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Copy the prepared data of a spec to an object store, and print the lines of a spec that reads them there.

    Each node reads them through a cache (data.cache). Credentials come from the environment. An upload that was stopped
    continues where it was.
    """
    from scaletrain_cli.spec import load_spec

    run = load_spec(spec, overrides or ())
    uploaded = _engine_answer("upload", run, destination)
    if as_json:
        print_json(uploaded)
    else:
        paths = {source["name"]: source["path"] for source in uploaded["sources"]}
        for line in _lines_with_paths(run.data, paths):
            typer.echo(visible(line))


def _engine_answer(command: str, spec: RunSpec, *words: str) -> dict[str, Any]:
    """Fetch the data of a spec from the hub, and return the answer of a command of the engine about them."""
    from scaletrain_cli.launch.hub_fetch import DATA, fetched_spec

    return _in_engine(command, fetched_spec(spec, DATA, show_fetch()), None, *words, needs=_NEEDS)


def _lines_with_paths(data: DataSpec, paths: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a spec with the sources of ``data`` at other paths, by their names."""
    yield "data:"
    if data.source is not None:
        yield f"  source: {paths[data.all_sources[0].name]}"
        return
    yield "  sources:"
    for source in data.sources:
        share = {"weight": source.weight, "epochs": source.epochs}
        fields = {"name": source.name, "path": paths[source.name], **share}
        written = ", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items() if value is not None)
        yield f"    - {{{written}}}"


def _spec_or_run(target: str, overrides: list[str] | None) -> tuple[RunSpec, RunDir | None]:
    """Return the spec of a file, or that of a run with the run. Raises SpecError and UsageError."""
    from scaletrain_cli.launch.epochs import in_steps
    from scaletrain_cli.launch.hub_fetch import DATA, fetched_spec
    from scaletrain_cli.rundir.record import read_record
    from scaletrain_cli.spec import load_spec

    if target == "-" or os.path.isfile(target) or target.endswith((".yaml", ".yml")):
        given = load_spec(Path(target), overrides or ())
        try:
            given, _ = in_steps(given, target)
        except SpecError:
            raise
        except UsageError:  # raised again by what needs the steps
            pass
        return fetched_spec(given, DATA, show_fetch()), None
    run = find_run(target)
    if overrides:
        raise UsageError(Reason("data.set-requires-spec", {"target": run.run_id}))
    record = read_record(run)
    return fetched_spec(record.spec, DATA, show_fetch(), record.hub), run


def _in_engine(command: str, spec: RunSpec, run: RunDir | None, *words: str, needs: tuple[str, ...]) -> dict[str, Any]:
    """Run a command in a process of its own, which keeps numpy and the tokenizer out of this one."""
    from scaletrain_cli.rundir.record import read_record

    root, start = runs_root(), None
    if run is not None:  # relative paths of its spec are those of the folder that it was submitted from
        root, working_folder = run.path.parent, read_record(run).working_folder
        start = working_folder if os.path.isdir(working_folder) else None
    with engine_process.spec_file(spec) as file:
        words = (str(file), str(root.absolute()), *words)
        return engine_process.run_engine_command(command, *words, needs=needs, cwd=start)


def _word(value: object) -> str:
    return "" if value is None else str(value)
