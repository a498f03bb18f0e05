"""`scaletrain profile`: profile a few steps of a living run on chosen ranks, without restarting it."""

import secrets
from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, RunName, seconds_of
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)


def command(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps in the trace, 1 to 50.")] = 3,
    step: Annotated[
        int,
        typer.Option(metavar="N", help="First step of the trace (default: as soon as possible).", show_default=False),
    ] = 0,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="Ranks to profile, such as 0,8-11; at most 16.")] = "0",
    memory: Annotated[
        bool, typer.Option("--memory", help="Record allocations; on GPUs also write a memory snapshot.")
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Record lines of Python code, which makes the trace several times larger.")
    ] = False,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Emit NVTX ranges for Nsight Systems instead of a trace.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the profile and show it.")] = True,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Wait at most this long, e.g. 30m.")] = "10m",
    show: Annotated[bool, typer.Option("--show", help="Show the newest profile of the run; request none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Profile a few steps of a living run with torch.profiler, and compare their time with the plan, by cause.

    Writes a request to the run directory; the run serves it at its next step, without a restart. Traces for Perfetto
    and the summary are in attempts/NNNN/profile/ of the run directory.
    """
    from scaletrain_cli.launch.profile import await_profile, newest_profile, request_profile
    from scaletrain_cli.rundir.profiles import ProfileRequest
    from scaletrain_cli.rundir.record import read_record
    from scaletrain_cli.ui.profile import show_profile

    run_dir = find_run(run)
    if show:
        summary = newest_profile(run_dir)
    else:
        try:
            request = ProfileRequest(secrets.token_hex(8), step, steps, _ranks(ranks), memory, stacks, nvtx)
        except ValueError as error:
            raise UsageError(f"{error}.") from error
        seconds = seconds_of("--timeout", timeout)
        if (later := request_profile(run_dir, read_record(run_dir), request)) is not None:
            say(str(later))
        if not wait:
            say(f"requested; `scaletrain profile {run_dir.run_id} --show` shows the profile once it is there")
            if as_json:
                print_json({"request": request.id})
            return
        summary = await_profile(run_dir, request, seconds, lambda _, first: say(f"profiling from step {first:,} on"))
    if as_json:
        print_json(summary)
        return
    show_profile(run_dir, summary)


_MOST_DIGITS = 9


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a list such as ``0,8-11``. Raises UsageError."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise UsageError(f"--ranks {text}: {part.strip()!r} is not a rank or a range such as 8-11.")
        if max(len(first), len(last)) > _MOST_DIGITS or (dash and int(last) - int(first) > 10_000):
            raise UsageError(f"--ranks {text[:40]}: too many ranks.")
        if dash and int(last) < int(first):
            raise UsageError(f"--ranks {text}: {part.strip()} ends before it begins. Write it as {last}-{first}.")
        ranks += range(int(first), int(last if dash else first) + 1)
    return tuple(sorted(set(ranks)))
