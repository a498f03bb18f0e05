"""Run a verb on the login node of a cluster: with the files that it reads here, or for a run that was sent there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli.cli.app import CommandLine, parsed
from scaletrain_cli.cli.options import require_replaceable
from scaletrain_cli.errors import ExitCode, SchedulerError, UsageError, sentences
from scaletrain_cli.launch.login_node.sent_runs import SentRun, find_sent_run, forget, remember, sent_runs
from scaletrain_cli.launch.login_node.ssh import (
    NOT_FOUND,
    command_of,
    make_bundle,
    not_installed,
    output_of,
    run_interactively,
    script_of,
    send,
)
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import list_runs
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec.clusters_file import Cluster, LoginNode, choose_cluster
from scaletrain_cli.ui.console import say, warn

if TYPE_CHECKING:
    from scaletrain_cli.launch.code import Snapshot

# After these, nothing is queued there under the id of a new submission; after the last one, that is to be seen.
_NOT_SUBMITTED, _INTERRUPTED = (ExitCode.USAGE, ExitCode.INFEASIBLE), 130


def on_cluster(words: Sequence[str]) -> int | None:
    """Run a verb of a cluster of clusters.yaml on its login node; None where that cluster has none."""
    line = parsed(words)
    name = line.params.get("cluster")
    if line.verb == ("status",):
        name = line.params.get("run") if name else None
        if name is None:
            return about_run(words)
    cluster = choose_cluster(name if isinstance(name, str) else None)
    needs_no_file = line.verb != ("status",) and "spec" not in line.params
    if cluster is None or cluster.login_node is None:
        if needs_no_file:
            raise UsageError(Reason("login_node.list-without-host", {"cluster": name}))
        return None
    if needs_no_file:
        there = [*line.verb, *map(shlex.quote, line.without_option(("--cluster",)))]
        return run_interactively(cluster.login_node, script_of(cluster.login_node, there))
    if line.verb == ("status",):
        return _with_bundle(cluster, line, f"status-{os.urandom(4).hex()}")
    return _with_spec(cluster, line)


def _with_spec(cluster: Cluster, line: CommandLine) -> int | None:
    """Send a verb with its spec; None if the spec names another scheduler than the default cluster has."""
    from scaletrain_cli.launch.code import take_snapshot
    from scaletrain_cli.launch.submit import new_run_id, require_run_id
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.spec.loading import spec_text

    file = line.params.get("spec")
    if file is None:  # the default of `drill`; else the parser of the verb reports that
        drills_there = line.verb == ("drill",) and line.params.get("cluster") is not None
        return _with_bundle(cluster, line, new_run_id("drill", time.time())) if drills_there else None
    if line.params.get("plot") is not None:
        raise UsageError(Reason("login_node.no-plot"))
    given = line.params.get("scheduler")
    overrides = [*(line.params.get("overrides") or ()), *([f"cluster.scheduler={given}"] if given else [])]
    spec = load_spec(file, overrides, cluster=cluster.name if cluster.above else None)
    if spec.cluster.scheduler != cluster.entries.get("scheduler", spec.cluster.scheduler):
        return None
    text, snapshot = spec_text(file), take_snapshot(spec)
    submits = line.verb == ("submit",)
    name = (line.params.get("run_id") if submits else None) or new_run_id(spec.name, time.time())
    require_run_id(name)
    entry, clusters = None, {run.run_id: run.cluster for run in sent_runs()}
    if submits and not line.params.get("dry_run") and line.params.get("output") is None:
        code = None  # the section ``code`` with the absolute path of the folder on this machine
        if spec.code.path is not None:
            code = spec.code.model_dump(mode="json") | {"path": str(Path(spec.code.path).expanduser().absolute())}
        sweep = bool(line.params.get("sweep"))
        entry = SentRun(name, cluster.name, time.time(), code, tuple(spec.secret_env), sweep)
        if clusters.get(name, cluster.name) != cluster.name:  # verbs for this run would go there
            raise UsageError(Reason("login_node.id-elsewhere", {"run": name, "cluster": clusters[name]}))
    new = None if name in clusters else entry
    secrets = spec.secret_env
    return _with_bundle(cluster, line, name, spec=(file, text), secret_names=secrets, snapshot=snapshot, new=new)


def _with_bundle(
    cluster: Cluster,
    line: CommandLine,
    name: str,
    *,
    spec: tuple[Path, bytes] | None = None,
    secret_names: Sequence[str] = (),
    snapshot: Snapshot | None = None,
    new: SentRun | None = None,
) -> int:
    """Send files to the login node, then run the verb with them.

    ``spec``: the file on the line, and its text. ``new``: the run that the verb submits, if it is not on the list.
    """
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
    added = ["--set", f"code.path={bundle.code_folder}"] if snapshot is not None else []
    if line.verb == ("submit",) and line.params.get("run_id") is None:
        added += ["--run-id", shlex.quote(name)]
    words[len(line.verb) : len(line.verb)] = added  # before a --
    send(node, bundle)
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
    asked = script_of(node, ["list", "--limit", "0", "--json"])
    try:
        runs = json.loads(output_of(node, asked))["runs"]
    except (SchedulerError, ValueError, KeyError):
        return False
    return not any(str(one["run_id"]).startswith(run.run_id) for one in runs)


def about_run(words: Sequence[str]) -> int | None:
    """Run a verb on the login node that its run was sent to; None for a run of this machine or an unknown one."""
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
    runs = [_place_of(name) for name in names]
    places = {None if run is None else run.cluster for run in runs}
    if places == {None}:
        return None
    if len(places) > 1:
        raise UsageError(Reason("login_node.several-places", {"runs": names}))
    code = _at(next(run for run in runs if run is not None), line)
    if line.verb == ("rm",) and code == ExitCode.DONE and not line.params.get("dry_run"):
        for run in runs:
            if run is not None and run.run_id in names:
                forget(run)
    return code


def _at(run: SentRun, line: CommandLine, added: Sequence[str] = ()) -> int:
    """Run a verb about a run on the login node of its cluster."""
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
    return run_interactively(node, script_of(node, [*line.quoted, *added]), of_command=of_command)


def _resume_from_mirror(line: CommandLine) -> int | None:
    """Continue a run from its mirror on the login node of --cluster; None where that cluster has none."""
    from scaletrain_cli.launch.submit import require_run_id

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

    snapshot = None
    if run.code is not None and line.params.get("new_code"):
        snapshot = snapshot_of(CodeSpec.model_validate(run.code), lambda key: f"{run.run_id} {key}")
    return _with_bundle(cluster, line, run.run_id, secret_names=run.secrets, snapshot=snapshot)


def _forward_ports(node: LoginNode, line: CommandLine) -> int:
    """Listen at ports of this machine; the verb there becomes the connection to the node of the run."""
    from scaletrain_cli.cli.port_forward import forward
    from scaletrain_cli.launch.backends.base import NodeCommand
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
    output = line.params["output"]
    require_replaceable("--output", output)
    page = f'"${{TMPDIR:-/tmp}}"/scaletrain-report-{os.urandom(8).hex()}.html'
    sweep = line.params.get("sweep")
    named = ["--sweep", shlex.quote(sweep)] if sweep else [*map(shlex.quote, line.params["runs"] or ()), *newest]
    as_json = ["--json"] if line.params.get("as_json") else []
    code = run_interactively(node, script_of(node, ["report", *named, "-o", page, *as_json]))
    if code == ExitCode.DONE:
        replace_file(output, output_of(node, f"cat {page} && rm -f {page}"), public=True)
        say(f"copied to {output}")
    return code


def _place_of(name: str) -> SentRun | None:
    """Return the run on a login node that a name means; None for one of this machine or an unknown one.

    An id comes before a prefix. Raises UsageError for a prefix of runs here and there.
    """
    here = [run.run_id for run in list_runs()]
    if os.path.isfile(os.path.join(name, "run.json")) or name in here:
        return None
    sent = find_sent_run(name)
    is_id = sent is not None and (sent.run_id == name or sent.sweep)
    matches = [run_id for run_id in here if run_id.startswith(name)]
    if sent is None or is_id or not matches:
        return sent
    raise UsageError(Reason("login_node.several-runs", {"name": name, "runs": [*matches, sent.run_id]}))
