"""`scaletrain resume`: show why the run ended and what resuming loses, then submit it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli import options
from scaletrain_cli.cli.options import AsJson, GpusPerNode, Overrides, Prepare, RunOrNewest, TrustOwner, Yes
from scaletrain_cli.errors import ExitCode, UsageError, sentences
from scaletrain_cli.text import bytes_text, seconds_text, visible
from scaletrain_cli.ui.console import document, say, suggest, warn
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.api import Run
    from scaletrain_cli.launch.prepared_submission import PreparedSubmission
    from scaletrain_cli.rundir.paths import RunDir

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)


def command(
    run: RunOrNewest = None,
    nodes: Annotated[int | None, options.nodes_option("Number of nodes to resume on.")] = None,
    gpus_per_node: GpusPerNode = None,
    overrides: Overrides = None,
    from_mirror: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Continue the run RUN here from its mirror, as in checkpoint.mirror; its newest checkpoint and its "
            "history are downloaded to the runs root.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue on another cluster of clusters.yaml; --set overrides it."),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Continue although the run may still be active elsewhere; with a mirror it stops there at its next "
            "checkpoint.",
        ),
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Restart from step 0 although the checkpoints are damaged or gone.")
    ] = False,
    new_code: Annotated[
        bool, typer.Option("--new-code", help="Use the current code of code.path instead of the submitted snapshot.")
    ] = False,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="NEW_ID",
            help="Continue a checkpoint of RUN as a new run with this id; RUN, which may be active, stays as it is.",
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=1, help="With --branch: the step of the checkpoint; default: the latest one."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the rendered job without changing or submitting anything.")
    ] = False,
    prepare: Prepare = "auto",
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run from its latest valid checkpoint, with fresh restart budgets.

    Shows why the last attempt ended, which checkpoint is used, how many steps are repeated and which damaged
    checkpoints were skipped; then checks with the scheduler, as submit does, whether and when the job can run.
    Prints the run id to stdout.

    With --nodes, --gpus-per-node or --set the run is planned again before it is submitted: the same samples and the
    same global batch at every step, in a layout that fits. Keys that change what was trained are rejected. A finished
    run continues with --set training.steps=N.

    With --branch a new run begins with the weights, optimizer states and data position of a checkpoint, e.g. to cool
    down while RUN goes on.

    With --from-mirror the run moves here from its mirror, with its id, history and data order, and its former place
    stops; with --cluster it continues on another cluster, with a new plan.
    """
    from scaletrain_cli.api import find_run, prepare_branch, prepare_resume

    sizes = {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus_per_node}
    given = [*(overrides or ()), *(f"{key}={size}" for key, size in sizes.items() if size is not None)]
    if at is not None and branch is None:
        raise UsageError("--at requires --branch NEW_ID. A resume continues from the latest valid checkpoint.")
    if from_mirror is not None and run is None:
        raise UsageError("--from-mirror requires RUN, the id of the run in the mirror.")
    run = options.run_to_change(run, yes or dry_run)
    if branch is not None:
        others = {"--from-mirror": from_mirror, "--take-over": take_over, "--from-scratch": from_scratch}
        if wrong := [option for option, value in others.items() if value]:
            raise UsageError(f"--branch cannot be combined with {', '.join(wrong)}. Remove one of them.")
        source = find_run(run)
        given = _on_cluster(source.directory, cluster, given)
        prepared_branch = prepare_branch(
            source, branch, given, step=at, new_code=new_code, trust_owner=trust_owner, dry_run=dry_run
        )
        _submit_branch(prepared_branch, branch, prepare, dry_run=dry_run, yes=yes, as_json=as_json)
        return
    from scaletrain_cli.cli.submit import useful_commands
    from scaletrain_cli.ui.submission import resume_json, show_before_resuming, show_changes, show_resize, show_resume

    if from_mirror is not None:
        moved = _move(run, from_mirror, cluster, given, take_over, dry_run=dry_run, yes=yes, as_json=as_json)
        if moved is None:
            return
        to_resume, yes = moved, True
    else:
        to_resume = find_run(run)
    given = _on_cluster(to_resume.directory, cluster, given)
    prepared = prepare_resume(
        to_resume,
        given,
        from_scratch=from_scratch,
        new_code=new_code,
        trust_owner=trust_owner,
        dry_run=dry_run,
        take_over=take_over,
    )
    report, resize = prepared.report, prepared.resize
    if not as_json:
        show_resume(to_resume.run_id, report, resize)
        if resize is not None:
            show_resize(resize)
    not_checked = prepared.require_possible()
    job = prepared.render()
    changed = prepared.changes(job)
    details = resume_json(to_resume.directory, report, resize) | {"changes_since_sent": changed}
    if dry_run:
        if as_json:
            print_json(details | {"would_send": job.whole_text})
        else:
            show_changes(changed)
            typer.echo(document(job.whole_text), nl=False)
        return
    summary = prepared.check()
    for warning in (*not_checked, *summary.warnings):
        warn(sentences(warning))
    if not as_json:  # a change that is not part of the job text is in the table above
        show_before_resuming(summary, changed or None if resize is not None and resize.changes else changed)
    options.confirm(f"Resume {to_resume.run_id}?", yes)
    done = prepared.submit(options.as_choice(prepare), say)
    if as_json:
        print_json(details | summary.to_json() | {"scheduler": done.scheduler, "job_id": done.job_id})
        return
    say(f"resumed: job {done.job_id} in {to_resume.path}")
    suggest(useful_commands(to_resume.run_id))
    typer.echo(visible(to_resume.run_id))


