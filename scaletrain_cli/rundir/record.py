"""run.json and revisions/NNNN.json, which carry spec and plan from launcher to engine, and checks of the run's owner.

Each file is written once and never changed. run.json holds the first submission. A revision, written when a run resumes
on other nodes or in another layout, replaces its spec and plan from then on; its writer holds the run's submit lock.
The user's code is in code/: ``<name>.tar.gz`` is the tree, ``.sha256`` one line per file as sha256sum writes it, and
``<name>-<commit>.patch`` the uncommitted changes. The name is the first digits of the hash over those lines: a run that
is resumed with newer code keeps both.

A run directory names processes to signal, jobs to cancel, folders to prune and programs to start, so a run that another
user owns is only changed with ``trust_owner``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli import __version__
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.result import RunPlan, with_reasons
from scaletrain_cli.rundir.documents import (
    DamagedError,
    entries,
    from_document,
    read_document,
    reporting_damage,
    typed,
    undamaged_document,
    write_document,
)
from scaletrain_cli.rundir.mirror_state import begun_here
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import (
    create_file,
    expand_home,
    make_folder,
    replace_file,
    require_own,
    require_writable,
    user_name,
)
from scaletrain_cli.sent_run import sent_run
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.section import RECORDED, without_pydantic_plugins
from scaletrain_cli.spec.source import SET_OPTION

if TYPE_CHECKING:
    from pydantic import TypeAdapter


SCHEMA = "scaletrain.run/v1"
REVISION_SCHEMA = "scaletrain.revision/v1"
SIZES_SCHEMA = "scaletrain.sizes/v1"
SPEC_LINES_SCHEMA = "scaletrain.spec-lines/v1"
_REVISION = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True)
class BranchPoint:
    """The checkpoint from which a run began: that of ``step`` of another run, whose directory was ``run_dir``."""

    run_id: str
    run_dir: str
    step: int


@dataclass(frozen=True)
class RunRecord:
    """The requested spec, the plan, and the versions that made them; ``revision`` 0 is run.json itself."""

    run_id: str
    created: float
    spec: RunSpec
    plan: RunPlan
    versions: dict[str, str]
    code_hash: str
    wandb_run_id: str
    working_folder: str = ""  # of the submitter: relative paths in the spec have the same meaning in every attempt
    revision: int = 0
    code: CodeRecord | None = None  # the user's code, if any
    hub: Mapping[str, str] = dataclasses.field(default_factory=dict)  # commits of the spec's hf:// references
    sizes: tuple[int, ...] = ()  # numbers of nodes on which an attempt may start, fewest first; empty: only the spec's
    branch_of: BranchPoint | None = None


@dataclass(frozen=True)
class _OfSubmission:
    """The part of run.json that no revision replaces."""

    run_id: str
    created: float
    versions: dict[str, str]
    code_hash: str
    wandb_run_id: str
    working_folder: str = ""
    branch_of: BranchPoint | None = None


def checkpoint_folder(run: RunDir, spec: RunSpec) -> Path:
    """Return the checkpoint folder: in the run directory, or ``checkpoint.dir`` followed by the run id."""
    return run.checkpoints if spec.checkpoint.dir == "auto" else expand_home(spec.checkpoint.dir) / run.run_id


def write_record(run: RunDir, record: RunRecord) -> None:
    """Create run.json. Raises FileExistsError if another process was first, so that only one can create a run."""
    create_file(run.record, json.dumps(_whole(record), indent=1))


def read_record(run: RunDir) -> RunRecord:
    """Return run.json with the latest revision's spec and plan. Raises UsageError if either cannot be read."""
    return _read_record(run, max(revisions(run), default=0))


def read_record_of(run: RunDir, attempt: int) -> RunRecord:
    """Return the record that an attempt trains: that of the revision that attempt.json names, else the latest one.

    On a network file system a node may list a folder as it was some seconds ago, without a revision that was just
    written. Raises as read_record().
    """
    revision = (read_document(run.attempt(attempt) / "attempt.json") or {}).get("revision")
    return read_record(run) if revision is None else _read_record(run, int(revision))


