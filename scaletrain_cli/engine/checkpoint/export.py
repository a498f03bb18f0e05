"""The command ``export`` of an engine process: write a checkpoint's weights as Hugging Face files.

Writes safetensors, config.json, and the tokenizer with its settings. Reads one matrix at a time and holds one file in
memory, whatever layout saved the checkpoint.
"""

import argparse
import contextlib
import glob
import json
import math
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from scaletrain_cli.data.prepared import find_run_datasets
from scaletrain_cli.data.tokenizers.chat_templates import template_files
from scaletrain_cli.data.tokenizers.files import load_tokenizer, parsed_tokenizer, special_tokens, tokenizer_file
from scaletrain_cli.data.tokenizers.load import tokenizer_content
from scaletrain_cli.engine.checkpoint.adapter_export import Base, MergedWeights, Weights, exported_model, peft_files
from scaletrain_cli.engine.checkpoint.shard_file import Slice, StateReader
from scaletrain_cli.engine.checkpoint.snapshot import AVERAGE, OUTER, WEIGHT
from scaletrain_cli.engine.data.images.captions import caption_tokens
from scaletrain_cli.engine.data.prepared import tokenizer_path
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.gpt_oss_files import Stored, stored_tensors
from scaletrain_cli.engine.model.materialization import named_weights, stored_buffers
from scaletrain_cli.engine.model.peft_files import CONFIG, WEIGHTS
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import Checkpoint, check_base_of, read_base, read_checkpoint
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.safe_files import create_file, expand_home, locked, make_folder, open_to_read
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT
from scaletrain_cli.spec.hub_files import TOKENIZER_FILES
from scaletrain_cli.spec.hugging_face_weights import to_hugging_face
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.vision_model import image_channels
from scaletrain_cli.spec.weight_files import LANGUAGE_MODEL, mixtral_name

# The tokenizer, its special tokens, and the generation settings of an exported folder.


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
# A class that transformers 4 and 5 have, with the inputs of version 5: version 4 adds one that language models refuse.
_GENERIC: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
}
_STATE_TOKENS = (_CONFIG, "special_tokens_map.json")


@dataclass(frozen=True)
class TextFiles:
    """Contents by file name; ``ids``: bos, eos and pad token ids for config.json, None where unknown.

    ``classes``: their names in the order of the labels; empty where they are unknown.
    """

    files: dict[str, bytes]
    ids: dict[str, Any]
    classes: Sequence[str] = ()


def text_files(spec: RunSpec, runs_root: Path, run: RunDir | None = None) -> TextFiles:
    """Return the tokenizer files of an export of this run; of a network that reads only images the names of classes.

    They are those of the folder of the tokenizer, or of the weights, that has the tokenizer of the dataset and states
    its special tokens. Where neither does, tokenizer_config.json is derived. The chat templates are those that the run
    was trained with; ``eos_token_id`` also has the ids at which the trained turns end. Raises UsageError.
    """
    if _longest_text(spec.model) is None:
        return TextFiles({}, {}, _class_names(spec, runs_root, run))
    if isinstance(spec.model, ClipSpec):
        return _caption_files(spec)
    trained, class_name = _dataset_tokenizer(spec, runs_root, run), spec.data.tokenizer.tokenizer_class
    tokenizer = _converted_tokenizer(spec)
    with contextlib.suppress(UsageError):
        tokenizer = tokenizer if trained is None else tokenizer_file(str(trained), class_name)
    # Their folders may state special tokens, ids and templates; those of the weights come last.
    path, weights = spec.data.tokenizer.path, spec.language_weights
    candidates = [] if path is None else [expand_home(path)]
    if trained is not None and spec.training.objective != "causal_lm":  # a trained tokenizer has a chat template
        candidates.append(trained)
    candidates += [] if weights is None else [expand_home(weights) / "tokenizer.json"]
    if tokenizer is None:
        return TextFiles({}, _stated_ids([path.parent for path in candidates[-1:]]))
    vocabulary = _vocabulary(tokenizer)
    same = [path for path in candidates if _vocabulary_of(path, class_name) in (None, vocabulary)]
    origins = [path.parent for path in reversed(same)]  # of ids: those of the weights count
    source = next((path for path in same if any((path.parent / name).is_file() for name in _STATE_TOKENS)), None)
    files = {} if source is None else _tokenizer_files(source.parent, class_name)
    files["tokenizer.json"] = _unless_changed(source, tokenizer, class_name)
    generation = next((found for folder in origins if (found := _object(folder / _GENERATION))), None)
    ids = _stated_ids(origins)
    if all(number is None for number in ids.values()):
        generation = ids = _ids_of_tokens(source, vocabulary)
    if source is None:
        # Nothing states special tokens: they are those of the ids.
        texts = {number: text for text, number in vocabulary.items()}
        firsts = {name: number[0] if isinstance(number, list) and number else number for name, number in ids.items()}
        tokens = {name.removesuffix("_id"): texts[number] for name, number in firsts.items() if number in texts}
        config = {**_GENERIC, "model_max_length": _longest_text(spec.model)}
        files[_CONFIG] = _json({**config, "clean_up_tokenization_spaces": False, **tokens})
    dataset = {} if trained is None else _object(trained.parent / "dataset.json")
    stops = list(map(int, filter(None, str(dataset.get("stop_tokens", "")).split(","))))  # of trained turns
    if generation is not None:
        stated = {name: value for name, value in generation.items() if value is not None}
        files[_GENERATION] = _json(_with_stops(stated, stops))
    return TextFiles(_with_trained_templates(spec, files), _with_stops(ids, stops))


