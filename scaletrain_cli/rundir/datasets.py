"""The datasets that a run reads, in ``<run>/preparation/datasets.json``: later attempts do not look at the sources.

Each source has one entry for the settings that decide its dataset. A source that the run reads already keeps its
dataset when another one is added, and when its files are touched, moved or deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.hub.cache import path_in_cache
from scaletrain_cli.rundir.documents import undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import DATASET, is_readable
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.data import SETTINGS_OF_ROWS
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.sources import SourceSpec

NAME = "datasets.json"
_SCHEMA = "scaletrain.run-datasets/v1"
_OF_TEXT = {"tokenizer", "on_bad", "validation_split"}
_OF_ROWS = {"tokenizer", "validation_split", "chat_template"} | SETTINGS_OF_ROWS

Entry = dict[str, Any]


def datasets_file(run: RunDir) -> Path:
    """Return the file in which a run records its datasets."""
    return run.path / "preparation" / NAME


def entries_of(spec: RunSpec, runs_root: Path, folders: Mapping[str, Path]) -> list[Entry]:
    """Return entries for the datasets of the sources of a spec, by name. A dataset that cannot be read has none."""
    entries = []
    for name, key in _settings_keys(spec).items():
        if (folder := folders.get(name)) is not None and (found := _identity(folder)) is not None:
            datasets = (runs_root / "datasets").absolute()
            entries.append(
                {
                    "source": name,
                    "settings": key,
                    # relative to the folder of all datasets, so that both may be moved
                    "folder": folder.name if folder.absolute().parent == datasets else str(folder.absolute()),
                    **found,
                }
            )
    return entries


def read_entries(file: Path) -> list[Entry]:
    """Return what is recorded; empty if there is no file, or if it is damaged."""
    found = (undamaged_document(file) or {}).get("datasets")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def record_datasets(file: Path, entries: Iterable[Entry]) -> None:
    """Record datasets beside those of other sources and settings. Raises OSError."""
    before = read_entries(file)
    merged = {entry.get("settings"): entry for entry in [*before, *entries]}
    if list(merged.values()) != before:
        make_folder(file.parent, parents=True)
        write_document(file, {"schema": _SCHEMA, "datasets": list(merged.values())})


def recorded_folders(spec: RunSpec, runs_root: Path, entries: Iterable[Entry]) -> tuple[dict[str, Path], list[Path]]:
    """Return the recorded datasets by the names of the sources of a spec, and those that are gone or were replaced."""
    known = {entry.get("settings"): entry for entry in entries}
    found, gone = {}, []
    for name, key in _settings_keys(spec).items():
        if (entry := known.get(key)) is None:
            continue
        folder = runs_root / "datasets" / str(entry.get("folder"))  # an absolute path replaces the first part
        same = _identity(folder) == {name: entry.get(name) for name in ("fingerprint", "seal")}
        if same and is_readable(folder):
            found[name] = folder
        else:
            gone.append(folder)
    return found, gone


def _settings_keys(spec: RunSpec) -> dict[str, str]:
    """Return a hash of the settings of each dataset of a run, by its name."""
    found = {section.name: _settings_key(spec, section) for section in spec.data.all_sources}
    zero_shot = spec.evaluation.zero_shot
    if zero_shot is not None and spec.evaluation.every:
        path = path_in_cache(zero_shot.source) or zero_shot.source
        found[ZERO_SHOT] = _hashed([ZERO_SHOT, path, zero_shot.classes, spec.data.on_bad])
    return found


def _settings_key(spec: RunSpec, section: SourceSpec) -> str:
    """Return a hash of all settings that decide the dataset of a source, without those of other sources.

    The name of the source is not among them, nor is its share of the samples.
    """
    data = spec.data
    identity: list[Any] = [section.path, section.format, section.field]
    if spec.training.objective == "causal_lm":
        identity.append(data.model_dump(mode="json", include=_OF_TEXT))
        steps = [step for step in data.prepare if step.only is None or section.name in step.only]
        identity.append([step.model_dump(mode="json", exclude={"only"}) for step in steps])
    elif spec.training.objective in LOSSES_OF:
        identity[0] = path_in_cache(section.path) or section.path  # nodes may have caches of the hub at other places
        identity += [spec.training.objective, spec.training.loss.of(spec.training.objective)]
        identity.append(data.model_dump(mode="json", include={"format", "on_bad", "validation_split"}))
        identity.append(data.images.model_dump(mode="json", include={"fields", "classes"}))
        if section.fields is not None:
            identity.append(section.fields.model_dump(mode="json"))
    else:
        identity += [spec.training.objective, spec.language_model.seq_len, section.validation_path]
        identity.append(data.model_dump(mode="json", include=_OF_ROWS))
        if isinstance(spec.model, LlavaSpec):
            identity += [data.images.folder, spec.model.image_token_index, spec.model.tokens_per_image]
    return _hashed(identity)


def _hashed(identity: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _identity(folder: Path) -> dict[str, Any] | None:
    """Return what dataset.json says about the content of a dataset; None if there is none that can be read."""
    found = undamaged_document(folder / DATASET)
    return None if found is None else {name: found.get(name) for name in ("fingerprint", "seal")}
