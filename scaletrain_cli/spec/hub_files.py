"""The references to the Hugging Face Hub in a run spec: which files each one needs, and where they are locally.

The spec keeps what the user wrote. The run record keeps the commit of each reference; with it, every process finds the
same files in the cache.
"""

import contextlib
import fnmatch
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from scaletrain_cli.hub.cache import (
    CACHE_VARIABLES,
    NO_TOKEN,
    TOKEN_PATH,
    TOKEN_VARIABLES,
    HubFile,
    HubSettings,
    Listing,
    cache_folder,
    endpoint_of,
    is_offline,
)
from scaletrain_cli.hub.client import read_small_file, resolve
from scaletrain_cli.hub.reference import HubError, HubReference, is_reference, parse_reference
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import (
    COMPRESSED,
    FORMATS,
    IMAGE_SUFFIXES,
    ROW_FORMATS,
    SHARD_SUFFIX,
    TABLE_SUFFIX,
    TOKEN_FILES,
    chosen_text,
    is_about_the_corpus,
    kind_of,
    read_split,
    suffixes_of,
)
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.run import RunSpec
from scaletrain_cli.spec.weight_files import INDEX, SINGLE

Purpose = Literal["weights", "beside_weights", "adapter", "tokenizer", "template", "source"]
CONFIG = "config.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT writes them
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
# What transformers, vLLM and llama.cpp read of a tokenizer beside tokenizer.json; exports copy what fits the patterns.
TOKENIZER_FILES = (
    *TOKEN_FILES,
    *("chat_template.json", TEMPLATE, "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt"),
    *("tekken.json", "*.tiktoken", "*.model", "tokenizer.model.v*"),
)
_BESIDE = tuple(PurePosixPath(name).parts for name in (CONFIG, "generation_config.json", *TOKENIZER_FILES))
_BESIDE_IMAGES = ("txt", "cls", "json")  # captions and classes
_TEMPLATES = (".jinja", ".jinja2", ".j2")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
_OWN_PROGRAMS = "scaletrain_cli.engine."  # such as evaluations, which read what the run reads
# Set in env of an evaluation whose checkpoint has all weights: of the initial ones it reads the tokenizer beside them.
WHOLE_CHECKPOINT = "SCALETRAIN_EVALUATED_WHOLE"
_LARGEST_INDEX_BYTES = 100_000_000
_MORE_OF_HUB = ("HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE")  # without the prefix HF_
_PATHS_ON_NODES = (*CACHE_VARIABLES, TOKEN_PATH, "HF_XET_CACHE", "HF_ASSETS_CACHE")
# The names that the library datasets gives to the parts of a split.
_SHARD = re.compile(r"(?P<before>.*-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<after>\.[a-z.]+)")
_MOST_SHARDS, _MOST_SHOWN = 10_000, 3


@dataclass(frozen=True)
class HubUse:
    """One key of a spec whose value is a reference; ``text`` is the value as the user wrote it.

    ``kinds``: the formats of data that are read, as for find_files(). ``format``: that of the source in the spec, for
    text that is prepared, which may be in any format of find_text(). ``one_split``: of a folder only the train split is
    read; a program of the user and the reader of images choose among all.
    """

    key: str
    text: str
    purpose: Purpose
    kinds: tuple[str, ...] = FORMATS
    format: str | None = None
    one_split: bool = False

    @property
    def reference(self) -> HubReference:
        """Return the parsed reference."""
        return parse_reference(self.text)

    @property
    def is_for_validation(self) -> bool:
        """Return whether the files are data of which a run or an evaluation reads the split for validation."""
        return self.key.startswith("evaluation.") or self.key.endswith((".validation_source", ".validation_path"))


def hub_environment(
    env: Mapping[str, Any], secret_env: Iterable[str], environment: Mapping[str, str], *, runs_here: bool
) -> dict[str, str]:
    """Return the environment in which this machine uses the hub for a run with ``env`` and ``secret_env`` in its spec.

    The ranks of a run on this machine have all of ``env``. Of other runs only the variables of the hub apply here: an
    endpoint or HF_HUB_OFFLINE as on the nodes. Their cache does if its folder exists here, too, and can be used. This
    user's token is left out for an endpoint that only ``env`` names, unless the spec names the token, too. Values that
    no environment can have are left out: validation reports them.
    """
    values = {name: str(value) for name, value in env.items() if isinstance(name, str) and isinstance(value, str | int)}
    given = {name: value for name, value in values.items() if "\0" not in name + value}
    here = {**environment, **(given if runs_here else _of_hub(given, environment))}
    if endpoint_of(here) != endpoint_of(environment) and not {*given, *secret_env}.intersection(TOKEN_VARIABLES):
        if runs_here and TOKEN_PATH in given:
            return {name: value for name, value in here.items() if name not in TOKEN_VARIABLES}
        here[NO_TOKEN] = "1"
    return here


