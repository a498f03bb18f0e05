"""The tokenizer, chat templates, image processor and names of classes of an exported folder."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.data.prepared import find_run_datasets
from scaletrain_cli.data.tokenizers.chat_templates import template_files
from scaletrain_cli.data.tokenizers.files import load_tokenizer, parsed_tokenizer, special_tokens, tokenizer_file
from scaletrain_cli.data.tokenizers.load import tokenizer_content
from scaletrain_cli.engine.data.images.captions import caption_tokens
from scaletrain_cli.engine.data.prepared import tokenizer_path
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import ClipSpec, LlavaSpec, ModelSpec, RunSpec
from scaletrain_cli.spec.corpus_files import ENDS_OF_TEXT
from scaletrain_cli.spec.hub_files import TOKENIZER_FILES
from scaletrain_cli.spec.run import AnyModel
from scaletrain_cli.spec.vision_model import image_channels

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONFIG, _GENERATION, _TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
_CLASS = "PreTrainedTokenizerFast"  # which transformers 4 and 5 have
# With the inputs of version 5: version 4 adds one that language models refuse.
_GENERIC: dict[str, Any] = {"tokenizer_class": _CLASS, "model_input_names": ["input_ids", "attention_mask"]}
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
    tokenizer = None
    with contextlib.suppress(ScaletrainError, OSError):
        if spec.data.tokenizer.kind not in ("bpe", "file"):  # of another library, converted
            tokenizer = tokenizer_content(spec.data.tokenizer).encode()
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
    generation = next((document for folder in origins if (document := _object(folder / _GENERATION))), None)
    ids = _stated_ids(origins)
    if all(number is None for number in ids.values()):
        generation = ids = _ids_of_tokens(source, vocabulary)
    if source is None:
        # Nothing states special tokens: they are those of the ids.
        texts = {number: text for text, number in vocabulary.items()}
        firsts = {name: number[0] if isinstance(number, list) and number else number for name, number in ids.items()}
        tokens = {name.removesuffix("_id"): texts[number] for name, number in firsts.items() if number in texts}
        config = {**_GENERIC, "model_max_length": _longest_text(spec.model)}
        files[_CONFIG] = json_file({**config, "clean_up_tokenization_spaces": False, **tokens})
    dataset = {} if trained is None else _object(trained.parent / "dataset.json")
    stops = list(map(int, filter(None, str(dataset.get("stop_tokens", "")).split(","))))  # of trained turns
    if generation is not None:
        stated = {name: value for name, value in generation.items() if value is not None}
        files[_GENERATION] = json_file(_with_stops(stated, stops))
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
        return {"preprocessor_config.json": json_file(config)}
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
    files = {"preprocessor_config.json": json_file(config), "processor_config.json": json_file(tokens)}
    template = _parsed(text.get("tokenizer_config.json", b"{}")).get("chat_template")
    if isinstance(template, str) and not {"chat_template.jinja", "chat_template.json"} & text.keys():
        files["chat_template.jinja"] = template.encode()
    return files


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
        config = {**_GENERIC, **config, "tokenizer_class": _CLASS}
    if isinstance(tokens := config.get("extra_special_tokens"), list):
        config = {name: value for name, value in config.items() if name != "extra_special_tokens"}
        config["additional_special_tokens"] = tokens
    return files if config == stated else files | {_CONFIG: json_file(config)}


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
    with_templates = {name for name in files if name.endswith(".jinja") or name == "chat_template.json"}
    stated = config.pop("chat_template", None)
    listed = [{"name": "default", "template": stated}] if isinstance(stated, str) else stated or []
    is_stated = templates == {entry["name"]: entry["template"] for entry in listed}
    if not templates or (data.chat_template is None and (is_stated or not with_templates)):
        return dict(files)
    kept = dict(files) if data.chat_template is None else {n: files[n] for n in files if n not in with_templates}
    for name, template in templates.items():
        kept[_TEMPLATE if name == "default" else f"additional_chat_templates/{name}.jinja"] = template.encode()
    return kept if stated in (None, templates.get("default")) else {**kept, _CONFIG: json_file(config)}


def _caption_files(spec: RunSpec) -> TextFiles:
    """Return the tokenizer of captions with the files beside it, and the ids of its start and its padding."""
    assert spec.data.tokenizer.path is not None, "checked by the spec"
    path = expand_home(spec.data.tokenizer.path)
    tokenizer = _content(path)
    if tokenizer is None:
        return TextFiles({}, {})
    vocabulary, tokens = _vocabulary(tokenizer), caption_tokens(path.parent)
    config = {**_GENERIC, "model_max_length": _longest_text(spec.model), **tokens}
    files = {_CONFIG: json_file(config)} | _tokenizer_files(path.parent, spec.data.tokenizer.tokenizer_class)
    ids = {f"{name}_id": vocabulary[tokens[name]] for name in ("bos_token", "pad_token") if tokens[name] in vocabulary}
    return TextFiles(files | {"tokenizer.json": tokenizer}, ids)


def _longest_text(model: AnyModel) -> int | None:
    """Return the number of tokens that a model can read at once; None if it reads no text."""
    return getattr(getattr(model, "text_config", model), "max_position_embeddings", None)


def _class_names(spec: RunSpec, runs_root: Path, run: RunDir | None) -> Sequence[str]:
    if spec.training.objective != "classification":
        return ()  # the outputs are no classes, whatever the images are labeled with
    with contextlib.suppress(ScaletrainError, OSError):  # the data are not on this machine
        known = {} if run is None else recorded_folders(spec, runs_root, read_entries(datasets_file(run)))[0]
        folders = find_run_datasets(spec, runs_root, known) or {}
        return next(filter(None, (_object(path / "dataset.json").get("classes") for path in folders.values())), ())
    return ()


def _dataset_tokenizer(spec: RunSpec, runs_root: Path, run: RunDir | None) -> Path | None:
    with contextlib.suppress(ScaletrainError, OSError):  # the data are not on this machine
        if (tokenizer := tokenizer_path(spec, runs_root, run)) is not None:
            return tokenizer
    path = spec.data.tokenizer.path
    return None if path is None or spec.data.tokenizer.kind != "file" else expand_home(path)


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
        document = json.loads(content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def json_file(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
