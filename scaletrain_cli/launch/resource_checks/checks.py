"""Check that the files, code and credentials that a run spec refers to exist, as far as they are visible here.

Every verb that starts a run calls these checks before it creates or queues anything, and each node agent calls them
before it starts ranks. The preflight of each back end checks the resources of its scheduler.
"""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from scaletrain_cli.errors import Problem, UsageError, WrongNodesError
from scaletrain_cli.extras import EXTRAS, install_command
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.dataset_checks import dataset_problems
from scaletrain_cli.launch.resource_checks.files import (
    class_file_problems,
    evaluation_problems,
    image_folder_problems,
    not_checked,
    not_read,
    not_recorded,
    row_problems,
    template_problems,
    tokenizer_problems,
)
from scaletrain_cli.launch.resource_checks.hub import check_mirror, hub_notes, hub_problems
from scaletrain_cli.launch.resource_checks.images import zero_shot_problems
from scaletrain_cli.launch.resource_checks.sources import cache_problems, check_text, text_problems
from scaletrain_cli.launch.resource_checks.view import CheckResults, View, unwritable
from scaletrain_cli.launch.resource_checks.weights import adapter_problems, weights_problems
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import has_committed
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, code_file, paths_in
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.notify import url_problem

if TYPE_CHECKING:
    from scaletrain_cli.launch.code import Snapshot

# The variables in which wandb looks for its API key.
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SCRIPTS = (".py", ".sh")  # words of code.command that name a file of the snapshot
_SERVICE = "https://api.wandb.ai"


def has_login(spec: RunSpec, environment: Mapping[str, str], folder: Path) -> bool:
    """Return whether the ranks will have a key: in their environment, or in the .netrc of their user."""
    backend = backend_for(spec.cluster.scheduler)
    if any(name in spec.env or backend.passes_on(spec, name, environment) for name in _KEYS):
        return True
    if not backend.traits.shared_run_directory:
        return False  # the ranks have another home folder
    host = urlsplit(_base_url({**environment, **spec.env}, folder)).hostname or ""
    return any(_has_entry(path, host) for path in _netrc_files(environment))


def _base_url(environment: Mapping[str, str], folder: Path) -> str:
    if url := environment.get("WANDB_BASE_URL"):
        return url
    home = expand_home(environment.get("HOME", "~"))
    config = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")
    for settings in (folder / "wandb" / "settings", config / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(settings, encoding="utf-8")
        except (configparser.Error, OSError, ValueError):
            continue
        if url := parser.get("default", "base_url", fallback=""):
            return url
    return _SERVICE


def _netrc_files(environment: Mapping[str, str]) -> list[Path]:
    if named := environment.get("NETRC"):
        return [expand_home(named)]
    home = expand_home(environment.get("HOME", "~"))
    return [home / ".netrc", home / "_netrc"]


def _has_entry(path: Path, host: str) -> bool:
    try:
        entry = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError, ValueError):
        return False
    return entry is not None and bool(entry[2])


def check_external(
    spec: RunSpec,
    folder: str | Path = "",
    *,
    code: Collection[str] | None = None,
    begun: bool = False,
    secrets: Collection[str] = (),
    hub: Mapping[str, str] | None = None,
    prepared: Collection[str] = (),
) -> CheckResults:
    """Return the results of all checks that are possible here. Changes nothing; never raises.

    ``folder`` as in View; by default the current folder. Sends requests to the hub for references to it.
    """
    view = View(spec, Path(folder or os.getcwd()), os.environ, code, begun, False, secrets, hub or {}, prepared)
    text, mirror = check_text(view), check_mirror(view)
    problems = (*text.problems, *mirror.problems)
    problems = tuple(dict.fromkeys([*problems, *(problem for check in _CHECKS for problem in check(view))]))
    notes = (*not_checked(view), *text.warnings, *not_read(view), *not_recorded(view), *hub_notes(view))
    notes += (*command_notes(view), *mirror.warnings)
    return CheckResults(problems, notes)


