"""The images that a spec asks for, and checks that prepared ones and the tokenizer of captions are these. No numpy."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaletrain_cli.data.images.samples import ImageSettings, Targets, class_names, labels_named
from scaletrain_cli.data.tokenizers.files import special_tokens, tokenizer_file
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ClipSpec, DataSpec, LlavaSpec, RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.images import ImageFieldsSpec
from scaletrain_cli.spec.sources import SourceFieldsSpec, SourceSpec

SCHEMA = "scaletrain.images/v1"
FILES = "files.json"  # of an index: the files of its source
_TARGETS: dict[str, Targets] = {"classification": "class", "regression": "numbers", "contrastive": "none"}
_READ_FOR = {"class": "cross_entropy", "classes": "bce", "numbers": "regression", "none": "contrastive losses"}
_DEFAULT_SHARE = DataSpec.model_fields["validation_split"].default
_MOST_NAMES = 5  # of classes, in a message
_AROUND_CAPTIONS = ("bos_token", "eos_token", "pad_token")
_CLASSES = f"{ZERO_SHOT}.classes"


class NamedSource(NamedTuple):
    """A source of images of a run: its name among the datasets of the run, the key of its path, and the path.

    ``section``: of a source of training; None for that of ``evaluation.zero_shot``.
    """

    name: str
    key: str
    path: str
    section: SourceSpec | None

    def settings(self, spec: RunSpec, folder: Path = Path()) -> ImageSettings:
        """Return how the source is read. Raises UsageError, see ``settings_of``."""
        return zero_shot_settings(spec, folder) if self.section is None else settings_of(spec, self.section, folder)


def sources_of(spec: RunSpec) -> tuple[NamedSource, ...]:
    """Return the sources of training, and that of ``evaluation.zero_shot``."""
    pairs = zip(spec.data.all_sources, spec.data.paths(), strict=True)
    named = [NamedSource(section.name, key, path, section) for section, (key, path) in pairs]
    others = list(spec.data_paths())[len(named) :]
    return (*named, *(NamedSource(ZERO_SHOT, key, path, None) for key, path in others))


def zero_shot_settings(spec: RunSpec, folder: Path = Path()) -> ImageSettings:
    """Return how the images of ``evaluation.zero_shot`` are read: each with one class, all as one split.

    Raises UsageError if the file with the names of the classes cannot be read.
    """
    assert spec.evaluation.zero_shot is not None
    path = spec.evaluation.zero_shot.classes
    return ImageSettings(
        class_names=() if path is None else class_names(path, folder, _CLASSES),
        validation_share=0.0,
        skips_bad=spec.data.on_bad == "skip",
        only_evaluation=True,
    )


def zero_shot_classes(spec: RunSpec, document: Mapping[str, Any], index: Path, folder: Path = Path()) -> list[str]:
    """Return the names of the classes of prepared images for ``evaluation.zero_shot``, in the order of their labels.

    ``document``: dataset.json. ``folder``: the base of the path of ``evaluation.zero_shot.classes``. Raises UsageError
    if the images have no classes, or these have no names.
    """
    assert spec.evaluation.zero_shot is not None
    path, names, count = spec.evaluation.zero_shot.classes, document.get("classes"), document.get("num_classes")
    if count is None or (document.get("settings") or {}).get("targets") != "class":
        raise UsageError(Reason("images.zero-shot-without-classes", {"folder": str(index)}))
    made_for_it = (document.get("settings") or {}).get("only_evaluation")
    if path is None or (made_for_it and given_index(spec.evaluation.zero_shot.source, folder) is None):
        if names is None:
            raise UsageError(Reason("images.zero-shot-without-names", {"folder": str(index)}))
        return list(names)
    given = class_names(path, folder, _CLASSES)
    if len(given) < count or (names is not None and len(given) != count):
        params = {"path": path, "names": len(given), "classes": count, "folder": str(index)}
        raise UsageError(Reason("images.zero-shot-names-differ", params))
    if names is None:
        return list(given)
    name_of = dict(zip(labels_named(names, given), given, strict=True))
    if absent := [label for label in names if label not in name_of]:
        params = {"path": path, "label": absent[0], "folder": str(index)}
        raise UsageError(Reason("images.zero-shot-label-not-named", params))
    return [name_of[label] for label in names]


def rows_problem(spec: RunSpec, document: Mapping[str, Any], folder: Path) -> Reason | None:
    """Return why prepared rows with this dataset.json do not have the images of a model; None if they do.

    A language model needs rows without images.
    """
    prepared = int(document.get("tokens_per_image") or 0), int(document.get("image_token") or 0)
    model = spec.model
    needed = (model.tokens_per_image, model.image_token_index) if isinstance(model, LlavaSpec) else (0, 0)
    if prepared == needed:
        return None
    params = dict(zip(("found", "found_id", "count", "id"), (*prepared, *needed), strict=True))
    return Reason("data.prepared-with-other-images", {"folder": str(folder), **params})


def settings_of(spec: RunSpec, section: SourceSpec, folder: Path = Path()) -> ImageSettings:
    """Return how a source of a spec is read: what the loss needs of a sample. Raises UsageError.

    ``folder``: the base of relative paths.
    """
    targets, captions = _read_parts(spec)
    data, named = spec.data, section.fields or spec.data.images.fields
    path = data.images.classes if targets in ("class", "classes") else None
    return ImageSettings(
        _format_of(spec, section),
        named.image,
        named.label,
        named.caption,
        targets,
        captions,
        () if path is None else class_names(path, folder),
        data.validation_split,
        data.on_bad == "skip",
    )


def given_index(path: str, folder: Path) -> Path | None:
    """Return the folder that a path names if it is an index itself."""
    place = folder / expand_home(path)
    document = read_document(place / DATASET)
    return place if document is not None and document.get("schema") == SCHEMA else None


def _format_of(spec: RunSpec, section: SourceSpec) -> str:
    return spec.data.format if section.format == "auto" else section.format


def require_settings(
    spec: RunSpec, section: SourceSpec, document: Mapping[str, Any], index: Path, folder: Path = Path()
) -> None:
    """Raise UsageError if an index that a spec names as its source was made for other settings.

    Settings with their default value ask for nothing. ``document``: dataset.json. ``folder``: the base of the path of
    data.images.classes.
    """
    made, images, data = document.get("settings") or {}, spec.data.images, spec.data
    fields: ImageFieldsSpec | SourceFieldsSpec = section.fields or images.fields
    prefix = "data.images." if section.fields is None else "data.sources.*."
    targets, captions = _read_parts(spec)
    read = made.get("targets", targets)
    if (targets != "none" and read != targets) or (captions and not made.get("captions", captions)):
        params = {"folder": str(index), "loss": spec.training.loss.of(spec.training.objective)}
        raise UsageError(Reason("images.index-of-other-targets", params | {"found": _READ_FOR[read]}))
    given = {
        "data.format": (_format_of(spec, section), "auto", made.get("format")),
        f"{prefix}fields.image": (fields.image, "auto", made.get("image")),
        "data.validation_split": (data.validation_split, _DEFAULT_SHARE, made.get("validation_share")),
        "data.on_bad": (data.on_bad, "stop", "skip" if made.get("skips_bad") else "stop"),
    }
    if targets != "none":
        given[f"{prefix}fields.label"] = fields.label, "auto", made.get("label")
    if captions:
        given[f"{prefix}fields.caption"] = fields.caption, "auto", made.get("caption")
    if given["data.format"][0] == document.get("format"):
        del given["data.format"]
    if images.classes is not None and targets in ("class", "classes") and document.get("classes") is not None:
        names = ", ".join(class_names(images.classes, folder)[:_MOST_NAMES])
        given["data.images.classes"] = names, "", ", ".join(document["classes"][:_MOST_NAMES])
        if list(class_names(images.classes, folder)) == document["classes"]:
            del given["data.images.classes"]
    for key, (value, default, prepared) in given.items():
        if value not in (default, prepared):
            params = {"folder": str(index), "key": key, "value": str(value), "found": str(prepared)}
            raise UsageError(Reason("images.index-of-other-settings", params))


def _read_parts(spec: RunSpec) -> tuple[Targets, bool]:
    """Return the targets that the loss of a spec needs, and True if it needs captions."""
    objective = spec.training.objective
    loss = spec.training.loss.of(objective)
    captions = objective == "contrastive" and loss != "nt_xent"  # which compares views of one image
    return "classes" if loss == "bce" else _TARGETS[objective], captions


def require_outputs(spec: RunSpec, document: Mapping[str, Any], index: Path) -> None:
    """Raise UsageError if the data have more classes than the model has outputs, or targets of another size.

    Targets of several classes per image have a number for each of them.
    """
    labels, classes = getattr(spec.model, "num_labels", None), document.get("num_classes")
    if labels is None:
        return
    several = (document.get("settings") or {}).get("targets") == "classes"
    if classes is not None and (classes > labels or (several and classes != labels)):
        params = {"folder": str(index), "classes": classes, "labels": labels}
        raise UsageError(Reason("images.more-classes-than-labels", params))
    size = document.get("target_size")
    if size is not None and size != labels:
        params = {"folder": str(index), "numbers": size, "labels": labels}
        raise UsageError(Reason("images.targets-differ-from-labels", params))


def require_same_classes(classes: Mapping[str, Sequence[str] | None]) -> None:
    """Raise UsageError if two sources have other classes, or the same ones with other numbers.

    ``classes``: the names of the classes by the name of the source, in the order of their numbers; None or empty for a
    source that has only numbers, which then count as those of the others.
    """
    named = {source: list(names) for source, names in classes.items() if names}
    for source, names in named.items():
        first, expected = next(iter(named.items()))
        if names == expected:
            continue
        params: dict[str, Any] = {"first": first, "second": source}
        missing, added = sorted({*expected} - {*names}), sorted({*names} - {*expected})
        if not missing and not added:
            number = next(number for number, name in enumerate(expected) if name != names[number])
            params |= {"number": number, "expected": expected[number], "found": names[number]}
            raise UsageError(Reason("images.class-order-differs", params))
        params |= {"missing": missing[:_MOST_NAMES] or ["none"], "added": added[:_MOST_NAMES] or ["none"]}
        params |= {"missing_count": len(missing), "added_count": len(added)}
        raise UsageError(Reason("images.classes-differ", params))


def caption_tokenizer_digest(spec: RunSpec, folder: Path = Path()) -> str | None:
    """Return the SHA-256 of the tokenizer that encodes the captions of a run; None for a run without captions.

    It is that of tokenizer.json, and of the special tokens if the files beside it name some: begin, end and padding of
    each caption. ``folder``: the base of a relative path. Raises UsageError if a file cannot be read.
    """
    if not isinstance(spec.model, ClipSpec) or spec.data.tokenizer.path is None:
        return None
    path = folder / expand_home(spec.data.tokenizer.path)
    digest = hashlib.sha256(tokenizer_file(str(path), spec.data.tokenizer.tokenizer_class))
    if names := {name: text for name, text in special_tokens(path.parent).items() if name in _AROUND_CAPTIONS}:
        digest.update(json.dumps(names, sort_keys=True).encode())
    return digest.hexdigest()


def require_same_tokenizer(spec: RunSpec, checkpoint: str, saved: Mapping[str, Any], folder: Path = Path()) -> None:
    """Raise UsageError if the captions of a checkpoint had another tokenizer.json than the spec names now.

    ``saved``: what the checkpoint states of its data; the tokenizer only for a run with captions.
    """
    trained = saved.get("caption_tokenizer")
    if isinstance(trained, str) and (digest := caption_tokenizer_digest(spec, folder)) not in (None, trained):
        params = {"checkpoint": checkpoint, "path": spec.data.tokenizer.path, "saved": trained[:12]}
        raise UsageError(Reason("data.caption-tokenizer-differs", params | {"found": str(digest)[:12]}))
