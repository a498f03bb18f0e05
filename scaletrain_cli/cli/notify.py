"""`scaletrain notify`: test the receivers of notifications, list what was sent, and send what is waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, RunName, TrustOwner, describe, verb_group
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import RunDir, find_run
from scaletrain_cli.text import visible
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.rundir.record import RunRecord
    from scaletrain_cli.spec import RunSpec

app = verb_group("Test the receivers of notifications, and send what is waiting.")
SENDING = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)
READING = (ExitCode.DONE, ExitCode.USAGE)
_SEND_SECONDS = 60.0


@app.command("test", epilog=describe(SENDING))
def try_receivers(
    target: Annotated[str, typer.Argument(metavar="SPEC|RUN", help="Run spec (YAML), or run id or directory.")],
    trust_owner: TrustOwner = False,
    as_json: AsJson = False,
) -> None:
    """Send a test notification to each receiver in `notify`, from this machine. Exit code 1 if one is not accepted.

    URLs are read from this environment, for a run also from the values of secret_env that it keeps.
    """
    from scaletrain_cli.notify.delivery import Origin, deliver
    from scaletrain_cli.notify.notices import Notice

    spec, environment, origin = _spec_of(target, trust_owner)
    if not spec.notify:
        raise UsageError(f"{target} has no receivers. Add them in the section notify (docs/notifications.md).")
    named = Origin(origin, spec.name, "", tuple(spec.secret_env))
    now, text = time.time(), "a test of the receivers of this run"
    notice = Notice(f"test-{now:.3f}", "test", "note", text, now, {"event": "test", "time": now})
    deliveries = [(receiver, deliver(notice, receiver, named, environment)) for receiver in spec.notify]
    if as_json:
        answers = [
            {"receiver": receiver.name, "accepted": not sent.problem, "problem": sent.problem}
            for receiver, sent in deliveries
        ]
        print_json({"receivers": answers})
    else:
        for receiver, sent in deliveries:
            typer.echo(visible(f"{receiver.name}: {sent.problem or 'accepted'}"))
    if any(sent.problem for _, sent in deliveries):
        raise typer.Exit(ExitCode.CRASHED)


def _spec_of(target: str, trust_owner: bool) -> tuple[RunSpec, Mapping[str, str], str]:
    """Return a spec, the variables for its receivers, and what to call it in a message."""
    if target == "-" or (os.path.isfile(target) and not os.path.isdir(target)):
        from scaletrain_cli.spec import load_spec

        spec = load_spec(Path(target))
        return spec, {**os.environ, **spec.env}, spec.name
    run, record, environment = _own_run(target, trust_owner)
    return record.spec, environment, run.run_id


def _own_run(name: str, trust_owner: bool) -> tuple[RunDir, RunRecord, Mapping[str, str]]:
    from scaletrain_cli.notify.notifier import receivers_environment
    from scaletrain_cli.rundir.record import read_record, require_own_run

    run = find_run(name)
    require_own_run(run, trust_owner=trust_owner, remedy="Ask that user")  # its commands would run as this user
    record = read_record(run)
    return run, record, receivers_environment(run, record)


@app.command("list", epilog=describe(READING))
def list_them(run: RunName, as_json: AsJson = False) -> None:
    """List the receivers of a run: how many notifications were sent, are waiting, or were given up, and why."""
    from scaletrain_cli.notify.notices import Receiver
    from scaletrain_cli.notify.notifier import read_receivers
    from scaletrain_cli.rundir.record import read_record

    run_dir = find_run(run)
    spec, known = read_record(run_dir).spec, read_receivers(run_dir)
    rows = [
        {
            "receiver": receiver.name,
            "sent": state.sent,
            "waiting": len(state.pending),
            "given_up": state.dropped,
            "problem": state.problem,
        }
        for receiver in spec.notify
        for state in (known.get(receiver.name, Receiver()),)
    ]
    if as_json:
        print_json({"run_id": run_dir.run_id, "receivers": rows})
        return
    if not rows:
        say(f"{run_dir.run_id} has no receivers")
    for row in rows:
        problem = f"; the last one was not accepted: {row['problem']}" if row["problem"] else ""
        counts = f"{row['sent']} sent, {row['waiting']} waiting, {row['given_up']} given up"
        typer.echo(visible(f"{row['receiver']}: {counts}{problem}"))


@app.command(epilog=describe(SENDING))
def send(run: RunName, trust_owner: TrustOwner = False, as_json: AsJson = False) -> None:
    """Send the notifications of a run that are waiting, as after its end with a receiver that did not answer.

    Exit code 1 if some are still waiting. While the run trains, its first node sends them. The end of a run whose job
    could not record it, as where all nodes were lost, is recorded and sent.
    """
    from scaletrain_cli.launch.recover import record_lost_end
    from scaletrain_cli.notify.notifier import Notifier, read_receivers

    run_dir, record, environment = _own_run(run, trust_owner)
    record_lost_end(run_dir)
    Notifier(run_dir, record, environment).work(_SEND_SECONDS, is_living=False)
    names = {receiver.name for receiver in record.spec.notify}
    left = {name: receiver for name, receiver in read_receivers(run_dir).items() if name in names and receiver.pending}
    if as_json:
        print_json(
            {"run_id": run_dir.run_id, "waiting": {name: len(receiver.pending) for name, receiver in left.items()}}
        )
    else:
        for name, receiver in left.items():
            typer.echo(visible(f"{name}: {len(receiver.pending)} waiting; {receiver.problem}"))
        if not left:
            say("no notification is waiting")
    if left:
        raise typer.Exit(ExitCode.CRASHED)
