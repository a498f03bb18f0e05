"""`scaletrain submit`: plan and check a run, or every run of a sweep, ask once, and submit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scaletrain_cli.cli.options import (
    AsJson,
    ClusterName,
    Overrides,
    Prepare,
    SpecPath,
    TrustOwner,
    Yes,
    as_choice,
    complete_setting,
    confirm,
    load_varied,
    seconds_of,
    show_fetch,
)
from scaletrain_cli.errors import ExitCode, InfeasibleError, SpecError, UsageError, sentences
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.safe_files import require_writable
from scaletrain_cli.text import counted, visible
from scaletrain_cli.ui.console import document, say, suggest, warn
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.base import SubmissionSummary
    from scaletrain_cli.launch.preparation import Choice
    from scaletrain_cli.launch.prepared_submission import PreparedSubmission, SubmittedRun
    from scaletrain_cli.launch.short_jobs import RehearsalResult
    from scaletrain_cli.launch.sweep import Point
    from scaletrain_cli.plan.data_size import DataSize
    from scaletrain_cli.spec import RunSpec


EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.WRONG_NODES)


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Run id to use; submitting the same spec again under the same id has no effect.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the rendered job without creating or submitting anything.")
    ] = False,
    output: Annotated[
        Literal["script", "yaml", "json"] | None,
        typer.Option(help="Like --dry-run, in this format: script (Slurm), yaml (Kubernetes) or json."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="First run a short job that checks the nodes against the plan (Slurm).")
    ] = False,
    rehearsed: Annotated[
        bool, typer.Option("--rehearse", help="First rehearse the run in a short job; submit only if no item fails.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Submit one run per value, e.g. training.optimizer.lr=1e-4,3e-4; repeat for all combinations.",
            autocompletion=complete_setting,
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of concurrent sweep runs."),
    ] = None,
    array: Annotated[
        bool, typer.Option("--array", help="With --sweep: submit all runs as one job array (Slurm).")
    ] = False,
    idle_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End the run, its state saved, once it has done nothing for this time, e.g. 30m: "
            "cluster.idle_timeout.",
        ),
    ] = None,
    prepare: Prepare = "auto",
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run and submit it to the scheduler named in the spec.

    Prints the run id to stdout and everything else to stderr. On a terminal, asks for confirmation first.

    Data that are not prepared are prepared before the run is queued, or by a job on CPU nodes that the run waits for,
    so that no GPU waits for them: see --prepare.

    With --sweep, all points are planned and checked before the first is submitted; either all are submitted or none.
    Each point is a separate run, named after its values.
    """
    dry_run = dry_run or output is not None
    if idle_timeout is not None:
        overrides = [*(overrides or ()), f"cluster.idle_timeout={seconds_of('--idle-timeout', idle_timeout)}"]
    if output is not None and sweep:
        raise UsageError("--output cannot be combined with --sweep. Use --dry-run, which prints every job.")
    for option, given in (("--max-concurrent", max_concurrent is not None), ("--array", array)):
        if given and not sweep:
            raise UsageError(f"{option} requires --sweep.")
    if sweep:
        from scaletrain_cli.launch.sweep import MOST_POINTS
        from scaletrain_cli.spec.source import variants

        points = variants(sweep, SWEEP_OPTION, MOST_POINTS)
        if len(points) > 1:
            for option, given in (("--probe", probe), ("--rehearse", rehearsed)):
                if given:
                    raise UsageError(f"{option} cannot be combined with --sweep. Use it with a single run first.")
            submit_points(
                spec,
                overrides or (),
                points,
                cluster=cluster,
                run_id=run_id,
                max_concurrent=max_concurrent,
                array=array,
                dry_run=dry_run,
                prepare=as_choice(prepare),
                yes=yes,
                as_json=as_json,
            )
            return
        overrides = [*(overrides or ()), *points[0]]  # a sweep of one value is a plain run
    from scaletrain_cli.launch.backends.registry import all_backends, backend_for
    from scaletrain_cli.launch.prepared_submission import PreparedSubmission
    from scaletrain_cli.spec import load_spec

    run_spec = load_spec(spec, overrides or (), cluster=cluster)
    if probe and (dry_run or not backend_for(run_spec.cluster.scheduler).can_probe):
        able = ", ".join(backend.name for backend in all_backends() if backend.can_probe)
        raise UsageError(f"--probe requires cluster.scheduler = {able} and cannot be combined with --dry-run.")
    if rehearsed and dry_run:
        raise UsageError("--rehearse submits a job and cannot be combined with --dry-run.")

    def prepared_submission() -> PreparedSubmission:
        return PreparedSubmission.prepare(
            run_spec,
            run_id=run_id,
            trust_owner=trust_owner,
            name=spec,
            dry_run=dry_run,
            prepare=as_choice(prepare),
            on_preparation=say,
        )

    prepared = prepared_submission()
    if prepared.epochs is not None:
        say(str(prepared.epochs))
    if dry_run:
        _show_rendered(prepared, output, as_json)
        return
    if prepared.earlier is not None:
        print_submitted(prepared.create_and_submit(), {}, as_json, before=True)
        return
    summary = checked(prepared, run_id, as_json)
    if probe:
        from scaletrain_cli.ui.submission import show_probe

        show_probe(prepared.backend.probe(prepared.spec, prepared.plan))
    passed: dict[str, object] = {}
    if rehearsed:
        passed = {"rehearsal": _rehearse(run_spec, spec, yes=yes, as_json=as_json).to_json()}
        prepared = prepared_submission()  # with the plan that the measured steps correct
    confirm(f"Submit to {run_spec.cluster.scheduler}?", yes)
    # The id is printed before the request, whose answer may be lost.
    done = prepared.create_and_submit(lambda run: say(f"run id {run.run_id}"), show_fetch(), as_choice(prepare), say)
    print_submitted(done, summary.to_json() | passed, as_json)


