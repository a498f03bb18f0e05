"""Run a verb elsewhere: on the login node of its cluster, or where the files of its run are.

A login node gets verbs with a spec for such a cluster, and verbs for its runs; a run of this machine comes first. A
verb that shows a run runs where the files of the run are, if they are on a volume that this machine does not see. Where
that cannot be had, the verb runs here, shows what the scheduler reports, and says what it has not seen. What the verb
prints, asks, writes and returns is what it prints, asks, writes and returns there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli import __version__
from scaletrain_cli.cli.app import CommandLine, parsed
from scaletrain_cli.cli.options import require_replaceable, seconds_of
from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError, UsageError, sentences
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.sent_run import sent

if TYPE_CHECKING:
    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.rundir.paths import RunDir
    from scaletrain_cli.rundir.record import RunRecord

_WITH_SPEC = ("submit", "rehearse", "validate", "preflight", "drill")
_WITH_CLUSTER = ("list", "nodes", "recover", "status")  # without a run
_OF_RUNS = (
    *("status", "watch", "diagnose", "profile", "report", "explain", "logs", "events", "notify", "checkpoint"),
    *("evaluation", "cancel", "rm", "resume", "recover", "exec", "shell", "port-forward", "data", "plan"),
)


def run_on_login_node(words: Sequence[str]) -> int | None:
    """Run a command line on a login node and return its exit code; None if it belongs to this machine.

    Raises SchedulerError if the node cannot be reached, and SpecError or UsageError for what is wrong before that.
    """
    own = words[: words.index("--")] if "--" in words else words  # not those of the command of `exec`
    if sent().here:
        if sent().version not in (None, __version__):
            from scaletrain_cli.ui.console import warn

            params = {"there": sent().version, "here": __version__, "cluster": sent().cluster}
            warn(sentences(Reason("login_node.other-version", params)))
        return None
    if {"--help", "-h"} & set(own):
        return None
    verb = next((word for word in words if not word.startswith("-")), "")
    names_cluster = any(word == "--cluster" or word.startswith("--cluster=") for word in own)
    if verb in _WITH_SPEC or (names_cluster and verb in _WITH_CLUSTER):
        from scaletrain_cli.spec.clusters_file import clusters_file

        if names_cluster or clusters_file().exists():
            from scaletrain_cli.cli.login_node import on_cluster

            return on_cluster(words)
    elif verb in _OF_RUNS:
        from scaletrain_cli.launch.login_node.sent_runs import sent_runs

        if sent_runs() or any(word.partition("=")[0] == "--from-mirror" for word in words):
            from scaletrain_cli.cli.login_node import about_run

            return about_run(words)
    return None


def name_clusters(verb: str) -> None:
    """Print how to call a verb without a run for the clusters to which this machine has sent runs."""
    from scaletrain_cli.spec.clusters_file import clusters_file

    if clusters_file().exists() and not sent().here:
        from scaletrain_cli.launch.login_node.sent_runs import sent_runs
        from scaletrain_cli.ui.console import say

        for name in sorted({run.cluster for run in sent_runs()}):
            say(f"for the runs that were sent to {name}: scaletrain {verb} --cluster {name}")


_FIRST_WORDS = frozenset(("status", "watch", "diagnose", "report", "logs", "events", "checkpoint"))
_VERBS = (
    *(("status",), ("watch",), ("diagnose",), ("report",), ("logs",), ("events",)),
    *(("checkpoint", "list"), ("checkpoint", "verify")),
)
# Shown here, these do not tell what was not read from what is not there: a queued run may have earlier attempts.
_SAY_NOTHING_UNSEEN = (("diagnose",), ("events",), ("logs",))
_PAUSE_SECONDS = 2.0
# From the scheduler's word that a run runs, or the end of a pod, to a pod that serves the view.
_STARTING_SECONDS = 120.0


def run_on_volume(words: Sequence[str], before: NowReachableError | None = None) -> int | None:
    """Run a command line where the files of its run are and return its exit code; None if it belongs to this machine.

    ``before``: what ended the verb here, which began while no pod of the run ran. Raises ScaletrainErrors.
    """
    own = words[: words.index("--")] if "--" in words else words
    if sent().run is not None or {"--help", "-h"} & set(own) or not _FIRST_WORDS & set(own):
        return None
    line = parsed(words)
    if line.verb not in _VERBS or (run_and_record := _run_of(line)) is None:
        return None

    await_files(False)
    run, record = run_and_record
    if line.verb == ("logs",) and _has_logs_here(run, line):
        return None
    return _show(run, record, line, before)


def _run_of(line: CommandLine) -> tuple[RunDir, RunRecord] | None:
    """Return the run of a command line if its files are elsewhere; None also for what the verb itself refuses."""
    from scaletrain_cli.launch.view_elsewhere import has_views
    from scaletrain_cli.rundir.paths import Sweep, find_run_or_newest, find_run_or_sweep
    from scaletrain_cli.rundir.record import is_elsewhere, read_record

    if line.params.get("cluster") or line.params.get("sweep"):
        return None
    several = line.params.get("runs")
    if several is not None and len(several) != 1:
        return None
    name = several[0] if several else line.params.get("run")
    try:
        run_dir = find_run_or_newest(None) if name is None else find_run_or_sweep(name)
        if isinstance(run_dir, Sweep):
            return None
        record = read_record(run_dir)
    except UsageError:
        return None
    return (run_dir, record) if is_elsewhere(run_dir, record) and has_views(record) else None


def _has_logs_here(run: RunDir, line: CommandLine) -> bool:
    """Return whether the lines that `logs` shows come from the API server, or were fetched from it.

    Followed ones of an active run do, over all pods, and those of pods that ended before an attempt began. Otherwise
    the files have all lines; the API server keeps the last ones only, and what was fetched may lack the end.
    """
    from scaletrain_cli.launch.logs import early_output, fetched_logs, log_files
    from scaletrain_cli.launch.run_status import OVER
    from scaletrain_cli.launch.status import run_status

    if line.params.get("follow") and run_status(run).state not in OVER:
        return True
    with fetched_logs(run):
        early = early_output(run, since=log_files(run))
    return bool(early) and line.params.get("attempt") is None


def _follows(line: CommandLine) -> bool:
    if line.verb == ("watch",):
        return not line.params.get("once")
    return line.verb == ("events",) and bool(line.params.get("follow"))


def _show(run: RunDir, record: RunRecord, line: CommandLine, before: NowReachableError | None) -> int | None:
    """Show the verb, over several connections if it follows the run. None: it is shown here."""
    from scaletrain_cli.launch.node.command import STDERR, STDOUT
    from scaletrain_cli.launch.node.streams import write_to
    from scaletrain_cli.launch.run_status import OVER
    from scaletrain_cli.launch.status import run_status
    from scaletrain_cli.launch.view_elsewhere import LinesOnce, NotReachableError, show_view
    from scaletrain_cli.ui.console import say, warn

    output: Path | None = line.params.get("output") if line.verb == ("report",) else None
    if output is not None:
        require_replaceable("--output", output)
    words = _words(run, line, output)
    lines, outputs = None, None
    if line.verb == ("events",) and _follows(line):
        # Its lines come again with each connection; other verbs show the present state anew.
        lines = LinesOnce(write_to(STDOUT), 0 if before is None else before.lines)
        outputs = {STDOUT: lines.write, STDERR: write_to(STDERR)}
    until = time.monotonic() + _STARTING_SECONDS if before is not None else 0.0
    while True:
        try:
            if lines is not None:
                lines.begin()
            end = show_view(run, record, words, say, outputs=outputs)
            if output is not None and end.exit_code == ExitCode.DONE:
                replace_file(output, end.page, public=True)
                say(f"copied to {output}")
            return end.exit_code
        except NotReachableError as error:
            begun = lines is not None and lines.written > 0  # the verb here would show its lines again
            if error.waits and (begun or time.monotonic() < until):
                time.sleep(_PAUSE_SECONDS)
                continue
            if begun:
                raise SchedulerError(error.reason or error.message) from error
            state = run_status(run).state
            if not error.waits or (line.verb in _SAY_NOTHING_UNSEEN and not _follows(line)):
                why = error.message if error.reason is None else sentences(error.reason)
                warn(str(Reason("launch.view-unread", {"run": run.run_id, "why": why.rstrip(".")})))
            # A run that is over is awaited once: the verb here would end at once, and begin again without an end.
            await_files(_follows(line) and error.waits and (before is None or state not in OVER))
            return None
        except SchedulerError:  # the pod has ended; the run may go on in other pods
            if not _follows(line):
                raise
            until = time.monotonic() + _STARTING_SECONDS
            time.sleep(_PAUSE_SECONDS)


def _words(run: RunDir, line: CommandLine, output: Path | None) -> list[str]:
    """Return the words for the verb there: its file comes here, and this machine waits for the run."""
    from scaletrain_cli.launch.node.view import PAGE_WORD

    if output is not None:
        return line.with_option(("--output", "-o"), PAGE_WORD)
    if line.verb == ("status",) and line.params.get("wait") is not None:
        from scaletrain_cli.cli.status import wait_for_end

        wait_for_end(run, seconds_of("--wait", line.params["wait"]))
        return line.with_option(("--wait",), "1s")
    return [*line.verb, *line.rest]


class NowReachableError(ScaletrainError):
    """The files of a run, whose view began while none of its pods ran, can be read now. ``lines``: already shown."""

    def __init__(self, lines: int = 0) -> None:
        super().__init__(Reason("launch.view-now"))
        self.lines = lines


_awaited = False


def await_files(value: bool) -> None:
    """Let switch_if_reachable() end views of this process, or not."""
    global _awaited
    _awaited = value


def switch_if_reachable(status: RunStatus, lines: int = 0) -> None:
    """Raise NowReachableError if a view that waits for the files of its run can read them: its pods run, or it is over.

    ``lines``: those that the view has printed.
    """
    from scaletrain_cli.launch.run_status import OVER

    if _awaited and not status.files_seen and (status.state == "running" or status.state in OVER):
        raise NowReachableError(lines)
