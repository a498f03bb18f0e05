"""A model of the Hugging Face Hub, or in a folder, in place of a spec file, for `scaletrain plan` and `init`.

Of the hub only the list of the repository's files, its config.json and for `init` its tokenizer are fetched.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.hub.reference import HubError, is_reference, parse_reference
from scaletrain_cli.safe_files import expand_home

if TYPE_CHECKING:
    from scaletrain_cli.spec import RunSpec
    from scaletrain_cli.spec.starting_spec import GivenModel

USUAL_GPU = "h100-sxm-80gb"
USUAL_GPUS = 8
_GPUS_PER_NODE = 8


def find_model(
    text: str, overrides: Sequence[str] = (), scheduler: str | None = None, *, reads_tokenizer: bool = False
) -> GivenModel:
    """Return what a folder or the hub says about a model; overrides of ``env`` apply as for a run by ``scheduler``.

    ``reads_tokenizer``: the class to state for its tokens is found, too. Raises UsageError.
    """
    from scaletrain_cli.data.tokenizers.files import class_to_state
    from scaletrain_cli.hub.cache import HubSettings
    from scaletrain_cli.hub.client import read_small_file, resolve
    from scaletrain_cli.spec.corpus_files import TOKEN_FILES
    from scaletrain_cli.spec.hub_files import TOKENIZER, read_hub_config
    from scaletrain_cli.spec.hugging_face import from_config, read_config
    from scaletrain_cli.spec.loading import hub_environment_of
    from scaletrain_cli.spec.presets import LONGEST_DEFAULT_SEQ_LEN, SourceError
    from scaletrain_cli.spec.source import Source, apply_override
    from scaletrain_cli.spec.starting_spec import GivenModel

    raw: dict[str, Any] = {}
    for override in overrides:
        list(apply_override(raw, override, Source(text)))  # a problem is reported when the spec is parsed
    cluster = raw.setdefault("cluster", {})
    if scheduler is not None and isinstance(cluster, dict):
        cluster.setdefault("scheduler", scheduler)
    settings = HubSettings.from_environment(hub_environment_of(raw))
    restricted = False
    try:
        if is_reference(text):
            reference = parse_reference(text)
            if reference.kind != "model":
                raise ValueError("names a data set; give a model: hf://org/name")
            listing = resolve(reference, settings)
            config, name, restricted = read_hub_config(text, settings), reference.repo, listing.restricted
            names = [reference.below(name) for name in (TOKENIZER, *TOKEN_FILES)]
            files = [file for name in names if (file := listing.find(name)) is not None]
            has_tokenizer = bool(files) and files[0].path == names[0]
            tokenizer = settings.snapshot(listing.reference, listing.commit) / names[0]
            with contextlib.suppress(HubError):  # as without network: the class is checked where the tokenizer is used
                for file in files if reads_tokenizer and has_tokenizer else ():
                    read_small_file(listing, file, settings)
        else:
            folder = expand_home(text)
            config, name = folder / "config.json", str(folder.absolute())
            tokenizer = folder / TOKENIZER
            has_tokenizer = tokenizer.is_file()
        dimensions = from_config(read_config(config))
    except HubError as error:
        raise UsageError(f"{text} cannot be used", (Problem.because(text, "", error.why),)) from error
    except SourceError as error:
        raise UsageError(f"{text} cannot be used", (Problem(text, "config.json", f"{error}."),)) from error
    except ValueError as error:
        raise UsageError(f"{text} {error}.") from error
    if "vocab_size" not in dimensions:
        raise UsageError(f"{text} is not a language model. Give a spec file with model.hf_config: {text}.")
    longest = min(int(dimensions.get("max_position_embeddings", LONGEST_DEFAULT_SEQ_LEN)), LONGEST_DEFAULT_SEQ_LEN)
    return GivenModel(
        reference=text,
        name=re.sub(r"[^a-z0-9.]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-."),
        dimensions=dimensions,
        seq_len=longest,
        has_tokenizer=has_tokenizer,
        tokenizer_class=class_to_state(tokenizer) if reads_tokenizer and has_tokenizer else None,
        restricted=restricted,
    )


def spec_of_model(text: str, overrides: Sequence[str], *, gpus: int, gpu: str, cluster: str | None) -> RunSpec:
    """Return the spec that `scaletrain init` would write for this model on ``gpus`` devices. Raises UsageError."""
    from scaletrain_cli.launch.backends.registry import all_backends
    from scaletrain_cli.spec import parse_spec
    from scaletrain_cli.spec.backend_traits import DEFAULT
    from scaletrain_cli.spec.clusters_file import choose_cluster
    from scaletrain_cli.spec.starting_spec import starting_spec

    per_node = min(gpus, _GPUS_PER_NODE)
    if gpus % per_node:
        raise UsageError(
            f"--gpus {gpus} is not a multiple of {per_node} GPUs per node. Give a spec file for such nodes."
        )
    nodes = gpus // per_node
    several = next(backend.name for backend in all_backends() if backend.traits.max_nodes != 1)
    scheduler = DEFAULT if nodes == 1 else several
    model = find_model(text, overrides, scheduler)
    written = starting_spec(model=model, gpu=gpu, scheduler=scheduler, nodes=nodes, gpus_per_node=per_node)
    return parse_spec(
        written, file=text, base_dir=Path(), overrides=overrides, cluster=choose_cluster(cluster) if cluster else None
    )
