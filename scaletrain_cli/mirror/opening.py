"""Open the place of a run's mirror: an object store, or a folder of another file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from scaletrain_cli.mirror.object_store import ObjectStore
from scaletrain_cli.mirror.stores import FolderStore, MirrorStore
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.mirror import is_in_store

# Variables of a run that a store reads, such as its endpoint.
_OF_STORES = ("AWS_", "GOOGLE_", "AZURE_", "SCALETRAIN_ALLOW_HTTP")


def open_store(place: str, run_id: str, seconds: float | None = None) -> MirrorStore:
    """Return the store of a run's mirror. Sends no request.

    ``seconds``: after which a request to an object store is not repeated.
    """
    if is_in_store(place):
        return ObjectStore(f"{place.rstrip('/')}/{run_id}", seconds)
    return FolderStore(expand_home(place) / run_id)


@contextlib.contextmanager
def store_variables(env: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of stores in the ``env`` of a run in this process; at the end, forget them and the stores."""
    from scaletrain_cli.data.sources.stores import forget_stores

    given = {name: value for name, value in env.items() if name.startswith(_OF_STORES)}
    before = {name: os.environ.get(name) for name in given}
    forget_stores()
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget_stores()
