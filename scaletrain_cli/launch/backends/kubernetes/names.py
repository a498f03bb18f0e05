"""Names, labels and addresses of one submission's objects, each a function of the run id and a number. Pure.

A generated pod name (`<workload>-node-0-<index>-<5 letters>`) is a DNS label, hence of at most 63 characters. JobSet
refuses longer ones; a plain Job is accepted and cannot create its pods.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scaletrain_cli.launch.backends.kubernetes.api_kinds import BACKENDS, Kind

if TYPE_CHECKING:
    from scaletrain_cli.rundir.record import RunRecord

MASTER_PORT = 29500
NODE = "node"  # the name of the replicated job, of Volcano's task, and of the container; Trainer requires it
MANAGER = "scaletrain"  # also the field manager of server-side apply
RUN_LABEL = "scaletrain.dev/run"
RUN_ID_ANNOTATION = "scaletrain.dev/run-id"
REVISION_ANNOTATION = "scaletrain.dev/revision"
SUBMISSION_ANNOTATION = "scaletrain.dev/submission"
DOCUMENTS_ANNOTATION = "scaletrain.dev/documents-sha256"
RECORD_ANNOTATION = "scaletrain.dev/record"  # unique to the run: two users may choose the same run id
PREPARATION_LABEL = "scaletrain.dev/preparation"  # in place of RUN_LABEL, on what prepares the data of a run
VIEW_LABEL = "scaletrain.dev/view"  # in place of RUN_LABEL, on a pod that only shows a run
VIEWER_ANNOTATION = "scaletrain.dev/viewer"  # user and machine that a view is for
INSTANCE_LABEL = "app.kubernetes.io/instance"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
MANAGED = f"app.kubernetes.io/managed-by={MANAGER}"  # selects the objects of this launcher

LONGEST_LABEL_VALUE = 63
_LONGEST_READABLE = 40
_LONGEST_WORKLOAD = 44  # with -node-0-99999-abcde at most 63
_HASH_DIGITS = 6


@dataclass(frozen=True)
class Workload:
    """One submission of a run. Each `scaletrain resume` is a new one, since the objects cannot be changed.

    ``submission`` counts from 1. ``mark`` is record_mark() of the run's record.
    """

    run_id: str
    submission: int
    revision: int = 0
    backend: str = "jobset"
    mark: str = ""

    @cached_property
    def name(self) -> str:
        """Name of the workload object, its headless Service and its pods' host names; begins with a letter."""
        suffix = f"-s{self.submission}"
        readable = re.sub(r"[^a-z0-9]+", "-", self.run_id.lower()).strip("-") or "run"
        readable = readable if readable[0].isalpha() else f"r-{readable}"  # a Service name must begin with a letter
        longest = min(_LONGEST_READABLE, _LONGEST_WORKLOAD - len(suffix))
        if readable != self.run_id or len(readable) > longest:  # names of different ids must differ
            readable = f"{readable[: longest - _HASH_DIGITS - 1].rstrip('-')}-{_short_hash(self.run_id)}"
        return readable + suffix

    @property
    def id(self) -> str:
        """Id of the job: ``jobset/<name>``. parse_id() reads it."""
        return f"{self.backend}/{self.name}"

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap that holds run.json for the pods."""
        return f"{self.name}-run"

    @property
    def kind(self) -> Kind:
        return BACKENDS[self.backend]

    @property
    def master_address(self) -> str:
        """Host name of pod 0 under the headless Service that the controller creates with the workload's name."""
        job = f"{NODE}-0" if self.backend != "volcano" else NODE
        return f"{self.name}-{job}-0.{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object and pod."""
        return own_labels(self.name, RUN_LABEL, self.run_id)

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of every object and pod: values that a label cannot hold."""
        return {
            RUN_ID_ANNOTATION: self.run_id,
            REVISION_ANNOTATION: str(self.revision),
            SUBMISSION_ANNOTATION: str(self.submission),
            **({RECORD_ANNOTATION: self.mark} if self.mark else {}),
        }


def own_labels(name: str, label: str, run_id: str) -> dict[str, str]:
    """Return the labels of an object of a run, of its preparation or of a view; ``label`` says which."""
    managed = dict.fromkeys(("app.kubernetes.io/name", "app.kubernetes.io/managed-by"), MANAGER)
    return {**managed, INSTANCE_LABEL: name, label: run_label(run_id)}


def parse_id(job_id: str) -> tuple[str, str]:
    """Return the kind of workload and the object name of a job id. Raises ValueError for anything else."""
    backend, slash, name = job_id.partition("/")
    if backend not in BACKENDS or not slash or not name:
        raise ValueError(f"{job_id!r} is not the id of a Kubernetes job, such as jobset/llama-s1")
    return backend, name


def record_mark(record: RunRecord) -> str:
    """Return 16 hex digits that are unique to this run, also among runs with the same id."""
    return hashlib.sha256(f"{record.run_id}\0{record.created!r}\0{record.wandb_run_id}".encode()).hexdigest()[:16]


def belongs_to(item: Mapping[str, Any], record: RunRecord) -> bool:
    """Return whether an object belongs to this run, and not to another one with the same id."""
    marks = item["metadata"].get("annotations") or {}
    return marks.get(RUN_ID_ANNOTATION) == record.run_id and marks.get(RECORD_ANNOTATION) == record_mark(record)


def submission_number(name: str) -> int:
    """Return the number at the end of a workload's name or job id; 0 if there is none."""
    return int(match[1]) if (match := re.search(r"-s(\d+)$", name)) else 0


def run_label(run_id: str) -> str:
    """Return the run id as the value of a label, by which all objects of a run are found."""
    if len(run_id) <= 63 and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", run_id):
        return run_id
    return f"{run_id[: 63 - _HASH_DIGITS - 1].rstrip('._-')}-{_short_hash(run_id)}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