def image_files(spec: RunSpec, text: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with which transformers prepares images as the evaluation of this run does, by their names.

    Empty for a language model. CLIP's processor resizes, crops and normalizes images for every family; it has no other
    number of channels than 3. That of LLaVA, which also pads, has a second file with the tokens of an image, and the
    chat template. ``text``: the files of the tokenizer.
    """
    model = spec.model
    if isinstance(model, ModelSpec) or image_channels(model) != _COLORS:
        return {}
    tower: Any = getattr(model, "vision_config", model)
    images, size = spec.data.images, tower.image_size
    mean, std = images.normalization(model.family, _COLORS)
    # As in engine.data.images.transforms.center_crop.
    shorter = math.floor(round(size / images.crop_ratio_of(model.family), 6))
    config: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": shorter},
        "resample": _RESAMPLING[images.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
    if not isinstance(model, LlavaSpec):
        return {"preprocessor_config.json": _json(config)}
    config |= {"image_processor_type": "LlavaImageProcessor", "do_pad": images.aspect == "pad"}
    config["processor_class"] = "LlavaProcessor"
    tokens: dict[str, Any] = {
        "processor_class": "LlavaProcessor",
        "patch_size": tower.patch_size,
        "num_additional_image_tokens": 1,  # the class token, which "default" takes off again
        "vision_feature_select_strategy": model.vision_feature_select_strategy,
    }
    words = {number: word for word, number in _vocabulary(text.get("tokenizer.json", b"")).items()}
    if (word := words.get(model.image_token_index)) is not None:
        tokens["image_token"] = word
    found = {"preprocessor_config.json": _json(config), "processor_config.json": _json(tokens)}
    template = _parsed(text.get("tokenizer_config.json", b"{}")).get("chat_template")
    if isinstance(template, str) and not {"chat_template.jinja", "chat_template.json"} & text.keys():
        found["chat_template.jinja"] = template.encode()
    return found


_COLORS = 3
_RESAMPLING = {"bilinear": 2, "bicubic": 3}  # numbers of Pillow


def _tokenizer_files(folder: Path, class_name: str | None) -> dict[str, bytes]:
    """Return the files of a tokenizer beside tokenizer.json by name, with its code, which is copied but never run.

    What transformers 5 alone reads gets the names that version 4 reads, too. ``class_name``: that of the spec.
    """
    paths = [path for pattern in (*TOKENIZER_FILES, "tokenization_*.py") for path in sorted(folder.glob(pattern))]
    files = {str(path.relative_to(folder)): content for path in paths if (content := _content(path)) is not None}
    stated = config = _parsed(files.get(_CONFIG, b"{}"))
    if class_name is not None or config.get("tokenizer_class") == "TokenizersBackend":
        config = {**_GENERIC, **config, "tokenizer_class": _GENERIC["tokenizer_class"]}
    if isinstance(tokens := config.get("extra_special_tokens"), list):
        config = {name: value for name, value in config.items() if name != "extra_special_tokens"}
        config["additional_special_tokens"] = tokens
    return files if config == stated else files | {_CONFIG: _json(config)}


def _unless_changed(path: Path | None, tokenizer: bytes, class_name: str | None) -> bytes:
    """Return the tokenizer.json of a source as it is if it gives the tokens of the dataset's, else that one."""
    theirs = None if path is None else _content(path)
    with contextlib.suppress(UsageError):
        is_same = load_tokenizer(str(path), class_name).to_str() == parsed_tokenizer(tokenizer, "").to_str()
        if theirs is not None and is_same:
            return theirs
    return tokenizer


def _stated_ids(folders: Sequence[Path]) -> dict[str, Any]:
    """Return bos, eos and pad as the first config that states some has them; None where none does."""
    for stated in (_object(folder / name) for folder in folders for name in ("config.json", _GENERATION)):
        if any(stated.get(name) is not None for name in _IDS):
            return {name: stated[name] for name in _IDS if name in stated}
    return dict.fromkeys(_IDS)


def _ids_of_tokens(source: Path | None, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return ids of the special tokens that a folder states; else of the end of text, which precedes each document."""
    end = next((name for name in ENDS_OF_TEXT if name in vocabulary), "")
    stated = {} if source is None else special_tokens(source.parent)
    tokens = stated or dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    return {name: vocabulary.get(tokens.get(name.removesuffix("_id"), "")) for name in _IDS}


def _with_stops(settings: Mapping[str, Any], stops: Sequence[int]) -> dict[str, Any]:
    """Return settings whose ``eos_token_id``, a number, a list or None, also has the ids ``stops``."""
    stated = settings.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    joined = list(dict.fromkeys([*ends, *stops]))
    if len(joined) == len(ends):
        return dict(settings)
    return {**settings, "eos_token_id": joined if len(joined) > 1 else joined[0]}


def _with_trained_templates(spec: RunSpec, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with the chat templates of the training alone: transformers prefers those in files of their own.

    Templates that are in tokenizer_config.json only stay there, where other programs look for them.
    """
    data, config = spec.data, _parsed(files.get(_CONFIG, b"{}"))
    if data.tokenizer.path is None and data.chat_template is None:
        return dict(files)
    templates = template_files(spec).templates
    stated = config.pop("chat_template", None)
    listed = [{"name": "default", "template": stated}] if isinstance(stated, str) else stated or []
    is_stated = templates == {each["name"]: each["template"] for each in listed}
    if not templates or (data.chat_template is None and (is_stated or not any(map(_has_template, files)))):
        return dict(files)
    kept = {name: content for name, content in files.items() if data.chat_template is None or not _has_template(name)}
    for name, template in templates.items():
        kept[_TEMPLATE if name == "default" else f"additional_chat_templates/{name}.jinja"] = template.encode()
    return kept if stated in (None, templates.get("default")) else {**kept, _CONFIG: _json(config)}


def _has_template(name: str) -> bool:
    return name.endswith(".jinja") or name == "chat_template.json"


def _caption_files(spec: RunSpec) -> TextFiles:
    """Return the tokenizer of captions with the files beside it, and the ids of its start and its padding."""
    assert spec.data.tokenizer.path is not None, "checked by the spec"
    path = expand_home(spec.data.tokenizer.path)
    tokenizer = _content(path)
    if tokenizer is None:
        return TextFiles({}, {})
    vocabulary, tokens = _vocabulary(tokenizer), caption_tokens(path.parent)
    config = {**_GENERIC, "model_max_length": _longest_text(spec.model), **tokens}
    files = {_CONFIG: _json(config)} | _tokenizer_files(path.parent, spec.data.tokenizer.tokenizer_class)
    ids = {f"{name}_id": vocabulary[tokens[name]] for name in ("bos_token", "pad_token") if tokens[name] in vocabulary}
    return TextFiles(files | {"tokenizer.json": tokenizer}, ids)


def _longest_text(model: AnyModel) -> int | None:
    """Return the number of tokens that a model can read at once; None if it reads no text."""
    text = getattr(model, "text_config", model)
    return getattr(text, "max_position_embeddings", None)


def _class_names(spec: RunSpec, runs_root: Path, run: RunDir | None) -> Sequence[str]:
    if spec.training.objective != "classification":
        return ()  # the outputs are no classes, whatever the images are labeled with
    with contextlib.suppress(ScaletrainError, OSError):  # the data are not on this machine
        known = {} if run is None else recorded_folders(spec, runs_root, read_entries(datasets_file(run)))[0]
        folders = find_run_datasets(spec, runs_root, known) or {}
        return next(filter(None, (_object(each / "dataset.json").get("classes") for each in folders.values())), ())
    return ()


def _dataset_tokenizer(spec: RunSpec, runs_root: Path, run: RunDir | None) -> Path | None:
    with contextlib.suppress(ScaletrainError, OSError):  # the data are not on this machine
        if (found := tokenizer_path(spec, runs_root, run)) is not None:
            return found
    path = spec.data.tokenizer.path
    return None if path is None or spec.data.tokenizer.kind != "file" else expand_home(path)


def _converted_tokenizer(spec: RunSpec) -> bytes | None:
    """Return the tokenizer.json of a tokenizer of another library; None for another kind, or if it cannot be read."""
    with contextlib.suppress(ScaletrainError, OSError):
        if spec.data.tokenizer.kind not in ("bpe", "file"):
            return tokenizer_content(spec.data.tokenizer).encode()
    return None


def _vocabulary(tokenizer: bytes) -> dict[str, int]:
    """Return ids by token; empty if the tokenizer cannot be parsed."""
    with contextlib.suppress(UsageError):
        return dict(parsed_tokenizer(tokenizer, "").get_vocab())
    return {}


def _vocabulary_of(path: Path, class_name: str | None) -> dict[str, int] | None:
    """Return ids by token of a tokenizer.json; empty if it cannot be used, None if it is none, or absent."""
    if path.suffix != ".json" or not path.is_file():
        return None
    with contextlib.suppress(UsageError):
        return dict(load_tokenizer(str(path), class_name).get_vocab())
    return {}


def _content(path: Path | None) -> bytes | None:
    try:
        return None if path is None or not path.is_file() else path.read_bytes()
    except OSError:
        return None


def _object(path: Path) -> dict[str, Any]:
    return _parsed(_content(path) or b"{}")


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


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
    parser.add_argument(
        "--base", nargs=2, metavar=("NAME", "REVISION"), help="the base model of an adapter, on the hub"
    )
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
        _write_text(draft, {"config.json": _json(config)} | text.files | image_files(spec, text.files))
        whole = outline(model)
        shapes, exact = named_weights(whole), {matrix.name: buffer.dtype for buffer, matrix in stored_buffers(whole)}
        stored = stored_layout(shapes, model, config)
        files = list(_files({name: each.shape for name, each in stored.items()}, dtype.itemsize, largest_file_bytes))

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
        _write_text(draft, {CONFIG: _json(config)} | {n: each for n, each in text.files.items() if n != _GENERATION})
    parameters = sum(values.numel() for values in tensors.values())
    sizes = {"parameters": parameters, "bytes": sum(values.nbytes for values in tensors.values())}
    return {"path": str(output), **sizes, "model_type": f"PEFT adapter of {model_type}"}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError, which the library has in the text of an error of its own."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # required by transformers
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(number := int(found[1]), os.strerror(number), str(path)) from error


def _write_text(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        make_folder((folder / name).parent, mode=0o777, exist_ok=True)
        create_file(folder / name, content, public=True)


@contextmanager
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
    found = read_checkpoint(checkpoint)
    if not isinstance(found, Checkpoint):
        raise ScaletrainError(Reason("engine.not-a-checkpoint", {"path": str(checkpoint), "problem": str(found)}))
    reader = StateReader(checkpoint, -1, (), found.files)  # of no rank, which reads from all files
    if kind == WEIGHT and OUTER in reader.kinds:
        kind = OUTER
    if kind not in reader.kinds:
        raise UsageError(Reason("engine.no-averaged-weights", {"checkpoint": checkpoint.name}))
    base = None
    weights = getattr(model, "weights", None)
    if weights is not None and read_base(found) is not None:
        folder = expand_home(weights)
        check_base_of(found, folder)
        base = HuggingFaceFolder(folder, outline(model))
    return SavedWeights(reader, kind, base)
