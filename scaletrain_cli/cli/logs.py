"""`scaletrain logs`: the output of the ranks of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, RunOrNewest, pause
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import RunDir, find_run_or_newest
from scaletrain_cli.text import visible
from scaletrain_cli.ui.console import say, warn
from scaletrain_cli.ui.json import print_json, stream_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.logs import EarlyOutput, LogLine

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)
_ASK_EVERY_SECONDS = 3.0
_LOOK_EVERY_SECONDS = 0.2


def command(
    run: RunOrNewest = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Attempt to show (default: the last).")
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="Rank to show (default: all).")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the run ends, across attempts.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Show only the last N lines of each rank.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also show lines of libraries that are not errors, and progress lines for programs."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the output of the ranks of a run. With more than one rank, each line is prefixed with its rank.

    Terminal control sequences (colors, cursor movements) are escaped; the files in attempts/N/logs have the raw bytes.
    Lines of libraries (DeepSpeed, torch) that are not errors are omitted without --all; --json has all lines.
    With --json the lines are {"attempt", "node", "rank", "text"}; with --follow, one JSON object per line.
    """
    from scaletrain_cli.launch.logs import (
        EarlyOutput,
        LogFollower,
        early_output,
        fetched_logs,
        is_for_people,
        log_files,
        read_logs,
    )

    def show(lines: list[LogLine]) -> None:
        if as_json:
            for line in lines:
                stream_json(_line_json(line))
        else:
            _print((line for line in lines if everything or is_for_people(line.text)), label=rank is None)

    run_dir = find_run_or_newest(run)
    with fetched_logs(run_dir, follow=follow) as trouble:
        if trouble:
            warn(f"{trouble} Showing the lines fetched before.")
        files = log_files(run_dir, attempt, rank)
        if follow:
            follower = LogFollower(run_dir, rank, attempt, tail, everything=everything or as_json)
            over = _is_over(run_dir)
            first = EarlyOutput(run_dir, since=files)
            any_output = _show_early_output(first, as_json)
            show(follower.new_lines())
            while not over():
                any_output |= _show_early_output(first, as_json)
                show(follower.new_lines())
                pause(_LOOK_EVERY_SECONDS)
    if follow:
        any_output |= _show_early_output(first, as_json)
        show(follower.new_lines(to_the_end=True))
        if not any_output and not log_files(run_dir):
            say(f"the run printed nothing. `scaletrain status {run_dir.run_id}` shows how it ended.")
        if as_json:
            print_json({"run_id": run_dir.run_id})
        return
    words = early_output(run_dir, since=files) if attempt is None else []
    if as_json:
        before = [{"pod": path.stem, "text": path.read_text(encoding="utf-8", errors="replace")} for path in words]
        lines = [_line_json(line) for line in read_logs(run_dir, attempt, rank, tail)]
        print_json({"run_id": run_dir.run_id, "lines": lines, "before_attempt": before})
        return
    _print(read_logs(run_dir, attempt, rank, tail, everything=everything), label=len(files) > 1)
    for path in words:
        say(f"{path.stem}, before the attempt started:")
        typer.echo(visible(path.read_text(encoding="utf-8", errors="replace")), nl=False)
    if not files and not words:
        say(f"no output yet. `scaletrain status {run_dir.run_id}` shows the state of the run.")


def _show_early_output(words: EarlyOutput, as_json: bool) -> bool:
    """Show the output of pods from before their attempt started; return True if there was any."""
    lines = words.new_lines()
    for pod, text in lines:
        if as_json:
            stream_json({"pod": pod, "text": text})
        else:
            typer.echo(visible(f"[pod {pod}] {text}"))
    return bool(lines)


def _print(lines: Iterable[LogLine], *, label: bool) -> None:
    for line in lines:
        typer.echo(visible(f"[rank {line.source.rank}] {line.text}" if label else line.text))


def _line_json(line: LogLine) -> dict[str, str | int]:
    source = line.source
    return {"attempt": source.attempt, "node": source.node, "rank": source.rank, "text": line.text}


def _is_over(run: RunDir) -> Callable[[], bool]:
    """Return a function that returns True if the run has ended; it queries the scheduler at most every few seconds."""
    from scaletrain_cli.launch.status import is_over, run_status

    asked, answer = 0.0, False

    def over() -> bool:
        nonlocal asked, answer
        if time.monotonic() - asked > _ASK_EVERY_SECONDS:
            asked, answer = time.monotonic(), is_over(run, run_status(run))
        return answer

    return over
