"""`scaletrain checkpoint list|verify|prune`: what a run could go on from, whether it is sound, and room on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrain_cli.cli.exit_codes import describe
from scaletrain_cli.cli.options import AsJson, RunName, Yes
from scaletrain_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from scaletrain_cli.rundir.inventory import Entry

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, verify and prune checkpoints.",
)
READING = (ExitCode.DONE, ExitCode.USAGE)
VERIFYING = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)
PRUNING = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


@app.callback()
def group() -> None:
    """List, verify and prune checkpoints."""


@app.command("list", epilog=describe(READING))
def list_them(run: RunName, as_json: AsJson = False) -> None:
    """Show a run's checkpoints, the unsound too, by names and sizes alone; verify reads the files."""
    from scaletrain_cli.ui.checkpoint_view import entry_json, show_entries
    from scaletrain_cli.ui.messages import say

    folder, entries = _inventory(run)
    if as_json:
        _print({"folder": folder, "checkpoints": [entry_json(entry) for entry in entries]})
    elif entries:
        show_entries(entries)
    else:
        say(f"no checkpoints in {folder}")


@app.command(epilog=describe(VERIFYING))
def verify(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only the one of this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a run's checkpoints and compare the hashes. A line for each problem, with the file's name."""
    from scaletrain_cli.rundir.inventory import verify_files
    from scaletrain_cli.ui.checkpoint_view import VerifyingLine
    from scaletrain_cli.ui.messages import say

    folder, entries = _inventory(run)
    # What is half-written or set aside no attempt would go on from.
    wanted = [entry for entry in entries if entry.path.name.startswith("step-") and str(entry.path.parent) == folder]
    if step is not None:
        wanted = [entry for entry in wanted if entry.step == step]
        if not wanted:
            known = ", ".join(str(entry.step) for entry in entries) or "none"
            raise UsageError(f"--step {step}: there is no such checkpoint in {folder}. There are: {known}.")
    sound = sum(entry.checkpoint.size_bytes for entry in wanted if entry.checkpoint)
    problems: dict[str, list[str]] = {}
    with VerifyingLine(sound) as line:
        for entry in wanted:
            line.begin(entry.path.name)
            checkpoint = entry.checkpoint
            problems[entry.path.name] = verify_files(checkpoint, line.advance) if checkpoint else [entry.problem]
    if as_json:
        _print({"folder": folder, "problems": problems, "sound": not any(problems.values())})
    for name, found in problems.items():
        for problem in () if as_json else found:
            typer.echo(f"{name}/{problem}")
    bad = sum(bool(found) for found in problems.values())
    say(f"{len(problems) - bad} of {len(problems)} checkpoints are sound")
    raise typer.Exit(ExitCode.CRASHED if bad else ExitCode.DONE)


@app.command(epilog=describe(PRUNING))
def prune(
    run: RunName,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=1, help="So many of the newest; else checkpoint.keep.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", metavar="M", min=1, help="And each M-th step; else checkpoint.keep_every."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete old checkpoints of a run that has ended.

    Never deletes the newest that verifies, nor the newest that is marked clean. Refuses while the run is active.
    """
    from scaletrain_cli.cli.confirmation import confirm
    from scaletrain_cli.launch.pruning import carry_out, pruning
    from scaletrain_cli.rundir.paths import find_run
    from scaletrain_cli.ui.messages import say
    from scaletrain_cli.ui.units import bytes_text

    with pruning(find_run(run), keep, keep_every) as found:
        freed = sum(checkpoint.size_bytes for checkpoint in found.doomed)
        names = [checkpoint.path.name for checkpoint in found.doomed]
        if names and not dry_run:
            confirm(f"Delete {len(names)} checkpoints of {bytes_text(freed)} ({', '.join(names)})?", yes)
            carry_out(found)
    if as_json:
        _print({"deleted": names, "bytes": freed, "dry_run": dry_run, "newest_sound_step": found.sound.step})
        return
    for name in names:
        typer.echo(name)
    verb = "would be deleted" if dry_run else "deleted"
    say(f"{len(names)} checkpoints {verb}, {bytes_text(freed)}; step {found.sound.step} is sound")


def _inventory(run: str) -> tuple[str, list[Entry]]:
    from scaletrain_cli.rundir.inventory import take_inventory
    from scaletrain_cli.rundir.paths import find_run
    from scaletrain_cli.rundir.record import checkpoint_folder, read_record

    found = find_run(run)
    folder = checkpoint_folder(found, read_record(found).spec)
    return str(folder), take_inventory(folder)


def _print(data: dict[str, Any]) -> None:
    from scaletrain_cli.ui.json import print_json

    print_json(data)