def read_first_record(run: RunDir) -> RunRecord:
    """Return run.json alone: the first submission, without revisions."""
    return _read_record(run, 0)


def revisions(run: RunDir) -> list[int]:
    """Return the numbers of the revisions made so far, in order."""
    matches = (_REVISION.fullmatch(entry.name) for entry in entries(run.path / "revisions"))
    return sorted(int(match[1]) for match in matches if match)


def add_revision(
    run: RunDir,
    record: RunRecord,
    spec: RunSpec,
    plan: RunPlan,
    overrides: Sequence[str],
    *,
    code: CodeRecord | None = None,
    hub: Mapping[str, str] | None = None,
    size_plans: Mapping[int, RunPlan] | None = None,
) -> RunRecord:
    """Write a new spec and plan as the next revision of ``record``, atomically, and ``code``, ``hub`` if given.

    ``size_plans``: the plans of all sizes on which an attempt may start, None if they stay those of ``record``.
    """
    number = record.revision + 1
    path = revision_path(run, number)
    assert not path.exists(), f"revision {number} of {run.run_id} already exists: the submit lock was not held"
    make_folder(path.parent)
    head = {"schema": REVISION_SCHEMA, "revision": number, "created": time.time(), "overrides": list(overrides)}
    revised = dataclasses.replace(record, spec=spec, plan=plan, revision=number, code=code or record.code)
    if hub is not None:
        revised = dataclasses.replace(revised, hub=hub)
    plans_path = _size_plans_path(run, number)
    plans_path.unlink(missing_ok=True)  # of a revision that was interrupted before it was written
    try:
        if size_plans is not None:
            revised = dataclasses.replace(revised, sizes=tuple(size_plans))
            write_size_plans(run, number, size_plans)
        write_document(path, {**head, **_decided(revised)})
    except BaseException:
        plans_path.unlink(missing_ok=True)
        raise
    return revised


def withdraw_revision(run: RunDir, number: int) -> None:
    """Remove a revision that no job uses."""
    revision_path(run, number).unlink(missing_ok=True)
    _size_plans_path(run, number).unlink(missing_ok=True)


def write_size_plans(run: RunDir, revision: int, plans: Mapping[int, RunPlan]) -> None:
    """Write the plans of the sizes of a range of nodes, by number of nodes; an empty mapping is not written."""
    if plans:
        by_nodes = {str(nodes): plan.to_json() for nodes, plan in plans.items()}
        write_document(_size_plans_path(run, revision), {"schema": SIZES_SCHEMA, "plans": by_nodes})


def read_size_plans(run: RunDir, record: RunRecord) -> dict[int, RunPlan]:
    """Return the plans of ``record.sizes`` by number of nodes, fewest first. Raises UsageError if they are damaged.

    They were written with the first record, or with the latest revision that is not only another size.
    """
    if not record.sizes:
        return {}
    numbers = [number for number in (*revisions(run)[::-1], 0) if number <= record.revision]
    path = next((one for one in (_size_plans_path(run, number) for number in numbers) if one.exists()), None)
    if path is None:
        raise UsageError(f"{run.path} has no plans of its sizes {', '.join(map(str, record.sizes))}.")
    plans = _read(path, SIZES_SCHEMA)["plans"]
    with reporting_damage(path):
        return {nodes: _read_plan(plans[str(nodes)], record.spec) for nodes in record.sizes}


def _read_plan(document: dict[str, Any], spec: RunSpec) -> RunPlan:
    plan = _plan_reader().validate_python(with_reasons(document))
    split = tuple(spec.layout.pipeline_split)
    if plan.layout.pipeline_parallel == 1 or plan.layout.pipeline_split or not split:
        return plan
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, pipeline_split=split))  # by version 0.2


