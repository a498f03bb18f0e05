"""Check the mirror of a run: the library, the rights to write, and that it is not in the runs root."""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.errors import Problem, ScaletrainError
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.mirror import is_in_store

_LOOK_SECONDS = 5.0  # for a request, with its repetitions
# What a machine without credentials or network cannot see, and the nodes may.
_UNSEEN = ("remote.no-credentials", "remote.unavailable", "remote.profile-without-keys")


class MirrorResults(NamedTuple):
    """Why the run cannot write to its mirror, and a note if that cannot be checked from here."""

    problems: tuple[Problem, ...] = ()
    notes: tuple[Reason, ...] = ()


def check_mirror(view: View) -> MirrorResults:
    """Return the results for checkpoint.mirror. Writes a small object to a store, and deletes it. Never raises."""
    to = view.spec.checkpoint.mirror.to
    problem, unseen = _check(view)
    return MirrorResults(
        () if problem is None else (view.problem("checkpoint.mirror.to", problem, to),),
        () if unseen is None else (Reason("mirror.not-checked", {"place": to, "cause": unseen}),),
    )


def _check(view: View) -> tuple[Reason | None, Reason | None]:
    """Return the problem of the mirror, and why it could not be checked; None for none."""
    to = view.spec.checkpoint.mirror.to
    if to is None:
        return None, None
    if not is_in_store(to):
        return _folder_problem(view, to), None
    if find_spec("obstore") is None:
        reason = Reason("mirror.no-library", {"command": install_command("remote")})
        return (reason, None) if view.spec.cluster.traits.runs_here else (None, reason)
    from scaletrain_cli.mirror.object_store import store_variables

    try:
        with store_variables(view.spec.env):
            from scaletrain_cli.mirror.object_store import ObjectStore

            store, name = ObjectStore(to, _LOOK_SECONDS), f".scaletrain-{secrets.token_hex(8)}"
            store.write(name, b"written to check a run spec")
            store.delete(name)
    except ScaletrainError as error:
        cause = error.reason or Reason("recorded.text", {"text": str(error)})
        if cause.code in _UNSEEN and not view.spec.cluster.traits.runs_here:
            return None, cause
        return Reason("mirror.not-writable", {"cause": cause}), None
    return None, None


def _folder_problem(view: View, to: str) -> Reason | None:
    if view.unseen(to):
        return None
    folder = Path(os.path.realpath(expand_home(to)))
    if folder.is_relative_to(os.path.realpath(runs_root())):
        return Reason("mirror.inside-run", {"place": to})
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return Reason("checks.checkpoints-no-folder", {"folder": str(there)})
    if not os.access(there, os.W_OK | os.X_OK):
        return Reason("checks.checkpoints-not-writable", {"folder": str(there)})
    return None
