"""`scaletrain submit`: plan, check, ask once, create the run directory, hand the job over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scaletrain_cli.cli.completion import complete_setting
from scaletrain_cli.cli.options import AsJson, ClusterName, Overrides, SpecPath, TrustOwner, Yes
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.text import visible

if TYPE_CHECKING:
    from scaletrain_cli.launch.submit import CreatedRun, Submission

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER, ExitCode.WRONG_NODES)


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="ID", help="Name of the run; submitting the same spec under it again does nothing."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact text that would be sent. Creates and sends nothing.")
    ] = False,
    output: Annotated[
        Literal["script", "yaml", "json"] | None,
        typer.Option("--output", help="As --dry-run, in this form: a script for Slurm, YAML for Kubernetes, or JSON."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="First ask as many nodes as planned whether they fit the plan (Slurm).")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B",
            help="One run for each value, as in training.optimizer.lr=1e-4,3e-4; repeatable: for each combination.",
            autocompletion=complete_setting,
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option("--max-concurrent", metavar="N", min=1, help="Of a sweep, run so many at a time."),
    ] = None,
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run and hand it to the scheduler that the spec names.

    Prints the run id on stdout, everything else on stderr. Asks before it submits, on a terminal only.

    With --sweep every point is planned and checked before any is queued, and all of them are, or none. Each is a run of
    its own, named after its values.
    """
    dry_run = dry_run or output is not None
    if output is not None and sweep:
        raise UsageError("--output is about one run. Use --sweep with --dry-run, which prints every text.")
    if max_concurrent is not None and not sweep:
        raise UsageError("--max-concurrent is about the runs of a --sweep. Give both, or neither.")
    if sweep:
        from scaletrain_cli.cli.sweep import OPTION, submit_points
        from scaletrain_cli.launch.sweep import MOST_POINTS
        from scaletrain_cli.spec.source import variants

        points = variants(sweep, OPTION, MOST_POINTS)
        if len(points) > 1:
            if probe:
                raise UsageError("--probe asks the nodes for one run. Submit one without --sweep first.")
            submit_points(
                spec,
                overrides or (),
                points,
                cluster=cluster,
                run_id=run_id,
                max_concurrent=max_concurrent,
                dry_run=dry_run,
                yes=yes,
                as_json=as_json,
            )
            return
        overrides = [*(overrides or ()), *points[0]]  # a sweep of one value is a plain run
    from scaletrain_cli.cli.options import confirm
    from scaletrain_cli.launch.backends.base import SubmissionSummary
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.code.snapshot import take_snapshot
    from scaletrain_cli.launch.rendered_job import in_format
    from scaletrain_cli.launch.resource_checks.checks import require_external
    from scaletrain_cli.launch.shared_folder import room_notes
    from scaletrain_cli.launch.submit import create_run, make_record, plan_for_engine, submit_run
    from scaletrain_cli.rundir.paths import RunDir, runs_root
    from scaletrain_cli.rundir.record import require_own_run
    from scaletrain_cli.rundir.shared_datasets import shared_root_notes
    from scaletrain_cli.safe_files import require_writable
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.console import say, warn

    run_spec = load_spec(spec, overrides or (), cluster=cluster)
    if probe and (dry_run or run_spec.cluster.scheduler != "slurm"):
        raise UsageError("--probe runs a job on the nodes: it needs cluster.scheduler = slurm, and no --dry-run.")
    plan = plan_for_engine(run_spec, spec)
    scheduler, snapshot = backend_for(run_spec.cluster.scheduler), take_snapshot(run_spec)
    if run_id is not None and os.path.lexists(runs_root() / run_id):
        require_own_run(RunDir(runs_root() / run_id), trust_owner=trust_owner, remedy="Use another --run-id")
    earlier = _submitted_before(run_id) if run_id is not None and not dry_run else None
    not_checked = require_external(run_spec, snapshot) if earlier is None else ()
    if dry_run:
        for note in not_checked:
            warn(note)
        record = make_record(run_spec, plan, run_id, snapshot)
        text = scheduler.render(RunDir(runs_root() / record.run_id), record)
        sent = in_format(run_spec.cluster.scheduler, text, output) if output else text
        if as_json:
            from scaletrain_cli.ui.json import print_json

            told = {"run_id": record.run_id, "run_dir": str(runs_root() / record.run_id), "dry_run": True}
            print_json(told | {"scheduler": run_spec.cluster.scheduler, "would_send": sent})
        else:
            from scaletrain_cli.ui.console import document

            typer.echo(document(sent), nl=False)
        return

    if earlier is not None:  # create_run says how the spec or the code differs
        made = create_run(run_spec, plan, run_id, snapshot=snapshot, trust_owner=trust_owner)
        _tell(made, earlier, {}, as_json)
        return
    require_writable(runs_root(), "no run can be submitted")
    outlook = scheduler.preflight(run_spec, plan)
    shared = shared_root_notes(runs_root(), prepares=run_spec.code.engine is None)
    notes = (*not_checked, *outlook.notes, *shared, *room_notes(run_spec, plan, runs_root()))
    prospect = SubmissionSummary(
        run_spec, plan, outlook.start, notes=notes, code=None if snapshot is None else snapshot.record
    )
    for note in notes:
        warn(note)
    if not as_json:
        from scaletrain_cli.ui.submission import show_before_submission

        show_before_submission(prospect, run_id)
    if probe:
        from scaletrain_cli.launch.backends.slurm.probe import probe_nodes
        from scaletrain_cli.ui.submission import show_probe

        show_probe(probe_nodes(run_spec, plan))
    confirm(f"Submit to {run_spec.cluster.scheduler}?", yes)
    made = create_run(run_spec, plan, run_id, snapshot=snapshot, trust_owner=trust_owner)
    say(f"run id {made.run.run_id}")  # before the scheduler is asked: its answer may be lost
    _tell(made, submit_run(made.run, made.record, scheduler), prospect.to_json(), as_json)


def _submitted_before(run_id: str) -> Submission | None:
    """Of this very run: there is nothing to ask the scheduler, or the user, then."""
    from scaletrain_cli.launch.submit import open_request, read_submission
    from scaletrain_cli.rundir.paths import RunDir, runs_root

    run = RunDir(runs_root() / run_id)
    # os.path, unlike Path, answers False for a name that no file can have.
    if not os.path.isfile(run.record) or open_request(run) is not None:
        return None
    return read_submission(run)


def _tell(made: CreatedRun, submission: Submission, told_before: dict[str, object], as_json: bool) -> None:
    from scaletrain_cli.ui.console import say, suggest
    from scaletrain_cli.ui.json import print_json

    if as_json:
        answer = {"run_id": made.run.run_id, "run_dir": str(made.run.path), "created": made.created}
        print_json(answer | {"scheduler": submission.scheduler, "job_id": submission.job_id} | told_before)
        return
    say(f"{'submitted' if made.created else 'was submitted before'}: job {submission.job_id} in {made.run.path}")
    suggest(useful_commands(made.run.run_id, made.run.path))
    typer.echo(visible(made.run.run_id))


def useful_commands(run_id: str, path: Path) -> dict[str, str]:
    """What one does next with a run, by purpose."""
    return {
        "how it is doing": f"scaletrain status {run_id}",
        "what it prints": f"scaletrain logs {run_id} --follow",
        "stop it": f"scaletrain cancel {run_id}",
    }
