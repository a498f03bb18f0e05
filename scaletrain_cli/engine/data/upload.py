"""Copy the prepared text of a spec to an object store, for ``data upload``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.prepared import find_prepared
from scaletrain_cli.data.remote_datasets import OBJECTS, upload_dataset
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_FILES_BETWEEN_LINES = 1000


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Upload the datasets of a spec that are here, given SPEC_JSON RUNS_ROOT DESTINATION; return where each one is.

    Raises UsageError, other ScaletrainErrors and OSError.
    """
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    destination = arguments[2]
    if not is_remote(destination):
        raise UsageError(Reason("remote.not-remote", {"path": destination}))
    if is_of_images(spec):
        raise UsageError(Reason("remote.images-not-uploaded"))
    if spec.training.objective != "causal_lm":
        raise UsageError(Reason("remote.rows-not-uploaded"))
    if (datasets := find_prepared(spec.data, Path(arguments[1]))) is None:
        raise UsageError(Reason("remote.prepare-first"))
    paths = {source.name: source.path for source in spec.data.all_sources}
    uploaded = []
    for name, dataset in datasets.items():
        if (dataset / OBJECTS).exists():  # it is remote already
            uploaded.append({"name": name, "path": paths[name]})
            continue
        print(f"uploading {dataset}", file=sys.stderr, flush=True)
        uploaded.append({"name": name, "path": upload_dataset(dataset, destination, _show)})
    return {"sources": uploaded}


def _show(done: int, total: int) -> None:
    if done == total or done % _FILES_BETWEEN_LINES == 0:
        print(f"{done} of {total} files", file=sys.stderr, flush=True)
