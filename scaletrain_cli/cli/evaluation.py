"""`scaletrain evaluation`: submit evaluations of a run's checkpoints, and show their results."""

import signal
from dataclasses import asdict
from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, RunName, TrustOwner, describe, verb_group
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.text import visible
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

app = verb_group("Evaluate checkpoints in jobs of their own.")
SUBMITTING = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.SCHEDULER)
READING = (ExitCode.DONE, ExitCode.USAGE)


@app.command(epilog=describe(SUBMITTING))
def submit(
    run: RunName,
    steps: Annotated[
        list[int] | None,
        typer.Option("--step", metavar="N", min=1, help="Checkpoint to evaluate (default: all new ones); repeatable."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Submit one for each new checkpoint until the run has ended.")
    ] = False,
    trust_owner: TrustOwner = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job per checkpoint that runs `evaluation.tasks` of the spec, apart from the training job.

    Each checkpoint is evaluated once: a second call submits nothing. Prints the run ids of the evaluations.
    """
    from scaletrain_cli.launch.evaluate import (
        SubmittedEvaluation,
        follow_evaluations,
        require_tasks,
        submit_due_evaluations,
        submit_evaluation,
    )
    from scaletrain_cli.launch.node.options import LAST_LOOK_SIGNAL
    from scaletrain_cli.rundir.record import read_record, require_own_run

    if follow and steps:
        raise UsageError("--follow and --step cannot be combined. Give one of them.")
    if follow:
        signal.pthread_sigmask(signal.SIG_BLOCK, [LAST_LOOK_SIGNAL])
    run_dir = find_run(run)
    require_own_run(run_dir, trust_owner=trust_owner, remedy="Ask that user to submit it")
    require_tasks(run_dir, read_record(run_dir))
    done: list[SubmittedEvaluation] = []
    submitted = (
        follow_evaluations(run_dir, _asked_for_last)
        if follow
        else (submit_evaluation(run_dir, step) for step in steps)
        if steps
        else submit_due_evaluations(run_dir)
    )
    for one in submitted:
        done.append(one)
        if not as_json:
            say(f"step {one.step}: job {one.job_id}")
            typer.echo(visible(one.run_id))
    if as_json:
        print_json({"run_id": run_dir.run_id, "evaluations": [asdict(one) for one in done]})
    elif not done:
        say("every checkpoint has an evaluation")


def _asked_for_last(seconds: float) -> bool:
    """Wait for the signal with which a node agent asks for the last evaluation; return whether it came in time.

    The signal stays blocked and is fetched here, so that it interrupts nothing, and one that came earlier is not lost.
    """
    from scaletrain_cli.launch.node.options import LAST_LOOK_SIGNAL

    return signal.sigtimedwait([LAST_LOOK_SIGNAL], seconds) is not None


@app.command("list", epilog=describe(READING))
def list_them(run: RunName, as_json: AsJson = False) -> None:
    """List the evaluations of a run with their metrics, by step: those of jobs, and validations with figures by class.

    The validation loss of each step is in metrics.jsonl.
    """
    from scaletrain_cli.rundir.evaluations import read_evaluations, read_validations
    from scaletrain_cli.ui.checkpoints import show_evaluations, show_validations

    run_dir = find_run(run)
    evaluations, validations = read_evaluations(run_dir), read_validations(run_dir)
    if as_json:
        print_json(
            {
                "run_id": run_dir.run_id,
                "evaluations": [asdict(one) for one in evaluations],
                "validations": [{"step": one.step, "time": one.time, "metrics": one.metrics} for one in validations],
            }
        )
        return
    if evaluations:
        show_evaluations(evaluations)
    if validations:
        show_validations(validations)
    if not evaluations and not validations:
        say(f"{run_dir.run_id} has no evaluations")


@app.command(epilog=describe(READING))
def show(
    run: RunName,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Step (default: the latest evaluated one).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the evaluations after one step: metrics, errors, versions, generated texts, and the worst classes."""
    from scaletrain_cli.rundir.documents import reporting_damage
    from scaletrain_cli.rundir.evaluations import read_evaluations, read_validations, validation_path
    from scaletrain_cli.ui.checkpoints import show_evaluation, show_validation

    run_dir = find_run(run)
    known, validated = read_evaluations(run_dir), read_validations(run_dir)
    if step is None:
        ended = [one.step for one in known if one.state in ("done", "failed")]
        step = max([*ended, *(one.step for one in validated)], default=known[-1].step if known else None)
    evaluation = next((one for one in known if one.step == step), None)
    validation = next((one for one in validated if one.step == step), None)
    if evaluation is None and validation is None:
        steps = ", ".join(map(str, sorted({one.step for one in known} | {one.step for one in validated}))) or "none"
        which = "no evaluation" if step is None else f"no evaluation of step {step}"
        raise UsageError(f"{run_dir.run_id} has {which}. Available steps: {steps}.")
    if as_json:
        of_job = {} if evaluation is None else {**asdict(evaluation), "run": evaluation.run_id}
        of_training = None if validation is None else asdict(validation)
        print_json({"step": step, **of_job, "validation": of_training, "run_id": run_dir.run_id})
        return
    if evaluation is not None:
        show_evaluation(evaluation)
    if validation is not None:
        with reporting_damage(validation_path(run_dir, validation.step)):
            show_validation(validation)