def _rehearse(run_spec: RunSpec, file: Path, *, yes: bool, as_json: bool) -> RehearsalResult:
    """Rehearse all items of a run with the defaults of `scaletrain rehearse`. Exits with 3 if one fails."""
    from scaletrain_cli.cli.rehearse import DEFAULT_BUDGET_SECONDS, DEFAULT_TIMEOUT_SECONDS, rehearse
    from scaletrain_cli.diagnosis.rehearsal import Options
    from scaletrain_cli.launch.short_jobs import chosen_items

    options = Options(chosen_items((), ()), DEFAULT_BUDGET_SECONDS)
    rehearsed = rehearse(run_spec, file, options, None, DEFAULT_TIMEOUT_SECONDS, yes=yes)
    if not as_json:
        from scaletrain_cli.ui.short_jobs import show_rehearsal

        show_rehearsal(rehearsed)
    if rehearsed.exit_code != ExitCode.DONE:
        failed = [item.name for item in rehearsed.rehearsal.items if item.verdict == "failed"]
        raise InfeasibleError(Reason("rehearsal.not-submitted", {"failed": failed, "run": str(rehearsed.run.path)}))
    return rehearsed


def _show_rendered(prepared: PreparedSubmission, output: str | None, as_json: bool) -> None:
    from scaletrain_cli.launch.submit import in_format

    if output is None:  # a manifest may be for another machine
        require_writable(prepared.root, "no run can be submitted")
    for warning in (*prepared.warnings, *prepared.backend.notes(prepared.spec)):
        warn(sentences(warning))
    job = prepared.render()
    text = in_format(prepared.backend, job.whole_text, output) if output else job.whole_text
    if as_json:
        shown = {"run_id": job.run_id, "run_dir": str(job.run_dir), "dry_run": True}
        print_json(shown | {"scheduler": prepared.backend.name, "would_send": text})
    else:
        typer.echo(document(text), nl=False)


def checked(prepared: PreparedSubmission, run_id: str | None, as_json: bool) -> SubmissionSummary:
    """Query the scheduler about a submission and print what is to be confirmed. Raises SchedulerError."""
    from scaletrain_cli.ui.submission import show_before_submission

    summary = prepared.check()
    for note in summary.notes:
        warn(note)
    if not as_json:
        show_before_submission(summary, run_id)
    return summary