def check_files(spec: RunSpec) -> CheckResults:
    """Return the results of the checks of data, tokenizer and weights alone, without requests to the hub."""
    view = View(spec, Path.cwd(), os.environ)
    text = check_text(view)
    problems = tuple(dict.fromkeys([*text.problems, *(problem for check in _FILE_CHECKS for problem in check(view))]))
    notes = (*not_checked(view), *text.warnings, *not_read(view), *not_recorded(view))
    return CheckResults(problems, notes, text.files)


def require_external(spec: RunSpec, snapshot: Snapshot | None) -> tuple[Reason, ...]:
    """Check a new run with the snapshot of its code; return warnings. Raises UsageError with all problems."""
    checked = check_external(spec, code=None if snapshot is None else paths_in(snapshot.listing))
    return (*_require(checked), *(() if snapshot is None else snapshot.notes))


def require_external_to_resume(run: RunDir, record: RunRecord, snapshot: Snapshot | None = None) -> tuple[Reason, ...]:
    """Check a run to resume, with a new snapshot or the kept code; return warnings. Raises UsageError."""
    code = None if snapshot is None else paths_in(snapshot.listing)
    if code is None and record.code is not None:
        with contextlib.suppress(OSError):  # place_code reports it on the node
            code = paths_in(code_file(run, record.code, "sha256").read_bytes().decode("utf-8", "surrogateescape"))
    checked = check_external(
        record.spec,
        record.working_folder,
        code=code,
        begun=has_committed(run),
        secrets=record.spec.secret_env if run.secrets.is_file() else (),
        hub=record.hub,
        prepared=_recorded(run, record.spec),
    )
    return (*_require(checked), *(() if snapshot is None else snapshot.notes))


def _recorded(run: RunDir, spec: RunSpec) -> Collection[str]:
    return recorded_folders(spec, run.path.parent, read_entries(datasets_file(run)))[0]


def _require(checked: CheckResults) -> tuple[Reason, ...]:
    if checked.problems:
        raise UsageError(Reason("checks.spec-unusable", {"problems": len(checked.problems)}), checked.problems)
    return checked.warnings


def check_on_node(run: RunDir, record: RunRecord, node_rank: int, code_folder: Path | None) -> None:
    """Check on a node of the job, from the run's working folder, before any rank is started.

    Raises UsageError (exit code 2) if the spec is wrong, and WrongNodesError (exit code 5) if other nodes may have what
    is missing: on Slurm, and after the first checkpoint, until which everything existed.
    """
    spec, begun = record.spec, has_committed(run)
    view = View(spec, Path.cwd(), os.environ, None, begun, on_node=True, prepared=_recorded(run, spec))
    checks = [weights_problems, adapter_problems, checkpoint_problems]
    prepared = any((expand_home(path) / "dataset.json").is_file() for _, path in spec.data.paths())
    if node_rank == 0 or prepared:  # every node reads prepared data, and one node is enough to check other files
        checks += [text_problems, row_problems, tokenizer_problems, template_problems]
        checks += [class_file_problems, image_folder_problems, zero_shot_problems]
    problems = [problem for check in checks for problem in check(view)]
    if code_folder is None and spec.code.engine is not None:
        problems += _installed_problems(view)
    problems += command_problems(view, code_folder)
    cache = list(cache_problems(view))
    problems += cache
    if not problems:
        return
    why = Reason("checks.node-lacks")
    if cache and spec.data.cache.path is not None and not begun:  # the same folder on every node
        raise UsageError(why, tuple(problems))
    if begun or backend_for(spec.cluster.scheduler).replaces_nodes:
        raise WrongNodesError(why, tuple(problems))
    raise UsageError(why, tuple(problems))


