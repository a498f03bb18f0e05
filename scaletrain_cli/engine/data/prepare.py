"""The command ``prepare`` of an engine process: build the dataset of a resolved spec. Progress goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.engine.data.chunk_hashes import CorruptDataError
from scaletrain_cli.engine.data.dataset import open_dataset, prepare_dataset
from scaletrain_cli.errors import ScaletrainError
from scaletrain_cli.rundir.shared_datasets import owner_of_dataset
from scaletrain_cli.spec import RunSpec


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Build, open and describe the dataset, given SPEC_JSON RUNS_ROOT. Raises ScaletrainError and OSError."""
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    print(f"preparing {spec.data.source} ({spec.data.tokenizer.kind} tokenizer)", file=sys.stderr)
    started = time.monotonic()
    try:
        folder = prepare_dataset(spec.data, Path(arguments[1]))
        info, train, validation = open_dataset(folder, spec.transformer.seq_len)
    except CorruptDataError as error:  # the exit code 93 is for runs
        raise ScaletrainError(str(error)) from error
    if (owner := owner_of_dataset(folder)) is not None:
        print(f"{folder} was prepared by {owner}; using it as it is", file=sys.stderr)
    if info.replaced:
        print(f"{info.replaced} bytes of the text are not UTF-8 and were replaced by U+FFFD", file=sys.stderr)
    print(f"ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return {
        "path": str(folder),
        "documents": info.documents,
        "train_tokens": info.train_tokens,
        "validation_tokens": info.validation_tokens,
        "train_sequences": len(train),
        "validation_sequences": len(validation),
        "vocab_size": info.vocab_size,
        "replaced": info.replaced,
        "dtype": info.dtype,
    }