def _size_plans_path(run: RunDir, revision: int) -> Path:
    return run.path / "revisions" / f"{revision:04d}-sizes.json" if revision else run.path / "sizes.json"


def revision_path(run: RunDir, number: int) -> Path:
    """Return the path of a revision, counted from 1."""
    return run.path / "revisions" / f"{number:04d}.json"


def read_revision_figures(run: RunDir, number: int) -> tuple[int, float | None]:
    """Return the GPUs of a revision (0: run.json), with those of spare nodes, and the dollars per GPU-hour."""
    path, schema = (revision_path(run, number), REVISION_SCHEMA) if number else (run.record, SCHEMA)
    document = _read(path, schema)
    with reporting_damage(path):
        plan, cluster = document["plan"], document["spec"]["cluster"]
        spare = typed(int, cluster.get("spare_nodes", 0)) * typed(int, cluster["gpus_per_node"])
        price = plan["cost"]["price_per_gpu_hour"]
        return typed(int, plan["layout"]["world_size"]) + spare, typed(float | None, price)


_SPEC_LINES = "spec-lines.json"


def write_spec_lines(run: RunDir, spec: RunSpec) -> None:
    """Write where the file of the spec has each key, for reports that name the line to change. Raises OSError."""
    if spec.lines:
        write_document(run.path / _SPEC_LINES, {"schema": SPEC_LINES_SCHEMA, "lines": spec.lines})


def read_spec_lines(run: RunDir) -> dict[str, str]:
    """Return ``file:line`` by dotted key, as the file was at submission; ``--set`` for overrides, also of a resume."""
    lines = (undamaged_document(run.path / _SPEC_LINES) or {}).get("lines")
    places = {str(key): str(place) for key, place in lines.items()} if isinstance(lines, dict) else {}
    for number in revisions(run):
        overrides = (read_document(revision_path(run, number)) or {}).get("overrides")
        for override in overrides if isinstance(overrides, list) else ():
            places[str(override).partition("=")[0].strip()] = SET_OPTION
    return places


def documents_of(run: RunDir, record: RunRecord) -> dict[str, str]:
    """Return run.json and the latest revision by file name, for pods whose volume the submitter cannot access.

    A document whose file does not exist yet is created from ``record``.
    """
    documents = {"run.json": json.dumps(_read(run.record, SCHEMA) if run.record.exists() else _whole(record))}
    if record.revision:
        path = revision_path(run, record.revision)
        made = {"schema": REVISION_SCHEMA, "revision": record.revision, **_decided(record)}
        documents[path.name] = json.dumps(_read(path, REVISION_SCHEMA) if path.exists() else made)
    if (claim := read_document(run.mirror_claim_file)) is not None:  # of a run that was moved here
        documents[run.mirror_claim_file.name] = json.dumps(claim)
    return documents


def place_documents(folder: Path, root: Path) -> tuple[RunDir, RunRecord]:
    """Create the run directory under ``root`` from documents_of() and the code, or complete an existing one.

    Raises UsageError if the existing one belongs to another run.
    """
    first = _read(folder / "run.json", SCHEMA)
    run = RunDir(root / str(first["run_id"]))
    make_folder(run.path)
    if not run.record.exists():
        write_document(run.record, first)
    elif _read(run.record, SCHEMA) != first:
        raise UsageError(f"{run.path} on the volume is another run with the same name. Submit with another --run-id.")
    for path in entries(folder):
        match = _REVISION.fullmatch(path.name)
        if match is not None and not (revised := revision_path(run, int(match[1]))).exists():
            make_folder(revised.parent)
            write_document(revised, _read(path, REVISION_SCHEMA))
    claim, own = read_document(folder / run.mirror_claim_file.name), read_document(run.mirror_claim_file) or {}
    if claim is not None and own.get("generation", 0) < claim["generation"]:  # an earlier pod may have made a later one
        write_document(run.mirror_claim_file, claim)
    record = read_record(run)
    if record.code is not None:
        for suffix in ("sha256", "tar.gz"):
            placed = code_file(run, record.code, suffix)
            if (folder / placed.name).is_file() and not placed.exists():
                make_folder(placed.parent)
                replace_file(placed, (folder / placed.name).read_bytes())
    return run, record


