"""Check prepared data that a run spec names, by its description and the sizes of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF


def prepared_problem(folder: Path, view: View) -> Reason | None:
    """Return the problem of a folder of prepared data, of any version; None if the run can use it."""
    from scaletrain_cli.data.images.compatibility import rows_problem

    spec = view.spec
    try:
        info = json.loads((folder / "dataset.json").read_bytes())
        if "shards" in info:
            return _shards_problem(folder, view)
        width = {"uint16": 2, "uint32": 4}[info["dtype"]]
        for split in ("train", "validation"):
            found, expected = (folder / f"{split}.bin").stat().st_size // width, info[f"{split}_tokens"]
            if found != expected:
                params = {"file": f"{split}.bin", "tokens": found, "expected": expected}
                return Reason("checks.dataset-size", params)
        vocab_size, tokens = int(info["vocab_size"]), int(info["train_tokens"])
        objective, length = info.get("objective", "causal_lm"), info.get("seq_len")
        packed = info.get("packing") or "none"
    except OSError as error:
        return Reason("checks.dataset-incomplete", {"said": f"{error.filename}: {error.strerror or error}"})
    except (ValueError, KeyError, TypeError):
        return Reason("checks.dataset-unreadable")
    if spec.training.objective in LOSSES_OF:
        return None
    model = spec.language_model
    if vocab_size > model.vocab_size:
        return Reason("checks.dataset-vocabulary", {"tokens": vocab_size, "vocab_size": model.vocab_size})
    if objective != spec.training.objective:
        return Reason("checks.dataset-objective", {"found": objective, "objective": spec.training.objective})
    if length is not None:  # rows for fine-tuning, which have any number of tokens
        if length != model.seq_len:
            return Reason("checks.dataset-length", {"found": length, "seq_len": model.seq_len})
        if problem := rows_problem(spec, info, folder):
            return problem
        packing = {"found": packed, "packing": spec.data.packing}
        if packed != spec.data.packing:
            return Reason("checks.dataset-packing", packing)
        for key, value, recorded in () if view.begun else spec.data.differences(info, view.folder):
            if recorded:
                return Reason("checks.dataset-setting", {"key": key, "value": value, "found": recorded})
        return None
    if tokens <= model.seq_len:
        return Reason("checks.dataset-too-short", {"tokens": tokens, "seq_len": model.seq_len})
    return None


def _shards_problem(folder: Path, view: View) -> Reason | None:
    """Return the problem of prepared text in shards: the sizes and hashes of its files, and its token ids."""
    from scaletrain_cli.data.chunk_hashes import CorruptDataError
    from scaletrain_cli.data.token_files import open_source

    try:
        info, _ = open_source(folder)
    except ScaletrainError as error:
        if isinstance(error, CorruptDataError) and view.on_node and view.begun:
            return None  # the engine ends the run: another node has the same data
        return error.reason or Reason("checks.dataset-incomplete", {"said": str(error)})
    except OSError as error:
        return Reason("checks.dataset-incomplete", {"said": f"{error.filename}: {error.strerror or error}"})
    return description_problem(info, view.spec)


def description_problem(info: Mapping[str, Any], spec: RunSpec) -> Reason | None:
    """Return why a run cannot use prepared text in shards with this dataset.json; None if it can."""
    try:
        vocab_size, tokens = int(info["tokenizer"]["vocab_size"]), int(info["train_tokens"])
    except (KeyError, TypeError, ValueError):
        return Reason("checks.dataset-unreadable")
    if spec.training.objective in LOSSES_OF:
        return None
    if vocab_size > spec.language_model.vocab_size:
        return Reason("checks.dataset-vocabulary", {"tokens": vocab_size, "vocab_size": spec.language_model.vocab_size})
    if spec.training.objective != "causal_lm":
        return Reason("checks.dataset-objective", {"found": "causal_lm", "objective": spec.training.objective})
    length = spec.language_model.seq_len
    if len(spec.data.all_sources) == 1 and tokens <= length:
        return Reason("checks.dataset-too-short", {"tokens": tokens, "seq_len": length})
    return None
