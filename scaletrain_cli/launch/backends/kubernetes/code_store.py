"""The snapshot of the user's code in object storage, for the pods of a run whose snapshot no ConfigMap can hold.

The list of files with their hashes is in the ConfigMap, and every file is compared with it before a rank starts. An
archive has the hash of that list as its name, so that runs with the same code share it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import make_folder, replace_file

if TYPE_CHECKING:  # a pod imports this module before it can receive SIGTERM
    from scaletrain_cli.rundir.record import RunRecord

logger = logging.getLogger(__name__)


def code_url(record: RunRecord) -> str | None:
    """Return where the archive of the run's code is kept; None without a snapshot, or a store for it in the spec."""
    code, store = record.code, record.spec.cluster.kubernetes.code_store
    if code is None or record.spec.code.on_nodes is not None or store is None:
        return None
    return f"{store.rstrip('/')}/{code.sha256}.tar.gz"


def upload_code(run: RunDir, record: RunRecord) -> str | None:
    """Store the archive of the run's code, unless the same bytes are there; return its URL, None for a run without one.

    An archive of the same size is read and compared: a damaged one is replaced.
    Raises PlaceError and UnavailableError of the store, and UsageError if the run directory lost the archive.
    """
    from scaletrain_cli.data.sources.places import find_file, read_all, unless_missing, write_file

    code, url = record.code, code_url(record)
    if code is None or url is None:
        return None
    from scaletrain_cli.rundir.record import code_file

    archive = code_file(run, code, "tar.gz")
    if not archive.is_file():
        raise UsageError(reason("code-missing", folder=str(run.path / "code"), run=record.run_id, version=code.name))
    stored = unless_missing(lambda: find_file(url))
    is_there = stored is not None and stored.size == archive.stat().st_size
    if not (is_there and unless_missing(lambda: read_all(url)) == archive.read_bytes()):
        write_file(url, archive)
    return url


def fetch_code(run: RunDir, record: RunRecord) -> None:
    """Fetch the archive into the run directory of a pod, if no ConfigMap has brought it.

    Raises PlaceError and UnavailableError of the store.
    """
    from scaletrain_cli.data.sources.places import read_all

    code, url = record.code, code_url(record)
    if code is None or url is None:
        return
    from scaletrain_cli.rundir.record import code_file

    placed = code_file(run, code, "tar.gz")
    if not placed.exists():
        content = read_all(url)
        make_folder(placed.parent)
        replace_file(placed, content)
        logger.info("fetched the code %s of the run (%d bytes) from %s", code.name, len(content), url)