def specs_of_documents(folder: Path) -> list[dict[str, Any]]:
    """Return the specs in documents_of() as they are recorded, without validation. Raises UsageError and OSError."""
    paths = (folder / "run.json", *(path for path in entries(folder) if _REVISION.fullmatch(path.name)))
    return [_read(path, SCHEMA if path.name == "run.json" else REVISION_SCHEMA).get("spec", {}) for path in paths]


def _whole(record: RunRecord) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": record.run_id,
        "created": record.created,
        **_decided(record),
        "versions": record.versions,
        "code_hash": record.code_hash,
        "wandb_run_id": record.wandb_run_id,
        "working_folder": record.working_folder,
        **({"branch_of": dataclasses.asdict(record.branch_of)} if record.branch_of is not None else {}),
    }


def _decided(record: RunRecord) -> dict[str, Any]:
    return {
        "spec": record.spec.model_dump(mode="json", by_alias=True),
        "plan": record.plan.to_json(),
        "code": None if record.code is None else dataclasses.asdict(record.code),
        **({"hub": dict(record.hub)} if record.hub else {}),
        **({"sizes": list(record.sizes)} if record.sizes else {}),
    }


def _read(path: Path, schema: str) -> dict[str, Any]:
    if (data := read_document(path, schema)) is None:
        raise UsageError(f"{path} cannot be read: it does not exist.")
    return data


@functools.cache
def _plan_reader() -> TypeAdapter[RunPlan]:
    """Return the cached reader: it takes 18 ms to build, and `scaletrain list` reads hundreds of records."""
    from pydantic import TypeAdapter

    with without_pydantic_plugins():
        return TypeAdapter(RunPlan)


def _read_record(run: RunDir, revision: int) -> RunRecord:
    try:
        return _with_decided(run, _read(run.record, SCHEMA), revision)
    except DamagedError as error:
        versions = (undamaged_document(run.record) or {}).get("versions")
        writer = versions.get("scaletrain", __version__) if isinstance(versions, dict) else __version__
        if writer == __version__:
            raise
        # What another version wrote is whole; it must not be removed or restored from a copy, as a damaged file.
        said = f"{run.record} is of ScaleTrain {writer}, and {__version__} cannot read it."
        raise DamagedError(f"{said} Use ScaleTrain {writer} for this run.") from error


def _with_decided(run: RunDir, data: dict[str, Any], revision: int) -> RunRecord:
    path = revision_path(run, revision) if revision else run.record
    decided = _read(path, REVISION_SCHEMA) if revision else data
    fields = {field.name for field in dataclasses.fields(_OfSubmission)}
    first = from_document(_OfSubmission, {key: data[key] for key in data.keys() & fields}, run.record)
    with reporting_damage(path):
        spec = RunSpec.model_validate(decided["spec"], context=dict(RECORDED))
        length = (spec.training.steps, spec.training.tokens, spec.training.samples, spec.training.epochs)
        if length.count(None) == len(length):
            raise ValueError("spec.training has no number of steps")
        spec.set_folder(Path(first.working_folder))
        return RunRecord(
            **vars(first),
            spec=spec,
            plan=_read_plan(decided["plan"], spec),
            revision=revision,
            code=typed(CodeRecord | None, decided.get("code")),
            hub=typed(dict[str, str], decided.get("hub", {})),
            sizes=typed(tuple[int, ...], decided.get("sizes", [])),
        )