def print_submitted(done: SubmittedRun, other_keys: dict[str, object], as_json: bool, *, before: bool = False) -> None:
    """Print the run and its job. ``before``: the scheduler had accepted the job before this command."""
    run = done.run
    if as_json:
        answer = {"run_id": run.run_id, "run_dir": str(run.path), "created": done.created}
        print_json(answer | {"scheduler": done.scheduler, "job_id": done.job_id} | other_keys)
        return
    say(f"{'already submitted' if before else 'submitted'}: job {done.job_id} in {run.path}")
    suggest(useful_commands(run.run_id))
    typer.echo(visible(run.run_id))


def useful_commands(run_id: str) -> dict[str, str]:
    """Return follow-up commands for a run, by purpose."""
    return {
        "show its state": f"scaletrain status {run_id}",
        "watch it": f"scaletrain watch {run_id}",
        "show its output": f"scaletrain logs {run_id} --follow",
        "cancel it": f"scaletrain cancel {run_id}",
    }


SWEEP_OPTION = "--sweep"
_SWEEP_SCHEMA = {"schema": "scaletrain.submit-sweep/v1"}


def submit_points(
    spec: Path,
    overrides: Sequence[str],
    points: Sequence[tuple[str, ...]],
    *,
    cluster: str | None,
    run_id: str | None,
    max_concurrent: int | None,
    array: bool,
    dry_run: bool,
    prepare: Choice,
    yes: bool,
    as_json: bool,
) -> None:
    """Submit the runs of a sweep and print their run ids to stdout, one per line."""
    from scaletrain_cli.launch.backends.base import notes_json
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.preparation import PreparedData, prepare_data
    from scaletrain_cli.launch.resource_checks.checks import require_external
    from scaletrain_cli.launch.shared_folder import disk_space_notes
    from scaletrain_cli.launch.sweep import submit_as_array, submit_sweep

    sweep, planned = _plan_points(spec, overrides, points, cluster, run_id, None if dry_run else prepare)
    section = planned[0].spec.cluster
    if len({point.spec.cluster.scheduler for point in planned}) > 1:
        raise UsageError(
            f"{SWEEP_OPTION} cluster.scheduler: all runs of a sweep use one scheduler. Submit one sweep per scheduler."
        )
    scheduler = backend_for(section.scheduler)
    if array:
        scheduler.require_array([point.spec for point in planned])
    cap = scheduler.max_concurrent(section, max_concurrent, len(planned))
    not_checked: dict[Reason, None] = {}
    for point in planned:
        not_checked |= dict.fromkeys(require_external(point.spec, point.snapshot))
    require_writable(runs_root(), "no run can be submitted")
    if dry_run:
        for warning in dict.fromkeys([*not_checked, *(note for one in planned for note in scheduler.notes(one.spec))]):
            warn(sentences(warning))
        runs = [point.new_record() for point in planned]
        whole = {"array": scheduler.render_array(sweep, runs, cap)} if array else {}
        texts = [scheduler.render(run, record) for run, record in runs]
        if as_json:
            shown = [
                {"run_id": point.run_id, "overrides": list(point.overrides), "would_send": text}
                for point, text in zip(planned, texts, strict=True)
            ]
            head = {"sweep": sweep, "scheduler": section.scheduler, "dry_run": True}
            print_json(_SWEEP_SCHEMA | head | whole | {"runs": shown})
            return
        for text in whole.values():
            typer.echo(document(text))
        for point, text in zip(planned, texts, strict=True):
            typer.echo(visible(f"# {point.run_id}: {', '.join(point.overrides)}"))
            typer.echo(document(text))
        return

    distinct: dict[str, Point] = {}  # one preflight per distinct cluster section
    for point in planned:
        distinct.setdefault(point.spec.cluster.model_dump_json(), point)
    results = [scheduler.preflight(point.spec, point.plan) for point in distinct.values()]
    largest = max(planned, key=lambda point: point.plan.durability.checkpoint_bytes)
    space = disk_space_notes(largest.spec, largest.plan, runs_root(), runs=len(planned))
    of_scheduler = [warning for result in results for warning in result.warnings]
    warnings = list(dict.fromkeys([*not_checked, *of_scheduler, *space]))
    for warning in warnings:
        warn(sentences(warning))
    if not as_json:
        from scaletrain_cli.ui.submission import show_points

        show_points(planned, results[0].start, cap)
    at_once = "all at once" if cap == len(planned) else f"{cap} at a time"
    confirm(f"Submit {counted(len(planned), 'run')} to {section.scheduler}, {at_once}?", yes)
    prepared: dict[str, PreparedData] = {}  # points with the same data share the work
    for point in planned:
        data = _data_of(point.spec)
        if data not in prepared:
            prepared[data] = prepare_data(point.spec, prepare, say)
    planned = [replace(point, data=prepared[_data_of(point.spec)]) for point in planned]
    done = submit_as_array(sweep, planned, cap) if array else submit_sweep(sweep, planned, cap, say)
    if as_json:
        rows = [
            {"run_id": one.run.run_id, "run_dir": str(one.run.path), "job_id": one.job_id}
            | {"created": one.created, "overrides": list(point.overrides)}
            for one, point in zip(done, planned, strict=True)
        ]
        head = _SWEEP_SCHEMA | {"sweep": sweep, "scheduler": section.scheduler, "max_concurrent": cap}
        print_json(head | {"start": results[0].start.to_json()} | notes_json(warnings) | {"runs": rows})
        return
    new = sum(one.created for one in done)
    before = f"; {len(done) - new} were already submitted" if new < len(done) else ""
    say(f"submitted {new} runs of the sweep {sweep}, {at_once}{before}; `scaletrain list` shows them")
    for one in done:
        typer.echo(visible(one.run.run_id))


