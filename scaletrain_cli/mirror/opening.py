"""Open the place of a run's mirror: an object store, or a folder of another file system."""

from __future__ import annotations

from scaletrain_cli.mirror.folder_store import FolderStore
from scaletrain_cli.mirror.object_store import ObjectStore
from scaletrain_cli.mirror.stores import MirrorStore
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.mirror import is_in_store


def open_store(place: str, run_id: str, seconds: float | None = None) -> MirrorStore:
    """Return the store of a run's mirror. Sends no request.

    ``seconds``: after which a request to an object store is not repeated.
    """
    if is_in_store(place):
        return ObjectStore(f"{place.rstrip('/')}/{run_id}", seconds)
    return FolderStore(expand_home(place) / run_id)
