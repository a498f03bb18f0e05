"""Checks of prepared datasets before a run is queued: those that its ranks would otherwise make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from scaletrain_cli.data.stages import planned_stages
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_client_state
from scaletrain_cli.rundir.datasets import Entry
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import DATASET
from scaletrain_cli.spec import RunSpec


def require_usable(spec: RunSpec, runs_root: Path, datasets: Iterable[Entry]) -> None:
    """Check the prepared text of a run. ``datasets``: of its sources, as a run records them; others are not checked.

    Raises UsageError for a source without a sequence to train on, and InfeasibleError if the epochs of some sources
    leave nothing for the others.
    """
    if spec.training.objective != "causal_lm":
        return
    length = spec.transformer.seq_len
    tokens = dict(_train_tokens(runs_root, datasets))
    sequences = {name: max(0, count - 1) // length for name, count in tokens.items()}
    problems = [
        Problem.because(spec.where(key), key, Reason("checks.dataset-too-small", _size(tokens[name], length)), path)
        for name, (key, path) in zip((source.name for source in spec.data.all_sources), spec.data.paths(), strict=True)
        if sequences.get(name) == 0
    ]
    if problems:
        raise UsageError(Reason("checks.spec-unusable", {"problems": len(problems)}), tuple(problems))
    if all(source.name in sequences for source in spec.data.all_sources):
        planned_stages(spec.data, sequences, spec.total_steps, spec.training.global_batch_size)


def require_same_data(spec: RunSpec, checkpoint: Checkpoint, datasets: Iterable[Entry]) -> None:
    """Raise UsageError if a source of the checkpoint has another dataset now, as the ranks would."""
    saved = read_client_state(checkpoint.path) or {}
    trained = saved.get("sources") or {spec.data.all_sources[0].name: saved.get("dataset")}
    found = {str(entry["source"]): entry.get("fingerprint") for entry in datasets}
    for name, fingerprint in trained.items() if isinstance(trained, Mapping) else ():
        now = found.get(name)
        if isinstance(fingerprint, str) and isinstance(now, str) and now != fingerprint:
            params = {"checkpoint": checkpoint.path.name, "saved": fingerprint[:12], "found": now[:12]}
            raise UsageError(Reason("engine.data-of-checkpoint-differs", params))


def _train_tokens(runs_root: Path, datasets: Iterable[Entry]) -> Iterator[tuple[str, int]]:
    """Yield the name of each source whose dataset can be read here, and its training tokens."""
    for entry in datasets:
        document = read_document(runs_root / "datasets" / str(entry["folder"]) / DATASET)
        count = None if document is None else document.get("train_tokens")
        if isinstance(count, int):
            yield str(entry["source"]), count


def _size(tokens: int, length: int) -> dict[str, int]:
    return {"tokens": tokens, "length": length}
