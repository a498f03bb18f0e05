"""The command ``export`` of an engine process: write a checkpoint's weights as Hugging Face files.

Writes safetensors, config.json, and the tokenizer with its settings. Reads one matrix at a time and holds one file in
memory, whatever layout saved the checkpoint.
"""

import argparse
import contextlib
import glob
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from scaletrain_cli.engine.checkpoint.adapter_export import Base, MergedWeights, Weights, exported_model, peft_files
from scaletrain_cli.engine.checkpoint.shard_file import Slice, StateReader
from scaletrain_cli.engine.checkpoint.snapshot import AVERAGE, OUTER, WEIGHT
from scaletrain_cli.engine.checkpoint.tokenizer_export import TextFiles, image_files, json_file, text_files
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.gpt_oss_files import Stored, stored_tensors
from scaletrain_cli.engine.model.materialization import named_weights, stored_buffers
from scaletrain_cli.engine.model.peft_files import CONFIG, WEIGHTS
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, check_base_of, read_base, read_checkpoint
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import create_file, expand_home, locked, make_folder, open_to_read
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.weight_files import LANGUAGE_MODEL, mixtral_name

LARGEST_FILE_BYTES = 5_000_000_000  # the file size limit of transformers
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# By an objective or a loss: what transformers makes of outputs, where it is not the softmax over classes.
_PROBLEM_TYPES = {"regression": "regression", "bce": "multi_label_classification"}
_LOCK = ".lock"  # in the draft of an export


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Export, given SPEC_JSON OUTPUT RUNS_ROOT CHECKPOINT... and options. Raises ScaletrainError and OSError."""
    parser = argparse.ArgumentParser(prog="export", description="Write a checkpoint's weights as Hugging Face files.")
    for name in ("spec", "output", "runs_root"):
        parser.add_argument(name, type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+", help="several: the mean of their weights is exported")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--averaged", action="store_true")
    parser.add_argument("--format", choices=("merged", "peft"), default="merged")
    parser.add_argument("--base", nargs=2, metavar=("NAME", "REVISION"), help="of an adapter: its base on the hub")
    parser.add_argument("--run", type=Path, help="the folder of the run, which has recorded its datasets")
    options = parser.parse_args(arguments)
    run = None if options.run is None else RunDir(options.run)
    spec = RunSpec.model_validate_json(options.spec.read_text(encoding="utf-8"))
    text, dtype = text_files(spec, options.runs_root, run), _DTYPES[options.dtype]
    if options.format == "peft":
        base = Base(*options.base) if options.base else None
        written = export_adapter(options.checkpoints[0], spec, options.output, text, base, averaged=options.averaged)
    else:
        written = export(options.checkpoints, spec, options.output, dtype, text, averaged=options.averaged)
    return {**written, "tokenizer": str(options.output / "tokenizer.json") if "tokenizer.json" in text.files else None}


def export(
    checkpoints: Sequence[Path],
    spec: RunSpec,
    output: Path,
    dtype: torch.dtype,
    text: TextFiles,
    *,
    averaged: bool = False,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> dict[str, Any]:
    """Write the folder ``output`` atomically, and return its path and size. Raises ScaletrainError and OSError.

    Of several checkpoints the mean of their weights is written (arXiv:1803.05407), computed in fp32 and rounded once.
    Adapters are merged into the weights.
    """
    model = exported_model(spec.model) if isinstance(spec.model, ModelSpec) else spec.model
    type_name = str(dtype).removeprefix("torch.")
    config = to_hugging_face(model) | {"torch_dtype": type_name}
    if isinstance(model, ClipSpec):  # the model itself needs the end of a caption
        config["text_config"] |= {name: number for name, number in text.ids.items() if number is not None}
    else:
        config |= text.ids
    for name in _PROBLEM_TYPES.keys() & {spec.training.objective, spec.training.loss.name}:
        config["problem_type"] = _PROBLEM_TYPES[name]
    if text.classes:  # of outputs beyond them, the names stay numbers
        config["id2label"] |= {str(number): name for number, name in enumerate(text.classes)}
        config["label2id"] = {name: int(number) for number, name in config["id2label"].items()}
    kind = AVERAGE if averaged else WEIGHT
    sources: list[Weights] = [_open(checkpoint, kind, spec.model) for checkpoint in checkpoints]
    if isinstance(spec.model, ModelSpec) and spec.model.adapter is not None:
        sources = [MergedWeights(source, spec.model) for source in sources]
    with _draft_of(output) as draft:
        _write_text(draft, {"config.json": json_file(config)} | text.files | image_files(spec, text.files))
        whole = outline(model)
        shapes, exact = named_weights(whole), {matrix.name: buffer.dtype for buffer, matrix in stored_buffers(whole)}
        stored = stored_layout(shapes, model, config)
        files = list(_files({name: entry.shape for name, entry in stored.items()}, dtype.itemsize, largest_file_bytes))

        def read(matrix: str) -> Tensor:
            # Not in place: the first may be a view of a file.
            mean = reduce(torch.add, (source.read(matrix, shapes[matrix]) for source in sources)) / len(sources)
            values = mean.to(exact.get(matrix, dtype))  # counters are rounded down
            if (values.isinf() & mean.isfinite()).any():
                params = {"name": matrix, "largest": mean[mean.isfinite()].abs().max().item(), "dtype": type_name}
                raise UsageError(Reason("engine.weight-too-large", params))
            return values

        place: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = {tensor: stored[tensor].joined(read, dtype) for tensor in names}
            _save(tensors, draft / name)
            place |= dict.fromkeys(tensors, name)
        parameters = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in exact)
        total_bytes = sum(torch.Size(shape).numel() * exact.get(name, dtype).itemsize for name, shape in shapes.items())
        if len(files) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": place}
            create_file(draft / "model.safetensors.index.json", json.dumps(index, indent=2), public=True)
    return {"path": str(output), "parameters": parameters, "bytes": total_bytes, "model_type": config["model_type"]}


def export_adapter(
    checkpoint: Path, spec: RunSpec, output: Path, text: TextFiles, base: Base | None = None, *, averaged: bool = False
) -> dict[str, Any]:
    """Write the adapter of a run as a PEFT folder, in fp32, and return its path and size. As ``export`` otherwise."""
    model_type = to_hugging_face(exported_model(spec.transformer))["model_type"]
    saved = _open(checkpoint, AVERAGE if averaged else WEIGHT, spec.transformer)
    config, tensors = peft_files(spec, saved, base)
    with _draft_of(output) as draft:
        _save({name: values.contiguous() for name, values in tensors.items()}, draft / WEIGHTS)
        files = {name: content for name, content in text.files.items() if name != "generation_config.json"}
        _write_text(draft, {CONFIG: json_file(config)} | files)
    parameters = sum(values.numel() for values in tensors.values())
    sizes = {"parameters": parameters, "bytes": sum(values.nbytes for values in tensors.values())}
    return {"path": str(output), **sizes, "model_type": f"PEFT adapter of {model_type}"}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError, which the library has in the text of an error of its own."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # required by transformers
    except SafetensorError as error:
        if (match := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(number := int(match[1]), os.strerror(number), str(path)) from error


def _write_text(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        make_folder((folder / name).parent, mode=0o777, exist_ok=True)
        create_file(folder / name, content, public=True)


@contextlib.contextmanager
def _draft_of(output: Path) -> Generator[Path]:
    """Yield a new folder that becomes ``output`` once its files are on the disk, and is deleted on an error.

    Raises UsageError.
    """
    if output.exists():
        raise UsageError(Reason("engine.output-exists", {"path": str(output)}))
    remove_left_drafts(output)
    draft = output.with_name(f".{output.name}.{os.urandom(8).hex()}.tmp")
    make_folder(draft, mode=0o777, exist_ok=False)
    try:
        with locked(draft / _LOCK):
            yield draft
            for path in draft.glob("*.safetensors"):  # which safetensors leaves in memory, readable for the owner only
                path.chmod(draft.stat().st_mode & 0o666)
                with open_to_read(path) as file:
                    os.fsync(file.fileno())
            draft.rename(output)
            (output / _LOCK).unlink()  # not before: without it the draft could be taken for one that was left
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_left_drafts(output: Path) -> None:
    """Remove what killed exports to the same folder have written; a living one holds the lock of its draft."""
    for draft in output.parent.glob(f".{glob.escape(output.name)}.{'[0-9a-f]' * 16}.tmp"):
        with contextlib.suppress(OSError), locked(draft / _LOCK, wait_seconds=0) as is_left:
            if is_left:
                shutil.rmtree(draft)


def stored_layout(shapes: dict[str, tuple[int, ...]], model: AnyModel, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of an architecture's files by name, for parameters of these names and shapes.

    ``config``: its config.json. A LLaVA has its language model as the architecture of that has it.
    """
    if isinstance(model, LlavaSpec):
        text = {name: shape for name, shape in shapes.items() if name.startswith(LANGUAGE_MODEL)}
        others = {name: Stored(shape, ((name, None),)) for name, shape in shapes.items() if name not in text}
        return others | stored_layout(text, model.text_config, config["text_config"])
    if isinstance(model, ModelSpec) and config["model_type"] == "gpt_oss":
        return stored_tensors(shapes, model.num_experts)
    rename = mixtral_name if config["model_type"] == "mixtral" else str
    return {rename(name): Stored(shape, ((name, None),)) for name, shape in shapes.items()}