def require_own_run(run: RunDir, *, trust_owner: bool, remedy: str) -> None:
    """Raise UsageError if the run directory or its record belongs to another user who is not trusted."""
    for path in (run.path, run.record):
        require_own(path, "the run", trust=trust_owner, remedy=remedy)


def require_own_checkpoints(run: RunDir, spec: RunSpec, *, trust_owner: bool) -> None:
    """Raise UsageError if another user owns the folder of this run's checkpoints, whose content is loaded.

    On Kubernetes the pods create it, as another user.
    """
    folder = checkpoint_folder(run, spec)
    if spec.cluster.traits.shared_run_directory and os.path.lexists(folder):
        require_own(folder, "the checkpoint folder", trust=trust_owner, remedy="Use another --run-id or checkpoint.dir")


def require_changeable(run: RunDir, purpose: str) -> None:
    """Raise UsageError with a remedy if this user cannot write to the run directory and its journal."""
    require_writable(run.path, purpose)
    if run.events.exists() and not os.access(run.events, os.W_OK, effective_ids=True):
        raise UsageError(
            f"{purpose}: {run.events} cannot be written to by {user_name(os.geteuid())}; it belongs to "
            f"{user_name(run.events.lstat().st_uid)}. Ask that user to do it."
        )


def require_cancellable(run: RunDir, *, trust_owner: bool) -> None:
    """Raise UsageError if this user may not or cannot stop the run. Call it before signaling a process or a job."""
    require_own_run(run, trust_owner=trust_owner, remedy="Ask that user to cancel it")
    require_changeable(run, f"{run.run_id} cannot be cancelled")


def is_elsewhere(run: RunDir, record: RunRecord) -> bool:
    """Return whether the nodes write to a volume that this machine does not see.

    The run directory has then no attempts but those that were received from the mirror. The output of pods that was
    fetched from the cluster is in folders of attempts too; only nodes write attempt.json.
    """
    if record.spec.cluster.traits.shared_run_directory or sent_run(run.path) is not None:
        return False
    return not any((run.attempt(number) / "attempt.json").is_file() for number in begun_here(run))


_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CodeRecord:
    """The record of a snapshot in run.json. ``sha256`` is of the text of listing(); ``uncommitted`` counts files."""

    commit: str
    uncommitted: int
    sha256: str
    files: int
    bytes: int

    @property
    def name(self) -> str:
        """Return the name of its files without suffixes."""
        return self.sha256[:12]

    @property
    def shown(self) -> str:
        """Return the commit and the number of uncommitted files as short text."""
        beside = f" and {self.uncommitted} uncommitted" if self.uncommitted else ""
        return f"{self.name} (commit {self.commit[:10]}{beside}, {self.files} files, {self.bytes:,} bytes)"


def code_file(run: RunDir, code: CodeRecord, suffix: str) -> Path:
    """Return the path of the ``tar.gz``, ``sha256`` or ``patch`` of a snapshot in this run directory."""
    name = f"{code.name}-{code.commit[:12]}" if suffix == "patch" else code.name  # the same files, of another commit
    return run.path / "code" / f"{name}.{suffix}"


def listing(hashes: Mapping[str, str]) -> str:
    """Return the SHA-256 by path as text for ``sha256sum --check``, sorted. Paths contain no line breaks."""
    return "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes))


def paths_in(text: str) -> frozenset[str]:
    """Return the paths in a listing."""
    return frozenset(line.partition("  ")[2] for line in text.split("\n") if line)


def hash_of(text: str) -> str:
    """Return the hash of a listing, which names the snapshot."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def differences(folder: Path, text: str) -> list[str]:
    """Return the files of the listing that are missing below ``folder`` or differ, as text."""
    messages = []
    for line in filter(None, text.split("\n")):
        expected, _, path = line.partition("  ")
        try:
            differs = file_hash(folder / path) != expected
        except OSError:
            messages.append(f"{path} is missing")
        else:
            messages += [f"{path} differs"] * differs
    return messages


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
