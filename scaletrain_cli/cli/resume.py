"""`scaletrain resume`: show why the run ended and what resuming loses, then submit it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, Overrides, RunName, TrustOwner, Yes
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.text import visible

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.base import Backend, SubmissionSummary
    from scaletrain_cli.launch.resume import ResumeReport
    from scaletrain_cli.rundir.paths import RunDir
    from scaletrain_cli.rundir.record import RunRecord

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)


def command(
    run: RunName,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, max=100_000, help="Number of nodes to resume on.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", metavar="N", min=1, max=1024, help="Number of devices per node to resume on."),
    ] = None,
    overrides: Overrides = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Restart training from step 0 if no checkpoint can be loaded.")
    ] = False,
    new_code: Annotated[
        bool, typer.Option("--new-code", help="Use the current code of code.path instead of the submitted snapshot.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the rendered job without changing or submitting anything.")
    ] = False,
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run from its latest valid checkpoint, with fresh restart budgets.

    Shows why the last attempt ended, which checkpoint is used, how many steps are repeated and which damaged
    checkpoints were skipped; then checks with the scheduler, as submit does, whether and when the job can run.
    Prints the run id to stdout.

    With --nodes, --gpus-per-node or --set the run is planned again before it is submitted: the same samples and the
    same global batch at every step, in a layout that fits. Keys that change what is trained are rejected.
    """
    from scaletrain_cli.cli.options import confirm
    from scaletrain_cli.cli.submit import useful_commands
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.rendered_job import changes_since_sent
    from scaletrain_cli.launch.replan import replan
    from scaletrain_cli.launch.resource_checks.checks import require_external_to_resume
    from scaletrain_cli.launch.resume import inspect_resume, refuse, resume
    from scaletrain_cli.rundir.paths import find_run
    from scaletrain_cli.rundir.record import read_record, require_changeable, require_own_checkpoints, require_own_run
    from scaletrain_cli.ui.console import say, suggest, warn
    from scaletrain_cli.ui.resume import resume_json, show_resize, show_resume
    from scaletrain_cli.ui.submission import show_before_resuming, show_changes

    found = find_run(run)
    require_own_run(found, trust_owner=trust_owner, remedy="Ask that user to resume it, or submit a run of your own")
    if not dry_run:
        require_changeable(found, f"{found.run_id} cannot be resumed")
    sizes = {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus_per_node}
    given = [*(overrides or ()), *(f"{key}={size}" for key, size in sizes.items() if size is not None)]
    resize = replan(found, given, new_code=new_code) if given or new_code else None
    report = inspect_resume(found)
    if not as_json:
        show_resume(found.run_id, report)
        if resize is not None:
            show_resize(resize)
    refuse(found, report, from_scratch=from_scratch, resize=resize)
    require_own_checkpoints(found, read_record(found).spec, trust_owner=trust_owner)
    record = resize.after if resize is not None else read_record(found)
    not_checked = require_external_to_resume(found, record, None if resize is None else resize.snapshot)
    scheduler = backend_for(record.spec.cluster.scheduler)
    text = scheduler.render(found, record)
    changed = changes_since_sent(found, text)
    told = resume_json(found, report, resize) | {"changes_since_sent": changed}
    if dry_run:
        if as_json:
            _print(told | {"would_send": text})
        else:
            show_changes(changed)
            from scaletrain_cli.ui.console import document

            typer.echo(document(text), nl=False)
        return
    prospect = _prospect(found, record, report, scheduler)
    for note in (*not_checked, *prospect.notes):
        warn(note)
    if not as_json:  # a change that is not part of the job text is in the table above
        show_before_resuming(prospect, changed or None if resize is not None and resize.changes else changed)
    confirm("Resume?", yes)
    submission = resume(found, from_scratch=from_scratch, resize=resize).submission
    if as_json:
        _print(told | prospect.to_json() | {"scheduler": submission.scheduler, "job_id": submission.job_id})
        return
    say(f"resumed: job {submission.job_id} in {found.path}")
    suggest(useful_commands(found.run_id, found.path))
    typer.echo(visible(found.run_id))


def _prospect(run: RunDir, record: RunRecord, report: ResumeReport, scheduler: Backend) -> SubmissionSummary:
    """Return the summary of the new submission after the checks of `submit`.

    Raises SchedulerError before anything has changed.
    """
    from scaletrain_cli.launch.backends.base import SubmissionSummary
    from scaletrain_cli.launch.shared_folder import room_notes
    from scaletrain_cli.rundir.checkpoints import committed_folders
    from scaletrain_cli.rundir.record import checkpoint_folder

    spec, plan = record.spec, record.plan
    outlook = scheduler.preflight(spec, plan, run, record.code)
    room = room_notes(spec, plan, run.path.parent, there=len(committed_folders(checkpoint_folder(run, spec))))
    # If the checkpoints are not visible here, estimate progress from the steps that the pods printed.
    step = report.checkpoint.step if report.checkpoint is not None else int(report.job.progress.get("step", 0))
    return SubmissionSummary(spec, plan, outlook.start, step, (*outlook.notes, *room), record.code)


def _print(data: dict[str, object]) -> None:
    from scaletrain_cli.ui.json import print_json

    print_json(data)