def engine_problems(view: View) -> Iterator[Problem]:
    """Yield why ``code.engine`` or ``code.import_root`` is neither in the kept files of code.path nor installed."""
    code = view.spec.code
    if code.path is not None and view.code is None:
        return  # there is no snapshot of the working tree
    root = "" if code.import_root == "." else code.import_root.strip("/").removeprefix("./") + "/"
    kept = view.code or ()
    if code.path is not None and root and not any(path.startswith(root) for path in kept):
        yield view.problem("code.import_root", Reason("checks.no-import-root", {"path": code.path}), code.import_root)
        return
    module = None if code.engine is None else root + code.engine.replace(".", "/")
    if module is None or not {f"{module}.py", f"{module}/__main__.py"}.isdisjoint(kept):
        return
    yield from _installed_problems(view)


def _installed_problems(view: View) -> Iterator[Problem]:
    code = view.spec.code
    engine = str(code.engine)
    if not view.on_node and backend_for(view.spec.cluster.scheduler).has_own_python(view.spec):
        if code.path is None:
            return  # the ranks use an interpreter that is not visible here
    elif _is_installed(engine, view):
        return
    if engine.endswith(".py"):
        reason = Reason("checks.engine-is-file", {"module": engine.removesuffix(".py").replace("/", ".")})
    elif code.path is not None:
        reason = Reason("checks.engine-not-kept", {"path": code.path})
    else:
        reason = Reason("checks.engine-not-installed")
    yield view.problem("code.engine", reason, engine)


def _is_installed(module: str, view: View) -> bool:
    """Return whether ``python -m`` would find the module. Does not import parent packages: that would run code."""
    first, *rest = module.split(".")
    try:
        module_spec = find_spec(first)
    except (ImportError, ValueError):
        return False
    places = [] if module_spec is None else [Path(place) for place in module_spec.submodule_search_locations or ()]
    if module_spec is not None and not places:
        return not rest and module_spec.origin is not None
    searched = view.spec.env.get("PYTHONPATH", view.environment.get("PYTHONPATH", ""))  # as each rank gets it
    paths = (Path(entry) for entry in searched.split(os.pathsep) if entry)
    places += [view.folder / entry / first for entry in paths]
    for place in places:
        target = place.joinpath(*rest)
        if (target / "__main__.py").is_file() or (rest and target.with_name(f"{target.name}.py").is_file()):
            return True
    return not rest and any(place.with_name(f"{first}.py").is_file() for place in places)


def command_problems(view: View, code_folder: Path | None = None) -> Iterator[Problem]:
    """Yield why the program of ``code.command`` cannot be started, as far as that is certain here.

    ``code_folder``: the folder with the code on a node, in which the program starts.
    """
    words, code = view.spec.code.command, view.spec.code
    if words is None:
        return
    if view.code is not None and code.path is not None:
        tree = view.folder / expand_home(code.path)
        for word in words:
            name = os.path.normpath(word)
            if (
                word.endswith(_SCRIPTS)
                and not os.path.isabs(word)
                and name not in view.code
                and (tree / name).is_file()
            ):
                yield view.problem("code.command", Reason("checks.command-file-not-kept", {"path": code.path}), word)
    word = words[0]
    if _program(view, code_folder) is not None or _is_elsewhere(view):
        return
    if "/" in word and not os.path.isabs(word) and code.path is not None and not view.on_node:
        if view.code is not None and os.path.normpath(word) not in view.code:
            yield view.problem("code.command", Reason("checks.command-not-kept", {"path": code.path}), word)
        return
    yield view.problem("code.command", Reason("checks.command-not-found"), word)


def command_notes(view: View) -> Iterator[Reason]:
    """Yield a note if the program of ``code.command`` is not found here, and the nodes may have it."""
    words = view.spec.code.command
    if words is not None and "/" not in words[0] and _program(view) is None and _is_elsewhere(view):
        yield Reason("checks.command-not-found-here", {"program": words[0]})


def _is_elsewhere(view: View) -> bool:
    """Return whether the ranks run on other machines, or in an image: their programs are not visible here."""
    return not view.on_node and not view.spec.cluster.traits.runs_here


