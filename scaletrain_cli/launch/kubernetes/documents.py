"""What pods get in the ConfigMap of their run: its record, and the user's code unless that is on the nodes already.

The run directory need not exist: what would be in it is made then.
"""

from __future__ import annotations

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.code_snapshot import take_snapshot
from scaletrain_cli.rundir.code import code_file
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, documents_of


def documents_for(run: RunDir, record: RunRecord) -> dict[str, str | bytes]:
    """Texts and bytes by file name. Raises UsageError where the code can no longer be had."""
    documents: dict[str, str | bytes] = {**documents_of(run, record)}
    code = record.code
    if code is None:
        return documents
    suffixes = ("sha256", "tar.gz") if record.spec.code.on_nodes is None else ("sha256",)
    files = {suffix: code_file(run, code, suffix) for suffix in suffixes}
    if all(path.is_file() for path in files.values()):
        return documents | {path.name: path.read_bytes() for path in files.values()}
    snapshot = take_snapshot(record.spec, record.working_folder, run.path.parent)
    if snapshot is None or snapshot.record.sha256 != code.sha256:
        raise UsageError(
            f"{run.path / 'code'} does not hold the code of {record.run_id} ({code.name}), and the tree has become "
            "another. Restore it, or give the run the tree as it is: scaletrain resume --new-code."
        )
    contents = {"sha256": snapshot.listing.encode("utf-8", "surrogateescape"), "tar.gz": snapshot.archive}
    return documents | {files[suffix].name: contents[suffix] for suffix in suffixes}
