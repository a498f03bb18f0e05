"""Check the sources of images or pairs: their files are there, of one format, with classes that the run can use."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from scaletrain_cli.errors import Problem, ScaletrainError, UsageError
from scaletrain_cli.extras import install_command
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.resource_checks.view import LOOK_SECONDS, UNSEEN_REMOTE, View
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.shared_paths import parent_of_glob
from scaletrain_cli.spec.sources import SourceSpec

if TYPE_CHECKING:
    from scaletrain_cli.data.images.samples import ImageSettings

_WITH_CAUSE = {"images.source-unusable": "problem", "remote.of-key": "cause"}  # the key is named already


def image_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of the sources of images. Reads the names of files and the schema of a table of each."""
    spec = view.spec
    if spec.code.own_program or spec.training.objective not in LOSSES_OF:
        return
    from scaletrain_cli.data.images.compatibility import require_same_classes

    classes: dict[str, Any] = {}
    for section, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        if section.name in view.prepared or is_reference(path) or view.unseen(parent_of_glob(path)):
            continue
        problems = list(_source_problems(view, section, key, classes))
        yield from problems
        if problems:
            continue
        try:
            require_same_classes(classes)
        except UsageError as error:
            yield view.problem(key, error.reason or recorded(error.message), path)
            return


def _source_problems(view: View, section: SourceSpec, key: str, classes: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a source; add the names of its classes to ``classes``."""
    from scaletrain_cli.data.images.compatibility import given_index, require_outputs, require_settings, settings_of

    source = section.path
    if (index := given_index(source, view.folder)) is not None:
        document = read_document(index / DATASET) or {}
        classes[section.name] = document.get("classes")
        try:
            require_settings(view.spec, section, document, index, view.folder)
            require_outputs(view.spec, document, index)
        except UsageError as error:
            yield view.problem(key, error.reason or recorded(error.message), source)
        return
    try:
        settings = settings_of(view.spec, section, view.folder)
    except ScaletrainError:  # of data.images.classes, which has a check of its own
        return
    class_list = yield from _class_names(view, key, source, settings)
    if class_list is None:
        return
    classes[section.name] = class_list.names
    labels = getattr(view.spec.model, "num_labels", None)
    if labels is not None and len(class_list.names) > labels:
        params = {"folder": source, "classes": len(class_list.names), "labels": labels}
        yield view.problem(key, Reason("images.more-classes-than-labels", params), source)


def zero_shot_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of ``evaluation.zero_shot``: of its source, and of the names of its classes."""
    given, key = view.spec.evaluation.zero_shot, f"{ZERO_SHOT}.source"
    if given is None or not view.spec.evaluation.every or view.spec.code.own_program or ZERO_SHOT in view.prepared:
        return
    if given.classes is not None and view.unseen(given.classes):
        return
    from scaletrain_cli.data.images.compatibility import given_index, zero_shot_classes, zero_shot_settings

    try:
        settings = zero_shot_settings(view.spec, view.folder)
    except UsageError as error:
        yield view.problem(f"{ZERO_SHOT}.classes", error.reason or recorded(error.message), given.classes)
        return
    if is_reference(given.source) or view.unseen(parent_of_glob(given.source)):
        return
    if (index := given_index(given.source, view.folder)) is not None:
        try:
            zero_shot_classes(view.spec, read_document(index / DATASET) or {}, index, view.folder)
        except UsageError as error:
            yield view.problem(key, error.reason or recorded(error.message), given.source)
        return
    class_list = yield from _class_names(view, key, given.source, settings)
    if class_list is not None and class_list.are_known and not class_list.names:
        yield view.problem(key, Reason("images.zero-shot-without-names", {"folder": given.source}), given.source)


class _Classes(NamedTuple):
    """Names of the classes of a source; empty also if a library is missing here that reads them."""

    names: tuple[str, ...]
    are_known: bool


def _class_names(
    view: View, key: str, source: str, settings: ImageSettings
) -> Generator[Problem, None, _Classes | None]:
    """Yield the problems of a source that is no index; return its classes, None if it cannot be looked at."""
    from scaletrain_cli.data.images.listing import list_source

    if (view.spec.cluster.traits.runs_here or view.on_node) and find_spec("PIL") is None:
        params: dict[str, object] = {"module": "PIL", "command": install_command("vision")}
        yield view.problem(key, Reason("sources.library-missing", params), source)
        return None
    try:
        listing = list_source(source, settings, view.folder, key, seconds=LOOK_SECONDS)
        is_known = bool(listing.names) or not listing.shards or find_spec("pyarrow") is not None
        return _Classes(listing.class_names(settings) if is_known else (), is_known)
    except ScaletrainError as error:
        reason = error.reason or recorded(error.message)
        while (name := _WITH_CAUSE.get(reason.code)) is not None:
            reason = reason.params[name]
        if reason.code not in UNSEEN_REMOTE or view.spec.cluster.traits.runs_here:
            yield view.problem(key, reason, source)
        return None