def _data_of(spec: RunSpec) -> str:
    """Return the settings on which prepared data may depend."""
    return f"{spec.data.model_dump_json()} {spec.model.model_dump_json()} {spec.training.objective}"


def _plan_points(
    spec: Path,
    overrides: Sequence[str],
    variants: Sequence[tuple[str, ...]],
    cluster: str | None,
    run_id: str | None,
    prepare: Choice | None,
) -> tuple[str, list[Point]]:
    """Return the sweep's name and its planned points. ``prepare``: as for in_steps(), None for a dry run.

    Raises SpecError or InfeasibleError for the first invalid point; the message names its values.
    """
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.code import take_snapshot
    from scaletrain_cli.launch.epochs import in_counted_steps, size_to_count
    from scaletrain_cli.launch.submit import new_run_id, plan_run
    from scaletrain_cli.launch.sweep import Point, point_ids

    points: list[Point] = []
    sizes: dict[str, dict[str, DataSize]] = {}
    for varied in variants:
        try:
            one, how = load_varied(spec, overrides, varied, SWEEP_OPTION, cluster), None
            if one.training.epochs is not None:
                data = _data_of(one)
                if data not in sizes:
                    sizes[data] = size_to_count(one, spec, prepare, say)
                one, how = in_counted_steps(one, sizes[data], spec)
                say(f"{', '.join(varied)}: {how}")
            planned, backend = plan_run(one, spec), backend_for(one.cluster.scheduler)
            points.append(Point(planned.spec, planned.plan, backend, sizes=planned.sizes, epochs=how, overrides=varied))
        except (SpecError, InfeasibleError) as error:
            error.message = f"{', '.join(varied)}: {error.message}"
            raise
    sweep = run_id if run_id is not None else new_run_id(points[0].spec.name, time.time())
    code = {section: take_snapshot(spec) for section, spec in {one.spec.code: one.spec for one in points}.items()}
    named = zip(point_ids(sweep, variants), points, strict=True)
    return sweep, [replace(one, run_id=name, snapshot=code[one.spec.code]) for name, one in named]
