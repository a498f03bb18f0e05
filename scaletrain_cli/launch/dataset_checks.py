"""Checks of prepared datasets before a run is queued: those that its ranks would otherwise make."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.data.stages import planned_stages
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_client_state
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET, Entry
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.losses import LOSSES_OF


def require_usable(spec: RunSpec, runs_root: Path, datasets: Iterable[Entry]) -> None:
    """Check the prepared text or images of a run.

    ``datasets``: of its sources, as a run records them; others are not checked.

    Raises UsageError for a source without a sequence to train on, and InfeasibleError if the epochs of some sources
    leave nothing for the others. Of images: if the model has too few outputs, the classes of two sources differ, or
    there are too few to validate on.
    """
    if spec.training.objective in LOSSES_OF:
        _require_usable_images(spec, runs_root, datasets)
        return
    if spec.training.objective != "causal_lm":
        return
    sequences = _train_sequences(spec, runs_root, datasets)
    problems = tuple(size_problems(spec, sequences))
    if problems:
        raise UsageError(Reason("checks.spec-unusable", {"problems": len(problems)}), problems)
    if all(source.name in sequences for source in spec.data.all_sources):
        planned_stages(spec.data, sequences, spec.total_steps, spec.training.global_batch_size)


def _require_usable_images(spec: RunSpec, runs_root: Path, datasets: Iterable[Entry]) -> None:
    from scaletrain_cli.data.images.compatibility import require_outputs, require_same_classes

    documents: dict[str, Mapping[str, Any]] = {}
    for entry in datasets:
        if entry["source"] == ZERO_SHOT:  # the preparation has checked its classes
            continue
        folder = runs_root / "datasets" / str(entry["folder"])
        with contextlib.suppress(OSError):
            document = documents[str(entry["source"])] = read_document(folder / DATASET) or {}
            require_outputs(spec, document, folder)
            _require_enough_to_validate(spec, document, str(entry["source"]))
    require_same_classes({name: document.get("classes") for name, document in documents.items()})
    sizes = {name: size for name, stored in documents.items() if isinstance(size := stored.get("train_samples"), int)}
    if all(source.name in sizes for source in spec.data.all_sources):
        planned_stages(spec.data, sizes, spec.total_steps, spec.training.global_batch_size)


def _require_enough_to_validate(spec: RunSpec, document: Mapping[str, Any], source: str) -> None:
    """Raise UsageError if images are too few in every layout of the spec, as the ranks would.

    The ranks validate on samples for training where those of the validation split do not fill a micro-batch of all
    replicas, and need as many to train on.
    """
    train, validation = document.get("train_samples"), document.get("validation_samples")
    micro = spec.training.micro_batch_size
    width = min(spec.world_size * (micro if isinstance(micro, int) else 1), spec.training.global_batch_size)
    width = 1 if spec.data.mixes else width
    if not spec.evaluation.every or not isinstance(train, int) or not isinstance(validation, int):
        return
    if validation < width and train < 2 * width:
        counts = {"unit": spec.unit, "train": train, "validation": validation, "width": width}
        raise UsageError(Reason("engine.images-too-few-to-validate", counts | {"source": spec.data.shown(source)}))


def require_same_data(spec: RunSpec, checkpoint: Checkpoint, datasets: Iterable[Entry], folder: Path = Path()) -> None:
    """Raise UsageError if a source of the checkpoint has another dataset now, or its captions another tokenizer.

    The ranks check the same. ``folder``: the base of relative paths. A tokenizer that is not visible here is left to
    the ranks.
    """
    saved = read_client_state(checkpoint.path) or {}
    trained = saved.get("sources") or {spec.data.all_sources[0].name: saved.get("dataset")}
    fingerprints = {str(entry["source"]): entry.get("fingerprint") for entry in datasets}
    for name, fingerprint in trained.items() if isinstance(trained, Mapping) else ():
        now = fingerprints.get(name)
        if isinstance(fingerprint, str) and isinstance(now, str) and now != fingerprint:
            params = {"checkpoint": checkpoint.path.name, "saved": fingerprint[:12], "found": now[:12]}
            raise UsageError(Reason("engine.data-of-checkpoint-differs", params))
    path = spec.data.tokenizer.path
    if path is not None and os.path.isfile(folder / expand_home(path)):
        from scaletrain_cli.data.images.compatibility import require_same_tokenizer

        require_same_tokenizer(spec, checkpoint.path.name, saved, folder)


def size_problems(spec: RunSpec, sequences: Mapping[str, int]) -> Iterator[Problem]:
    """Yield a problem for each source whose prepared data hold no sequence. ``sequences``: by the source's name."""
    for source, (key, path) in zip(spec.data.all_sources, spec.data.paths(), strict=True):
        if sequences.get(source.name) == 0:
            length = {"length": spec.transformer.seq_len}
            yield Problem.because(spec.where(key), key, Reason("checks.dataset-too-small", length), path)


def dataset_problems(view: View) -> Iterator[Problem]:
    """Yield the problems of sources of text that are datasets already."""
    spec = view.spec
    if spec.code.own_program or spec.unit != "tokens" or spec.training.objective != "causal_lm":
        return
    folders = {source.name: (view.folder / expand_home(source.path)).absolute() for source in spec.data.all_sources}
    named = [{"source": name, "folder": str(path)} for name, path in folders.items() if os.path.isfile(path / DATASET)]
    yield from size_problems(spec, _train_sequences(spec, Path(), named))


def _train_sequences(spec: RunSpec, runs_root: Path, datasets: Iterable[Entry]) -> dict[str, int]:
    """Return the training sequences of each source whose dataset can be read here, by its name."""
    sequences = {}
    for entry in datasets:
        with contextlib.suppress(OSError):
            document = read_document(runs_root / "datasets" / str(entry["folder"]) / DATASET)
            tokens = None if document is None else document.get("train_tokens")
            if isinstance(tokens, int):
                sequences[str(entry["source"])] = max(0, tokens - 1) // spec.transformer.seq_len
    return sequences
