"""The question ``export`` of an engine process: the weights of a checkpoint as Hugging Face has them.

Writes safetensors, config.json and what export_text says of the tokenizer. One matrix is read at a time and one file
held in memory, whatever layout saved the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scaletrain_cli.engine.export_text import TextFiles, text_files
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.state.pieces import Piece
from scaletrain_cli.engine.state.reader import StateReader
from scaletrain_cli.engine.state.snapshot import AVERAGE, WEIGHT
from scaletrain_cli.engine.weights.materialise import named_matrices
from scaletrain_cli.engine.weights.safetensors import mixtral_name
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_checkpoint
from scaletrain_cli.safe_files import create_file, make_folder
from scaletrain_cli.spec import RunSpec, to_hugging_face

LARGEST_FILE_BYTES = 5_000_000_000  # as transformers cuts them
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_RANK = -1  # so that no rank's file is taken for one's own


def answer(arguments: Sequence[str]) -> dict[str, Any]:
    """Export; the arguments are CHECKPOINT SPEC_JSON OUTPUT RUNS_ROOT and options. Raises ScaletrainError, OSError."""
    parser = argparse.ArgumentParser(prog="export", description="Write a checkpoint's weights as Hugging Face files.")
    for name in ("checkpoint", "spec", "output", "runs_root"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--averaged", action="store_true")
    options = parser.parse_args(arguments)
    spec = RunSpec.model_validate_json(options.spec.read_text(encoding="utf-8"))
    text, dtype = text_files(spec, options.runs_root), _DTYPES[options.dtype]
    told = export(options.checkpoint, spec, options.output, dtype, text, averaged=options.averaged)
    return {**told, "tokenizer": str(options.output / "tokenizer.json") if text.has_tokenizer else None}


def export(
    checkpoint: Path,
    spec: RunSpec,
    output: Path,
    dtype: torch.dtype,
    text: TextFiles,
    *,
    averaged: bool = False,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> dict[str, Any]:
    """Write the folder ``output``, which appears whole or not at all. Raises ScaletrainError and OSError."""
    model = spec.transformer
    config = to_hugging_face(model) | {"torch_dtype": str(dtype).removeprefix("torch."), **text.ids}
    found = read_checkpoint(checkpoint)
    if not isinstance(found, Checkpoint):
        raise ScaletrainError(f"{checkpoint} is not a valid checkpoint: {found}.")
    reader = StateReader(checkpoint, _NO_RANK, (), found.files)
    kind = AVERAGE if averaged else WEIGHT
    if kind not in reader.kinds:
        raise UsageError(f"{checkpoint.name} has no averaged weights: the run has training.averaging.name = none.")
    if output.exists():
        raise UsageError(f"{output} exists and is not overwritten. Give another folder with --output.")
    draft = output.with_name(f".{output.name}.{os.urandom(8).hex()}.tmp")
    make_folder(draft, mode=0o777, exist_ok=False)
    try:
        written = draft / "config.json"
        create_file(written, json.dumps(config, indent=2) + "\n", public=True)
        for name, content in text.files.items():
            create_file(draft / name, content, public=True)
        shapes = dict(named_matrices(outline(model)))
        rename = mixtral_name if config["model_type"] == "mixtral" else str
        files = list(_files(shapes, dtype.itemsize, largest_file_bytes))
        place: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = {rename(matrix): _read(reader, kind, matrix, shapes[matrix], dtype) for matrix in names}
            save_file(tensors, draft / name, metadata={"format": "pt"})  # without it transformers refuses the file
            (draft / name).chmod(written.stat().st_mode)  # safetensors gives its files to nobody else
            place |= dict.fromkeys(tensors, name)
        parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        total_bytes = parameters * dtype.itemsize
        if len(files) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": place}
            create_file(draft / "model.safetensors.index.json", json.dumps(index, indent=2), public=True)
        draft.rename(output)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return {"path": str(output), "parameters": parameters, "bytes": total_bytes, "model_type": config["model_type"]}


def _files(shapes: dict[str, tuple[int, ...]], element_bytes: int, most_bytes: int) -> Iterator[list[str]]:
    """Names in the order of the model, as many to a file as fit into it, one at the least."""
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * element_bytes
        if names and held + size > most_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _read(reader: StateReader, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = Piece(name, shape, None, 0, torch.Size(shape).numel())
    return reader.read(kind, whole).view(shape).to(dtype)