def _on_cluster(run: RunDir, cluster: str | None, overrides: list[str]) -> list[str]:
    """Return the overrides that move a run to another cluster, if any, before those given."""
    if cluster is None:
        return overrides
    from scaletrain_cli.launch.resume_elsewhere import cluster_overrides

    return [*cluster_overrides(run, cluster), *overrides]


def _submit_branch(
    prepared: PreparedSubmission, run_id: str, prepare: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Submit a new run that continues a checkpoint of another one, after the confirmation."""
    from scaletrain_cli.cli.submit import checked, print_submitted
    from scaletrain_cli.ui.submission import branch_json, show_resize

    assert prepared.branch is not None
    assert prepared.resize is not None
    point = prepared.branch.point
    for problem in prepared.branch.passed_over:
        warn(f"passed over a checkpoint: {problem}")
    if not as_json:
        say(f"{run_id} continues {point.run_id} after step {point.step:,}, from {prepared.branch.checkpoint.path}")
        show_resize(prepared.resize)
    details = branch_json(prepared.branch, prepared.resize)
    if dry_run:
        job = prepared.render()
        if as_json:
            print_json({"run_id": job.run_id, "run_dir": str(job.run_dir)} | details | {"would_send": job.whole_text})
        else:
            typer.echo(document(job.whole_text), nl=False)
        return
    if prepared.earlier is not None:
        print_submitted(prepared.create_and_submit(), details, as_json, before=True)
        return
    summary = checked(prepared, run_id, as_json)
    options.confirm(f"Submit to {prepared.backend.name}?", yes)
    done = prepared.create_and_submit(prepare=options.as_choice(prepare), on_preparation=say)
    print_submitted(done, details | summary.to_json(), as_json)


def _move(
    run: str,
    mirror: str,
    cluster: str | None,
    overrides: list[str],
    take_over: bool,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> Run | None:
    """Bring a run here from its mirror, after the confirmation; return None after a dry run, which writes nothing."""
    from scaletrain_cli.api import Run
    from scaletrain_cli.launch.replan import replan
    from scaletrain_cli.launch.resume_elsewhere import find_to_move, move_here
    from scaletrain_cli.ui.live import BytesLine

    mirrored = find_to_move(mirror, run, take_over=take_over)
    step, owner = mirrored.folders[0].step if mirrored.folders else None, mirrored.owner
    ago = seconds_text(max(0.0, time.time() - mirrored.activity.time))
    state = "ended" if mirrored.activity.released else "last active"
    say(f"{mirrored.place} has {run} up to step {step}, of {owner.run_dir} on {owner.host}, {state} {ago} ago")
    if dry_run:
        if as_json:
            place = {"host": owner.host, "run_dir": owner.run_dir, "generation": owner.generation}
            active = {"last_active": mirrored.activity.time, "released": mirrored.activity.released}
            print_json({"run_id": run, "mirror": mirrored.place, "step": step, "owner": place, **active})
        return None
    options.confirm("Move it here and resume?", yes)

    def check(draft: RunDir) -> None:
        """Plan the run for its new place, before it is claimed."""
        if given := _on_cluster(draft, cluster, overrides):
            replan(draft, given, moving=True)

    with BytesLine() as line:
        line.begin("checkpoint")
        moved = move_here(mirrored, check=check, on_bytes=line.show)
    for problem in moved.passed_over:
        warn(f"passed over a checkpoint of the mirror: {problem}")
    for note in moved.notes:
        warn(sentences(note))
    say(f"received step {moved.checkpoint.step}, {bytes_text(line.total_bytes)}, in {moved.run.path}")
    return Run(moved.run.path)