def _program(view: View, code_folder: Path | None = None) -> str | None:
    """Return the program of ``code.command`` as a rank would find it; None if it is not found here."""
    assert view.spec.code.command is not None
    word = view.spec.code.command[0]
    folder = code_folder or view.folder
    if "/" in word:
        return shutil.which(folder / word)
    return shutil.which(word, path=view.spec.env.get("PATH", view.environment.get("PATH")))


def checkpoint_problems(view: View) -> Iterator[Problem]:
    """Yield why this user cannot write to ``checkpoint.dir``, or to its nearest existing parent."""
    given = view.spec.checkpoint.dir
    if given == "auto" or view.unseen(given):
        return
    if reason := unwritable(view.folder / expand_home(given)):
        yield view.problem("checkpoint.dir", reason, given)


def secret_problems(view: View) -> Iterator[Problem]:
    """Yield each name of ``secret_env`` that is not set in this environment."""
    if not view.spec.cluster.traits.secrets_from_submitter:
        return
    for name in view.spec.secret_env:
        if name not in view.environment and name not in view.secrets:
            yield view.problem("secret_env", Reason("checks.secret-not-set"), name)


def tracker_problems(view: View) -> Iterator[Problem]:
    """Yield each tracker whose library is not installed here, where the ranks run here."""
    spec = view.spec
    if not spec.cluster.traits.runs_here or spec.code.own_program:
        return
    for name in spec.tracking.trackers:
        if any(find_spec(module) is None for module in EXTRAS.get(name, ())):
            params = {"tracker": name, "command": install_command(name)}
            yield view.problem(f"tracking.{name}", Reason("checks.tracker-not-installed", params), name)


def wandb_problems(view: View) -> Iterator[Problem]:
    """Yield why the tracker ``wandb`` with mode: online has no key."""
    spec, key = view.spec, "tracking.wandb.mode"
    options = spec.tracking.trackers.get("wandb")
    if getattr(options, "mode", "") != "online" or spec.code.own_program:
        return
    if has_login(spec, view.environment, view.folder):
        return
    login = ", or run `wandb login`" if spec.cluster.traits.shared_run_directory else ""
    hint = f"{backend_for(spec.cluster.scheduler).secret_hint(_KEYS[0])}{login}"
    yield view.problem(key, Reason("checks.no-wandb-key", {"login": hint}), "online")


def notify_problems(view: View) -> Iterator[Problem]:
    """Yield each webhook whose URL the run will not have, or that is none, and each command that is not found.

    Commands are looked for where the run is on this machine. No problem contains a URL.
    """
    spec, backend = view.spec, backend_for(view.spec.cluster.scheduler)
    for number, one in enumerate(spec.notify):
        if one.command is not None:
            word = one.command[0]
            path = spec.env.get("PATH", view.environment.get("PATH"))
            if spec.cluster.traits.runs_here and shutil.which(word, path=path) is None:
                reason = Reason("checks.notify-no-command", {"program": word})
                yield view.problem(f"notify.{number}.command", reason, word)
            continue
        name, key = str(one.webhook), f"notify.{number}.webhook"
        if name not in view.secrets and not backend.passes_on(spec, name, view.environment):
            reason = Reason("checks.notify-not-set", {"name": name, "hint": backend.secret_hint(name)})
            yield view.problem(key, reason, name)
        elif (url := view.environment.get(name)) and (problem := url_problem(url)):
            yield view.problem(key, Reason("checks.notify-not-a-url", {"name": name, "problem": problem}), name)


_FILE_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    dataset_problems,
    row_problems,
    tokenizer_problems,
    template_problems,
    class_file_problems,
    image_folder_problems,
    weights_problems,
    adapter_problems,
    evaluation_problems,
    zero_shot_problems,
)
_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    *_FILE_CHECKS,
    hub_problems,
    cache_problems,
    engine_problems,
    command_problems,
    checkpoint_problems,
    secret_problems,
    tracker_problems,
    wandb_problems,
    notify_problems,
    lambda view: backend_for(view.spec.cluster.scheduler).resource_problems(view),
)
