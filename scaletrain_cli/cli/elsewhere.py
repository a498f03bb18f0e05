"""Run a verb elsewhere: on the login node of its cluster, or where the files of its run are.

A login node gets verbs with a spec for such a cluster, and verbs for its runs; a run of this machine comes first. A
verb that shows a run runs where the files of the run are, if they are on a volume that this machine does not see. Where
that cannot be had, the verb runs here, shows what the scheduler reports, and says what it has not seen. What the verb
prints, asks, writes and returns is what it prints, asks, writes and returns there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli import __version__
from scaletrain_cli.cli.app import CommandLine, parsed
from scaletrain_cli.cli.options import seconds_of
from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError, UsageError, sentences
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import can_be_replaced, replace_file
from scaletrain_cli.sent_run import sent

if TYPE_CHECKING:
    from scaletrain_cli.launch.code import Snapshot
    from scaletrain_cli.launch.login_node.sent_runs import SentRun
    from scaletrain_cli.launch.run_status import RunStatus
    from scaletrain_cli.launch.view_elsewhere import LinesOnce, ViewEnd
    from scaletrain_cli.rundir.paths import RunDir
    from scaletrain_cli.rundir.record import RunRecord
    from scaletrain_cli.spec.clusters_file import Cluster, LoginNode

_WITH_SPEC = ("submit", "rehearse", "validate", "preflight")
_OF_RUNS = (
    *("status", "watch", "diagnose", "profile", "report", "explain", "logs", "events", "notify", "checkpoint"),
    *("evaluation", "cancel", "rm", "resume", "recover", "exec", "shell", "port-forward", "data", "plan"),
)
# After these, nothing is queued there under the id of a new submission; after the last one, that is to be seen.
_NOT_SUBMITTED, _INTERRUPTED = (ExitCode.USAGE, ExitCode.INFEASIBLE), 130


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
    if verb in _WITH_SPEC or (names_cluster and verb in ("list", "status")):
        return _on_cluster(words)
    return _about_run(words) if verb in _OF_RUNS else None


def _on_cluster(words: Sequence[str]) -> int | None:
    from scaletrain_cli.spec.clusters_file import choose_cluster, clusters_file

    if not clusters_file().exists():
        return None
    line = parsed(words)
    name = line.params.get("cluster")
    if line.verb == ("status",):
        name = line.params.get("run") if name else None
        if name is None:
            return _about_run(words)
    cluster = choose_cluster(name if isinstance(name, str) else None)
    if cluster is None or cluster.login_node is None:
        return None
    if line.verb == ("list",):
        return _run(cluster.login_node, ["list", *map(shlex.quote, line.without_option(("--cluster",)))])
    if line.verb == ("status",):
        return _with_bundle(cluster, line, f"status-{os.urandom(4).hex()}")
    return _with_spec(cluster, line)


def _with_spec(cluster: Cluster, line: CommandLine) -> int | None:
    """Send a verb with its spec; None if the spec names another scheduler than the default cluster has."""
    from scaletrain_cli.launch.code import take_snapshot
    from scaletrain_cli.launch.login_node.sent_runs import SentRun
    from scaletrain_cli.launch.submit import new_run_id, require_run_id
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.loading import spec_text

    file = line.params.get("spec")
    if file is None:
        return None  # its own parser reports that
    if line.params.get("plot") is not None:
        raise UsageError(Reason("login_node.no-plot"))
    overrides = line.params.get("overrides") or ()
    spec = load_spec(file, overrides, cluster=cluster.name if cluster.above else None)
    if spec.cluster.scheduler != cluster.entries.get("scheduler", spec.cluster.scheduler):
        return None
    text, snapshot = spec_text(file), take_snapshot(spec)
    submits = line.verb == ("submit",)
    name = (line.params.get("run_id") if submits else None) or new_run_id(spec.name, time.time())
    require_run_id(name)
    submitted = submits and not line.params.get("dry_run") and line.params.get("output") is None
    sweep = bool(line.params.get("sweep"))
    code = None  # the section ``code`` with the absolute path of the folder on this machine
    if spec.code.path is not None:
        code = spec.code.model_dump(mode="json") | {"path": str(Path(spec.code.path).expanduser().absolute())}
    entry = SentRun(name, cluster.name, time.time(), code, tuple(spec.secret_env), sweep)
    options = ["--run-id", shlex.quote(name)] if submits and line.params.get("run_id") is None else []
    given: dict[str, Any] = {"secret_names": spec.secret_env, "snapshot": snapshot, "options": options}
    return _with_bundle(cluster, line, name, spec=(file, text), entry=entry if submitted else None, **given)


def _with_bundle(
    cluster: Cluster,
    line: CommandLine,
    name: str,
    *,
    spec: tuple[Path, bytes] | None = None,
    secret_names: Sequence[str] = (),
    snapshot: Snapshot | None = None,
    options: Sequence[str] = (),
    entry: SentRun | None = None,
) -> int:
    """Send files to the login node, then run the verb with them.

    ``spec``: the file on the line, and its text. ``entry``: the run, if the verb may submit it.
    """
    from scaletrain_cli.launch.login_node.sent_runs import forget, remember, sent_runs
    from scaletrain_cli.launch.login_node.ssh import make_bundle, output_of, run_interactively, script_of, send
    from scaletrain_cli.ui.console import say, warn

    for note in () if snapshot is None else snapshot.notes:
        warn(sentences(note))
    node = cluster.login_node
    assert node is not None
    overrides = line.params.get("overrides") or ()
    values = {key: os.environ[key] for key in secret_names if key in os.environ}
    bundle = make_bundle(name, cluster, spec=spec, overrides=overrides, snapshot=snapshot, values=values)
    words = line.quoted
    if spec is not None:
        words = line.with_word(str(spec[0]), f"{bundle.folder}/{shlex.quote(bundle.spec)}")
    added = [*options, *(["--set", f"code.path={bundle.code_folder}"] if snapshot is not None else ())]
    words[len(line.verb) : len(line.verb)] = added  # before a --
    send(node, bundle)
    new = None if any(run.run_id == name for run in sent_runs()) else entry
    try:
        if new is not None:
            remember(new)  # before the request, whose answer may be lost
            say(f"sent to {node.ssh} as {name}")
        code = run_interactively(node, script_of(node, words, bundle))
    except BaseException:  # also Ctrl-C: the secrets must not stay there
        with contextlib.suppress(SchedulerError):
            output_of(node, f"rm -rf {bundle.folder}")
        raise
    if new is not None and (code in _NOT_SUBMITTED or (code == _INTERRUPTED and _is_unknown(node, new))):
        forget(new)
    return code


def _is_unknown(node: LoginNode, run: SentRun) -> bool:
    """Return whether the login node answers that it has no such run."""
    from scaletrain_cli.launch.login_node.ssh import output_of, script_of

    asked = script_of(node, ["list", "--limit", "0", "--json"])
    try:
        runs = json.loads(output_of(node, asked))["runs"]
    except (SchedulerError, ValueError, KeyError):
        return False
    return not any(str(one["run_id"]).startswith(run.run_id) for one in runs)


def _about_run(words: Sequence[str]) -> int | None:
    """Run a verb where its run is; None for a run of this machine or one that is not known."""
    from scaletrain_cli.launch.login_node.sent_runs import forget, sent_runs
    from scaletrain_cli.rundir.paths import list_runs

    if "--from-mirror" in words or any(word.startswith("--from-mirror=") for word in words):
        return _resume_from_mirror(parsed(words))
    if not sent_runs():
        return None
    line = parsed(words)
    key = next((name for name in ("runs", "run", "target", "calibrate") if name in line.params), "")
    given = line.params.get(key)
    names = [given] if isinstance(given, str) else list(given or ())
    if key == "target" and os.path.isfile(names[0] if names else "-"):
        return None  # a spec
    if not names:
        newest = sent_runs()[-1]
        takes_newest = key == "run" or (line.verb == ("report",) and line.params.get("sweep") is None)
        if not takes_newest or newest.submitted <= max(
            (run.record.stat().st_mtime for run in list_runs()), default=0.0
        ):
            return None
        return _at(newest, line, [shlex.quote(newest.run_id)])
    found = [_place_of(name) for name in names]
    places = {None if run is None else run.cluster for run in found}
    if places == {None}:
        return None
    if len(places) > 1:
        raise UsageError(Reason("login_node.several-places", {"runs": names}))
    first = next(run for run in found if run is not None)
    code = _at(first, line)
    if line.verb == ("rm",) and code == ExitCode.DONE and not line.params.get("dry_run"):
        for run in found:
            if run is not None and run.run_id in names:
                forget(run)
    return code


def _at(run: SentRun, line: CommandLine, added: Sequence[str] = ()) -> int:
    """Run a verb about a run on the login node of its cluster."""
    from scaletrain_cli.spec.clusters_file import choose_cluster

    cluster = choose_cluster(run.cluster)
    if cluster is None or cluster.login_node is None:
        raise UsageError(Reason("login_node.no-host", {"cluster": run.cluster, "run": run.run_id}))
    if line.verb == ("resume",):
        return _resume(run, cluster, line)
    node = cluster.login_node
    if line.verb == ("plan",):
        params = {"host": node.ssh, "run": run.run_id, "command": node.scaletrain or "scaletrain"}
        raise UsageError(Reason("login_node.no-calibration", params))
    if line.verb == ("port-forward",):
        return _forward_ports(node, line)
    if line.verb == ("report",) and line.params.get("output") is not None:
        return _report(node, line, added)
    of_command = line.verb in (("exec",), ("shell",))
    return _run(node, [*line.quoted, *added], of_command=of_command)


def _run(node: LoginNode, words: Sequence[str], *, of_command: bool = False) -> int:
    from scaletrain_cli.launch.login_node.ssh import run_interactively, script_of

    return run_interactively(node, script_of(node, words), of_command=of_command)


def _resume_from_mirror(line: CommandLine) -> int | None:
    """Continue a run from its mirror on the login node of --cluster; None where that cluster has none."""
    from scaletrain_cli.launch.login_node.sent_runs import SentRun, find_sent_run, remember
    from scaletrain_cli.launch.submit import require_run_id
    from scaletrain_cli.spec.clusters_file import choose_cluster

    name = line.params.get("cluster")
    cluster = choose_cluster(name) if name is not None else None
    if cluster is None or cluster.login_node is None or not line.params.get("run"):
        return None
    run_id = str(line.params["run"])
    require_run_id(run_id)
    before = find_sent_run(run_id)
    names = () if before is None else before.secrets
    code = None if before is None else before.code
    entry = None if line.params.get("dry_run") else SentRun(run_id, cluster.name, time.time(), code, names)
    ended = _with_bundle(cluster, line, run_id, secret_names=names)
    if entry is not None and ended == ExitCode.DONE:
        remember(entry)
    return ended


def _resume(run: SentRun, cluster: Cluster, line: CommandLine) -> int:
    """Resume with the secrets of this machine, and with the code here for --new-code."""
    if line.params.get("cluster") is not None:
        raise UsageError(Reason("login_node.moves-by-mirror", {"run": run.run_id, "cluster": line.params["cluster"]}))
    from scaletrain_cli.launch.code import snapshot_of
    from scaletrain_cli.spec.code import CodeSpec

    code = run.code if line.params.get("new_code") else None
    snapshot = None
    if code is not None:
        snapshot = snapshot_of(CodeSpec.model_validate(code), lambda key: f"{run.run_id} {key}")
    return _with_bundle(cluster, line, run.run_id, secret_names=run.secrets, snapshot=snapshot)


def _forward_ports(node: LoginNode, line: CommandLine) -> int:
    """Listen at ports of this machine; the verb there becomes the connection to the node of the run."""
    from scaletrain_cli.cli.port_forward import forward
    from scaletrain_cli.launch.backends.base import NodeCommand
    from scaletrain_cli.launch.login_node.ssh import NOT_FOUND, command_of, not_installed, script_of
    from scaletrain_cli.launch.node_session import port_pair

    pairs = [port_pair(text) for text in line.params["ports"]]
    # A version that lacks the option refuses it, and opens no port there.
    script = script_of(node, [*line.verb, "--streams", *line.quoted[len(line.verb) :]])
    there = NodeCommand(tuple(command_of(node, script, "-T")), asks=True)
    try:
        forward(lambda: there, f"{line.params['run']} through {node.ssh}", pairs)
    except SchedulerError as error:
        code = error.reason.params.get("exit_code") if error.reason is not None else None
        if code in (ExitCode.USAGE, ExitCode.SCHEDULER):  # the verb there has said why
            return int(code)
        if code == NOT_FOUND:
            raise not_installed(node) from error
        raise
    return ExitCode.DONE


def _report(node: LoginNode, line: CommandLine, newest: Sequence[str]) -> int:
    """Write the page on the login node, and copy it to the file that was named here; ``newest``: if no run is named."""
    from scaletrain_cli.launch.login_node.ssh import output_of, run_interactively, script_of
    from scaletrain_cli.ui.console import say

    output = _output(line)
    assert output is not None
    page = f'"${{TMPDIR:-/tmp}}"/scaletrain-report-{os.urandom(8).hex()}.html'
    sweep = line.params.get("sweep")
    named = ["--sweep", shlex.quote(sweep)] if sweep else [*map(shlex.quote, line.params["runs"] or ()), *newest]
    code = run_interactively(node, script_of(node, ["report", *named, "-o", page, *line.json_words]))
    if code == ExitCode.DONE:
        replace_file(output, output_of(node, f"cat {page} && rm -f {page}"), public=True)
        say(f"copied to {output}")
    return code


def _place_of(name: str) -> SentRun | None:
    """Return the run on a login node that a name means; None for one of this machine or an unknown one.

    An id comes before a prefix. Raises UsageError for a prefix of runs here and there.
    """
    from scaletrain_cli.launch.login_node.sent_runs import find_sent_run
    from scaletrain_cli.rundir.paths import list_runs

    here = [run.run_id for run in list_runs()]
    if os.path.isfile(os.path.join(name, "run.json")) or name in here:
        return None
    found = find_sent_run(name)
    is_id = found is not None and (found.run_id == name or found.sweep)
    matches = [run_id for run_id in here if run_id.startswith(name)]
    if found is None or is_id or not matches:
        return found
    raise UsageError(Reason("login_node.several-runs", {"name": name, "runs": [*matches, found.run_id]}))


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
    if line.verb not in _VERBS or (found := _run_of(line)) is None:
        return None

    await_files(False)
    run, record = found
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
        found = find_run_or_newest(None) if name is None else find_run_or_sweep(name)
        if isinstance(found, Sweep):
            return None
        record = read_record(found)
    except UsageError:
        return None
    return (found, record) if is_elsewhere(found, record) and has_views(record) else None


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
    if line.params.get("attempt") is not None:
        return False
    return bool(early)


def _follows(line: CommandLine) -> bool:
    if line.verb == ("watch",):
        return not line.params.get("once")
    return line.verb == ("events",) and bool(line.params.get("follow"))


def _show(run: RunDir, record: RunRecord, line: CommandLine, before: NowReachableError | None) -> int | None:
    """Show the verb, over several connections if it follows the run. None: it is shown here."""
    from scaletrain_cli.launch.node.streams import write_to
    from scaletrain_cli.launch.run_status import OVER
    from scaletrain_cli.launch.status import run_status
    from scaletrain_cli.launch.view_elsewhere import LinesOnce, NotReachableError
    from scaletrain_cli.ui.console import say, warn

    output = _output(line)
    words = _words(run, line, output)
    # The lines of `events --follow` come again with each connection; other verbs show the present state anew.
    shown_lines = 0 if before is None else before.lines
    lines = LinesOnce(write_to(1), shown_lines) if line.verb == ("events",) and _follows(line) else None
    until = time.monotonic() + _STARTING_SECONDS if before is not None else 0.0
    while True:
        try:
            end = _connected(run, record, words, lines)
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


def _connected(run: RunDir, record: RunRecord, words: Sequence[str], lines: LinesOnce | None) -> ViewEnd:
    from scaletrain_cli.launch.node.command import STDERR, STDOUT
    from scaletrain_cli.launch.node.streams import write_to
    from scaletrain_cli.launch.view_elsewhere import show_view
    from scaletrain_cli.ui.console import say

    if lines is None:
        return show_view(run, record, words, say)
    lines.begin()
    return show_view(run, record, words, say, outputs={STDOUT: lines.write, STDERR: write_to(2)})


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


def _output(line: CommandLine) -> Path | None:
    """Return the file of a report. Raises UsageError for one that cannot be written, before anything is started."""
    output: Path | None = line.params.get("output") if line.verb == ("report",) else None
    if output is not None and not can_be_replaced(output):
        raise UsageError(Reason("report.place", {"file": str(output), "folder": str(output.absolute().parent)}))
    return output


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