def _of_hub(given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the hub among those of the nodes that apply on this machine, too."""
    of_hub = {name: value for name, value in given.items() if name.startswith("HF_") or name in _MORE_OF_HUB}
    here = {name: value for name, value in of_hub.items() if name not in _PATHS_ON_NODES}
    if not CACHE_VARIABLES & of_hub.keys():
        return here
    cache = cache_folder({**{k: v for k, v in environment.items() if k not in CACHE_VARIABLES}, **of_hub})
    with contextlib.suppress(OSError, ValueError):  # a folder that cannot be looked at
        folder = cache if cache.is_dir() else cache.parent
        if folder.is_dir() and (is_offline({**environment, **here}) or os.access(folder, os.W_OK | os.X_OK)):
            here["HF_HUB_CACHE"] = str(cache)
    return here


def hub_uses(spec: RunSpec) -> tuple[HubUse, ...]:
    """Return the references of a RunSpec that the built-in engine reads; empty for another training program."""
    if spec.code.own_program and not (spec.code.engine or "").startswith(_OWN_PROGRAMS):
        return ()
    adapter, whole = getattr(spec.model, "adapter", None), spec.code.own_program and WHOLE_CHECKPOINT in spec.env
    reads_data = not (spec.code.own_program and spec.data.tokenizer.path)
    values: tuple[tuple[str, Any, Purpose], ...] = (
        *((weights.key, weights.path, "beside_weights" if whole else "weights") for weights in spec.initial_weights),
        ("model.adapter.weights", None if spec.code.own_program else getattr(adapter, "weights", None), "adapter"),
        ("data.tokenizer.path", spec.data.tokenizer.path, "tokenizer"),
        ("data.chat_template", spec.data.chat_template, "template"),
        *((key, path, "source") for key, path in (spec.data_paths() if reads_data else ())),
    )
    kinds: tuple[str, ...] = FORMATS if spec.training.objective == "causal_lm" else ROW_FORMATS
    if spec.code.own_program:  # an evaluation, which has no objective
        kinds = tuple(dict.fromkeys((*FORMATS, *ROW_FORMATS)))
    if getattr(spec.model, "family", "") == "llava":
        kinds = (*kinds, *IMAGE_SUFFIXES)
    if spec.training.objective in LOSSES_OF and not spec.code.own_program:
        kinds = (SHARD_SUFFIX, TABLE_SUFFIX, *IMAGE_SUFFIXES, *_BESIDE_IMAGES)
    formats: dict[str, str] = {}
    if spec.training.objective == "causal_lm" and not spec.code.own_program:
        sections = zip(spec.data.paths(), spec.data.all_sources, strict=True)
        formats = {key: section.format for (key, _), section in sections}
    one_split = not spec.code.own_program and spec.training.objective not in LOSSES_OF
    return tuple(
        HubUse(key, text, purpose, kinds, formats.get(key), one_split)
        for key, text, purpose in values
        if is_reference(text)
    )


def may_be_frozen(spec: RunSpec) -> bool:
    """Return True if checkpoints may lack weights of ``model.weights``, because these do not train."""
    if getattr(spec.model, "weights", None) is None:
        return False
    return bool(getattr(spec.model, "adapter", None) or getattr(spec.training, "trainable", None))


def selected_files(use: HubUse, listing: Listing, read: Callable[[HubFile], Path]) -> tuple[HubFile, ...]:
    """Return the files of the repository that ``use`` needs; ``read`` returns the path of a small one.

    Never pickled weights or code. Raises HubError if what the reference names is not there, or if the hub has not
    listed the files of data that a folder or a glob names.
    """
    if use.purpose == "source":
        return source_files_of(use, listing, Counter())
    path = use.reference.path
    if use.purpose == "weights":
        return _weights_files(use.reference, listing, read)
    if use.purpose == "beside_weights":
        return _beside_weights(use.reference, listing)
    if use.purpose == "adapter":
        return tuple(_required(listing, use.reference.below(name)) for name in ADAPTER)
    name = TOKENIZER if use.purpose == "tokenizer" else TEMPLATE
    in_folder = use.reference.below(name)
    if use.purpose == "template" and path and not listing.find(in_folder) and not path.endswith(_TEMPLATES):
        raise HubError(Reason("hub.not-a-template", {"path": path}))
    file = listing.find(path) or _required(listing, in_folder)
    return (file, *_beside(listing, file.path.rpartition("/")[0], but=file.path))


def _required(listing: Listing, path: str) -> HubFile:
    if (file := listing.find(path)) is None:
        params = {"repo": listing.reference.repo, "revision": listing.reference.revision, "path": path}
        raise HubError(Reason("hub.no-file", params))
    return file


def _beside(listing: Listing, folder: str, but: str = "") -> Iterator[HubFile]:
    below = f"{folder}/" if folder else ""
    for file in listing.files:
        parts = PurePosixPath(file.path.removeprefix(below)).parts
        if file.path.startswith(below) and file.path != but and any(path_matches(parts, name) for name in _BESIDE):
            yield file


def _weights_files(reference: HubReference, listing: Listing, read: Callable[[HubFile], Path]) -> tuple[HubFile, ...]:
    folder = reference.below("")
    index, single = listing.find(folder + INDEX), listing.find(folder + SINGLE)
    if index is not None:
        weights = (index, *_indexed(listing, index, folder, read(index)))
    elif single is not None:
        weights = (single,)
    else:
        others = sorted({f.path for f in listing.files if f.path.startswith(folder) and f.path.endswith(_PICKLED)})
        params = {"place": reference.place, "others": f", only {others[0]}" if others else ""}
        raise HubError(Reason("hub.no-safetensors", params))
    return (*_beside_weights(reference, listing), *weights)


def _beside_weights(reference: HubReference, listing: Listing) -> tuple[HubFile, ...]:
    tokenizer = listing.find(reference.below(TOKENIZER))
    return (*_beside(listing, reference.path), *((tokenizer,) if tokenizer is not None else ()))


def _indexed(listing: Listing, index: HubFile, folder: str, local: Path) -> tuple[HubFile, ...]:
    """Return the files that an index names, which is at ``local`` in the cache. Raises HubError."""
    try:
        with local.open("rb") as content:
            names = {str(name) for name in json.loads(content.read(_LARGEST_INDEX_BYTES))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        where = {"path": index.path, "place": listing.reference.place}
        raise HubError(Reason("hub.index-unreadable", where)) from error
    wrong = sorted(name for name in names if not name.endswith(".safetensors") or "/" in name)
    shards = [(name, listing.find(folder + name)) for name in sorted(names)]
    missing = wrong or [name for name, file in shards if file is None]
    if missing or not names:
        params = {"place": listing.reference.place, "files": missing, "index": index.path}
        raise HubError(Reason("hub.incomplete", params))
    return tuple(file for _, file in shards if file is not None)


def source_files_of(use: HubUse, listing: Listing, left_out: Counter[str]) -> tuple[HubFile, ...]:
    """Return the files of data as find_files() finds them in a local folder, or find_text(): by folder, file or glob.

    ``left_out``: gets the number of files of other splits. Raises HubError.
    """
    reference, kinds, named = use.reference, use.kinds, use.format
    path = reference.path
    exact = listing.find(path)
    if exact is None and not listing.from_hub:
        raise HubError(_part_of_the_files(reference, listing))
    below = reference.below("")
    in_folder = [f for f in listing.files if f.path.startswith(below)] if exact is None else []
    if exact is not None:
        files = [exact]
    elif in_folder:
        names = ((f, f.path.removeprefix(below)) for f in in_folder)
        files = [f for f, name in names if "/." not in f"/{name}" and not is_about_the_corpus(Path(name))]
        if SHARD_SUFFIX not in kinds:  # of text often a description of the files beside it; of images their captions
            kinds = tuple(kind for kind in kinds if kind != "json")
    else:
        files = [f for f in listing.files if path_matches(PurePosixPath(f.path).parts, PurePosixPath(path).parts)]
    formats = [*kinds, *(kind for kind in COMPRESSED if kind.partition(".")[0] in kinds)]
    if named is None:
        files = [f for f in files if kind_of(Path(f.path)) in kinds]
    else:
        chosen = set(chosen_text([f.path for f in files], named, in_folder=bool(in_folder)))
        chosen |= {f"{name.removesuffix('.idx')}.bin" for name in chosen if name.endswith(".idx")}
        files, formats = [f for f in listing.files if f.path in chosen], suffixes_of(named)
    if not files:
        shown = f" {path}" if path else ""
        raise HubError(Reason("hub.no-source", {"place": reference.place, "path": shown, "formats": formats}))
    if in_folder and use.one_split:
        # Rows may name images of any folder.
        rows = [f.path for f in files if kind_of(Path(f.path)) not in IMAGE_SUFFIXES]
        kept_rows, of_splits = read_split(rows, below, evaluation=use.is_for_validation)
        left_out.update(of_splits)
        files = [f for f in files if f.path not in set(rows).difference(kept_rows)]
    return tuple(sorted(files, key=lambda file: file.path))


def _part_of_the_files(reference: HubReference, listing: Listing) -> Reason:
    """Return why files that another program has fetched cannot be used: others may match, too.

    ``missing`` are those that the numbers in the names of the present ones prove (``train-00001-of-00004.parquet``).
    """
    shards = [match for file in listing.files if (match := _SHARD.fullmatch(file.path))]
    all_names = {
        f"{match['before']}{number:0{len(match['number'])}d}-of-{match['count']}{match['after']}"
        for match in shards
        for number in range(min(int(match["count"]), _MOST_SHARDS))
    }
    absent = all_names - {file.path for file in listing.files}
    below, pattern = reference.below(""), PurePosixPath(reference.path).parts
    missing = sorted(
        name for name in absent if name.startswith(below) or path_matches(PurePosixPath(name).parts, pattern)
    )
    params = {"place": reference.place, "path": f" {reference.path}" if reference.path else ""}
    if missing:
        shown = missing[:_MOST_SHOWN] + (["..."] if len(missing) > _MOST_SHOWN else [])
        return Reason("hub.files-missing", params | {"count": len(missing), "files": shown})
    return Reason("hub.list-missing", params | {"count": len(listing.files)})


def path_matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether glob.glob(..., recursive=True) would find the path by the pattern."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if path_matches(parts, pattern[1:]):
            return True
        return bool(parts) and not parts[0].startswith(".") and path_matches(parts[1:], pattern)
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and path_matches(parts[1:], pattern[1:])


def local_path(use: HubUse, settings: HubSettings, commit: str) -> str:
    """Return the path that the engine reads: what the user would have written for a local copy."""
    reference = use.reference
    path = settings.snapshot(reference, commit) / reference.path
    name = {"tokenizer": TOKENIZER, "template": TEMPLATE}.get(use.purpose)
    is_file = PurePosixPath(reference.path).suffix in (".json", *_TEMPLATES)
    return str(path if name is None or is_file else path / name)


def with_local_files(spec: RunSpec, commits: Mapping[str, str], settings: HubSettings) -> RunSpec:
    """Return the RunSpec with the local path in place of each reference that has a commit. Sends no request."""
    uses = [use for use in hub_uses(spec) if use.text in commits]
    paths = {use.key: local_path(use, settings, commits[use.text]) for use in uses}
    local: RunSpec = _with_values(spec, paths) if paths else spec
    return local


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the section, or of a list of sections, with values at dotted keys."""
    in_list = isinstance(section, tuple)
    updates: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        before = updates.get(name, section[int(name)] if in_list else getattr(section, name))
        updates[name] = _with_values(before, {rest: value}) if rest else value
    if in_list:
        return tuple(updates.get(str(number), part) for number, part in enumerate(section))
    return section.model_copy(update=updates)


def read_hub_config(text: str, settings: HubSettings, commit: str | None = None) -> Path:
    """Return the path of the config.json of a repository in the cache, fetched if necessary.

    ``text`` names the repository, a folder in it, or the file. Raises HubError, MissingPackageError, and ValueError for
    a text that is no reference.
    """
    reference = parse_reference(text)
    listing = resolve(reference, settings, commit)
    file = listing.find(reference.path) or _required(listing, reference.below(CONFIG))
    return read_small_file(listing, file, settings)
