"""The prepared data of a run, text or rows by its objective; and the command ``prepare``."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scaletrain_cli.data.block_cache import block_cache
from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.commands import prepare_images, prepare_text
from scaletrain_cli.data.images.compatibility import rows_problem
from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.prepared import find_prepared
from scaletrain_cli.data.report import ROWS, images_in_rows
from scaletrain_cli.engine.data.dataset import DatasetInfo, TextSequences, open_source_dataset
from scaletrain_cli.engine.data.row_dataset import SCHEMA, RowsInfo, left_out, open_rows, rows_folder
from scaletrain_cli.engine.data.row_writing import build_rows
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import built, datasets_file, owner_of_dataset, read_entries, recorded_folders
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import RunSpec


def tokenizer_path(spec: RunSpec, runs_root: Path, run: RunDir | None = None) -> Path | None:
    """Return the tokenizer.json of a spec's prepared data; None if they are not prepared, or are images.

    ``run``: which has recorded its datasets. Raises UsageError.
    """
    if is_of_images(spec):
        return None
    known = {} if run is None else recorded_folders(spec, runs_root, read_entries(datasets_file(run)))[0]
    if known:
        return next(iter(known.values())) / "tokenizer.json"
    if spec.training.objective != "causal_lm":
        return rows_folder(next(iter(spec.of_sources().values())), runs_root) / "tokenizer.json"
    folders = find_prepared(spec.data, runs_root)
    return None if folders is None else next(iter(folders.values())) / "tokenizer.json"


def prepare_rows(spec: RunSpec, runs_root: Path) -> Path:
    """Prepare the rows of a spec of one source unless they are, safely beside other builders; return their folder.

    Raises UsageError.
    """
    folder = rows_folder(spec, runs_root)

    def build(staging: Path) -> None:
        build_rows(spec, staging)
        if rows_folder(spec, runs_root) != folder:  # it is named by the content of the files, as it was before
            raise UsageError(Reason("data.file-changed", {"path": spec.data.only_source}))

    return built(folder, build)


def open_data_of(
    spec: RunSpec, folder: Path, rank: int = 0, ranks: int = 1, *, begun: bool = False
) -> tuple[DatasetInfo, TextSequences | RowSequences, TextSequences | RowSequences]:
    """Return info, training split and validation split of prepared data.

    ``begun``: the run has a checkpoint, and keeps the rows that it has trained on, whatever its settings are.

    Raises UsageError, and CorruptDataError if a file has changed since it was written.
    """
    seq_len, objective = spec.language_model.seq_len, spec.training.objective
    try:
        document = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(Reason("engine.not-a-dataset", {"folder": str(folder), "error": str(error)})) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        if objective != "causal_lm":
            raise _made_for_another(folder, "text", objective)
        return open_source_dataset(folder, seq_len, rank, ranks, block_cache(spec.data.cache))
    if document.get("objective") != objective:
        prepared = "preference pairs" if document.get("objective") == "dpo" else "rows for sft"
        raise _made_for_another(folder, prepared, objective)
    sources = [expand_home(path) for _, path in spec.data.paths()]
    if not begun and folder in sources:  # otherwise the folder is named after the settings
        for key, value, prepared in spec.data.differences(document, Path()):
            if prepared:
                params = {"folder": str(folder), "key": key, "value": value}
                raise UsageError(Reason("data.prepared-without-setting", params))
    opened = open_rows(folder, document, seq_len, rank, ranks)
    info = opened[0]
    if (problem := rows_problem(spec, asdict(info), folder)) is not None:
        raise UsageError(problem)
    if info.rows_with_bad_images and spec.data.on_bad == "stop" and not begun:
        bad = {"rows": info.rows_with_bad_images, "place": info.bad_images.partition("\n")[0]}
        raise UsageError(Reason("data.bad-images-left-out", {"folder": str(folder), **bad}))
    return opened


def _made_for_another(folder: Path, prepared: str, objective: str) -> UsageError:
    params = {"folder": str(folder), "found": prepared, "objective": objective}
    return UsageError(Reason("data.prepared-for-other-objective", params))


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Build, open and describe the data, given SPEC_JSON RUNS_ROOT [WORKERS]; 0: one on each CPU core.

    Raises ScaletrainError and OSError.
    """
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    runs_root, started = Path(arguments[1]), time.monotonic()
    if spec.training.objective == "causal_lm" or is_of_images(spec):
        prepare = prepare_images if is_of_images(spec) else prepare_text
        return prepare(spec, runs_root, int(arguments[2]) if len(arguments) > 2 else 0)
    sources = [_prepared(name, alone, runs_root) for name, alone in spec.of_sources().items()]
    print(f"ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
    if len(sources) == 1:
        return {name: value for name, value in sources[0].items() if name != "name"}
    counts = ("documents", "train_tokens", "validation_tokens", "train_sequences", "validation_sequences")
    totals = {name: sum(source[name] for source in sources) for name in (*counts, "target_tokens", "replaced")}
    return {
        "path": None,
        **totals,
        "vocab_size": max(source["vocab_size"] for source in sources),
        "dtype": sources[0]["dtype"],
        "rows": {name: sum(source["rows"][name] for source in sources) for name in sources[0]["rows"]},
        "sources": sources,
    }


def _prepared(name: str, spec: RunSpec, runs_root: Path) -> dict[str, Any]:
    """Prepare the rows of a source and describe them. Raises ScaletrainError and OSError."""
    print(f"preparing {spec.data.source} ({spec.data.tokenizer.kind} tokenizer)", file=sys.stderr)
    try:
        folder = prepare_rows(spec, runs_root)
        info, train, validation = open_data_of(spec, folder)
    except CorruptDataError as error:  # the exit code 93 is for runs
        raise ScaletrainError(error.reason or str(error)) from error
    assert isinstance(info, RowsInfo)
    if (owner := owner_of_dataset(folder)) is not None:
        print(f"{folder} was prepared by {owner}; using it as it is", file=sys.stderr)
    if info.replaced:
        print(f"{info.replaced} bytes of the text are not UTF-8 and were replaced by U+FFFD", file=sys.stderr)
    for note in left_out(info):
        print(note, file=sys.stderr)
    summary = {
        "name": name,
        "path": str(folder),
        "documents": info.documents,
        "train_tokens": info.train_tokens,
        "validation_tokens": info.validation_tokens,
        "train_sequences": len(train),
        "validation_sequences": len(validation),
        "vocab_size": info.vocab_size,
        "replaced": info.replaced,
        "dtype": info.dtype,
        "format": info.format,
        "target_tokens": info.targets,
        "rows": {name: getattr(info, f"rows_{name}") for name in ROWS},
        "lost": json.loads(info.lost),
    }
    return summary | ({"images": images_in_rows(asdict(info))} if info.tokens_per_image else {})
