"""Check the source of images or pairs: its files are there, of one format, and have no more classes than the model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from scaletrain_cli.errors import Problem, ScaletrainError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET

if TYPE_CHECKING:
    from scaletrain_cli.launch.resource_checks.files import View

_LOOK_SECONDS = 5.0  # for a request to a remote store, with its repetitions
# What a machine without credentials or network cannot see, and the nodes may.
_UNSEEN_REMOTE = ("remote.no-credentials", "remote.unavailable", "remote.profile-without-keys")
_WITH_CAUSE = {"images.source-unusable": "problem", "remote.of-key": "cause"}  # the key is named already


def image_problems(view: View, source: str) -> Iterator[Problem]:
    """Yield the problems of ``data.source``. Reads the names of files and the schema of one table."""
    from scaletrain_cli.data.images.compatibility import given_index, require_outputs, require_settings, settings_of

    if (index := given_index(source, view.folder)) is not None:
        document = read_document(index / DATASET) or {}
        try:
            require_settings(view.spec, document, index, view.folder)
            require_outputs(view.spec, document, index)
        except UsageError as error:
            yield view.problem("data.source", error.reason or recorded(error.message), source)
        return
    if find_spec("numpy") is None:  # on a login node; the preparation needs it, and checks the same
        return
    from scaletrain_cli.data.images.listing import list_source

    here = view.spec.cluster.traits.runs_here or view.on_node
    if here and find_spec("PIL") is None:
        params: dict[str, object] = {"module": "PIL", "command": install_command("vision")}
        yield view.problem("data.source", Reason("sources.library-missing", params), source)
        return
    try:
        settings = settings_of(view.spec, view.folder)
    except ScaletrainError:  # of data.images.classes, which has a check of its own
        return
    try:
        listing = list_source(source, settings, view.folder, seconds=_LOOK_SECONDS)
        is_known = bool(listing.names) or not listing.shards or find_spec("pyarrow") is not None
        classes = len(listing.class_names(settings)) if is_known else 0
    except ScaletrainError as error:
        reason = error.reason or recorded(error.message)
        while (name := _WITH_CAUSE.get(reason.code)) is not None:
            reason = reason.params[name]
        if reason.code not in _UNSEEN_REMOTE or view.spec.cluster.traits.runs_here:
            yield view.problem("data.source", reason, source)
        return
    labels = getattr(view.spec.model, "num_labels", None)
    if labels is not None and classes > labels:
        params = {"folder": source, "classes": classes, "labels": labels}
        yield view.problem("data.source", Reason("images.more-classes-than-labels", params), source)