def _files(shapes: dict[str, tuple[int, ...]], element_bytes: int, most_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each file's tensors, in the order of the model, up to ``most_bytes`` per file."""
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


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a checkpoint, and of ``base`` those that it does not store.

    ``kind``: weights, averages, or the outer weights of local SGD.
    """

    reader: StateReader
    kind: str
    base: HuggingFaceFolder | None

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a matrix in fp32. Parameters that are not averaged, because they never train, have their weights."""
        whole = Slice(name, shape, None, 0, torch.Size(shape).numel())
        stored = next((kind for kind in (self.kind, WEIGHT) if self.reader.has(kind, name)), None)
        if stored is None and self.base is not None:
            return self.base.read(name, shape, None).float()
        return self.reader.read(stored or self.kind, whole).view(shape)  # raises the error of an incomplete checkpoint


def _open(checkpoint: Path, kind: str, model: AnyModel) -> SavedWeights:
    manifest = read_checkpoint(checkpoint)
    if not isinstance(manifest, Checkpoint):
        raise ScaletrainError(Reason("engine.not-a-checkpoint", {"path": str(checkpoint), "problem": str(manifest)}))
    reader = StateReader(checkpoint, -1, (), manifest.files)  # of no rank, which reads from all files
    if kind == WEIGHT and OUTER in reader.kinds:
        kind = OUTER
    if kind not in reader.kinds:
        raise UsageError(Reason("engine.no-averaged-weights", {"checkpoint": checkpoint.name}))
    base = None
    if (weights := getattr(model, "weights", None)) is not None and read_base(manifest) is not None:
        folder = expand_home(weights)
        check_base_of(manifest, folder)
        base = HuggingFaceFolder(folder, outline(model))
    return SavedWeights(reader, kind, base)
