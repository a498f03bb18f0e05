"""The Slurm options of the cluster section: each value one word of a `#SBATCH` line, or quoted where bash reads it."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.quantities import Bytes, Matching, PositiveSeconds
from scaletrain_cli.spec.section import LEFT_OUT, BackendSection, Section
from scaletrain_cli.spec.shared_paths import is_shared
from scaletrain_cli.text import seconds_text

_SLURM_WORD = r"[A-Za-z0-9_.,:=/@%+*\[\]\-&|!()]{1,256}"


def _slurm_word(value: Any) -> str:
    if isinstance(value, int | float):
        raise PydanticCustomError("slurm_word", "must be text. Put it in quotes.")
    if not isinstance(value, str) or not re.fullmatch(_SLURM_WORD, value):
        raise PydanticCustomError(
            "slurm_word", "must be one word of letters, digits and _.,:=/@%+*[]-&|!(), for a #SBATCH line"
        )
    return value


_NUMBERS = r"\d+(?:-\d+)?"
_HOSTS = rf"(?:[^,\[\]]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+"
_MOST_NODES = 65_536  # of a range in Slurm (MAX_RANGE in hostlist.c of schedmd/slurm)


def _hostlist(value: Any) -> str:
    word = _slurm_word(value)
    names, valid = 0, re.fullmatch(f"{_HOSTS}(?:,{_HOSTS})*", word) is not None
    for part in re.findall(_HOSTS, word):
        # The last number of a range, or the only one; a range that counts down has no nodes.
        ranges = [re.findall(r"(\d+)(?:-(\d+))?", numbers) for numbers in re.findall(r"\[(.*?)\]", part)]
        sizes = [[int(last or first) - int(first) + 1 for first, last in numbers] for numbers in ranges]
        valid = valid and all(min(counts) > 0 for counts in sizes)
        names += math.prod(map(sum, sizes))
    if valid and names > _MOST_NODES:
        raise PydanticCustomError("hostlist", f"names {names:,} nodes; Slurm allows {_MOST_NODES:,}")
    if not valid:
        raise PydanticCustomError("hostlist", "must be a hostlist, such as n[1-4,7],login1")
    return word


# One word of a `#SBATCH` line, without blanks, quotes, backslashes or control characters.
SlurmWord = Annotated[
    str, PlainValidator(_slurm_word), WithJsonSchema({"type": "string", "pattern": f"^{_SLURM_WORD}$"})
]
Hostlist = Annotated[str, PlainValidator(_hostlist), WithJsonSchema({"type": "string", "pattern": f"^{_SLURM_WORD}$"})]
SlurmOption = Annotated[
    str,
    Matching(
        r"[a-z][a-z0-9\-]*", 64, "must be the name of a long option of sbatch without its dashes, such as mail-type"
    ),
]
SlurmValue = Annotated[
    str | int | bool,
    PlainValidator(lambda value: value if isinstance(value, int) else _slurm_word(value)),
    WithJsonSchema({"type": ["string", "integer", "boolean"]}),
]
_ABSOLUTE_PATH = r"/[^\x00\n]*"
AbsolutePath = Annotated[str, Matching(_ABSOLUTE_PATH, 4096, "must be an absolute path on one line")]
PythonInImage = Annotated[
    str, Matching(rf"python3|{_ABSOLUTE_PATH}", 4096, "must be python3, or an absolute path in the image")
]
Mount = Annotated[
    str, Matching(r"/[^\x00\n,]*", 4096, "must be SOURCE[:TARGET[:OPTIONS]] with an absolute SOURCE and without commas")
]
Image = Annotated[
    str, Matching(r"[^\-\x00\n][^\x00\n]*", 4096, "must be an image file or URL on one line, not starting with a dash")
]
Module = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_][A-Za-z0-9_.+/\-]*",
        256,
        "must be the name of an environment module, such as cuda/12.4: letters, digits and _.+/-",
    ),
]

Gres = Annotated[
    str,
    Matching(
        r"(?!gres:)[A-Za-z][A-Za-z0-9_\-]*(:[A-Za-z0-9_.\-]+){0,3}",
        256,
        "must be a generic resource of Slurm as NAME[:TYPE][:COUNT], such as nvme:500",
    ),
]

# Options that the launcher sets itself, or that would break the layout of the run directory.
SLURM_OWN_OPTIONS = frozenset(
    "array chdir comment cpus-per-task dependency error export input job-name kill-on-invalid-dep no-requeue nodes "
    "open-mode output parsable requeue signal test-only wait wrap partition account qos time reservation constraint "
    "exclude nodelist mem licenses switches".split()
)
_ONE_TASK = (
    "is not possible: a job has one task on each node, the agent that starts the ranks. Remove it; "
    "cluster.gpus_per_node is the number of ranks of a node, and cluster.cpus_per_gpu that of their cores."
)
_GPUS = (
    "is not possible here: cluster.gpus_per_node, slurm.gres_type and slurm.gpu_request request the GPUs, and "
    "slurm.gres other generic resources. Remove it from extra."
)
_NOT_EXTRA = {
    **dict.fromkeys(
        SLURM_OWN_OPTIONS, "is set by the launcher or by another key of this section; remove it from extra."
    ),
    **dict.fromkeys("ntasks ntasks-per-node ntasks-per-core ntasks-per-socket overcommit".split(), _ONE_TASK),
    **dict.fromkeys("gpus-per-task ntasks-per-gpu tres-per-task".split(), _ONE_TASK),
    **dict.fromkeys("gpus gpus-per-node gpus-per-socket gres".split(), _GPUS),
    "clusters": "is not possible: the other commands would look for the job in this cluster. Set SLURM_CONF to the "
    "slurm.conf of that cluster, or submit on its login node (--cluster of clusters.yaml).",
}
# Options of Pyxis that the launcher sets from other keys.
CONTAINER_OWN_OPTIONS = frozenset({"container-image", "container-mounts", "container-env"})


UNLIMITED_SECONDS = 60.0 * (2**32 - 1)  # Slurm's INFINITE, which it keeps in minutes


def _time_limit(value: Any) -> Any:
    if isinstance(value, str) and value.strip().upper() in ("UNLIMITED", "INFINITE"):
        return UNLIMITED_SECONDS
    if isinstance(value, int) and not isinstance(value, bool):  # written by the launcher itself, it is a float
        raise PydanticCustomError("unit", f"has no unit, and sbatch counts minutes: write {value}m, or {value}s")
    return value


TimeLimit = Annotated[PositiveSeconds, BeforeValidator(_time_limit)]


class ContainerSpec(Section):
    """The container image of the ranks. The launcher's first and last commands of a job run outside of it."""

    image: Image
    mounts: list[Mount] = Field(default=[], description="SOURCE[:TARGET[:OPTIONS]]; the runs root is mounted anyway")
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    python: PythonInImage = Field(default="python3", description="in the image, with this package")
    options: dict[SlurmOption, SlurmValue] = Field(
        default={}, description="further options of Pyxis, as no-container-mount-home: true or container-name: train"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        for name in sorted(self.options):
            if self.runtime != "pyxis":
                yield f"options.{name}", "is an option of Pyxis, and the runtime is apptainer; remove it."
            elif name in CONTAINER_OWN_OPTIONS:
                yield f"options.{name}", "is set by the launcher or by another key of this section; remove it."
            elif not name.removeprefix("no-").startswith("container-"):
                yield f"options.{name}", "is no option of Pyxis: their names start with container- or no-container-."
        if self.runtime == "pyxis" and re.fullmatch(r"[^./][^:]*\.(sqsh|squashfs)", self.image):
            yield "image", "is a name in a registry for Pyxis, not a file; give the absolute path of the file."


class SlurmPreparationSpec(Section):
    """The jobs that prepare the data of a run on CPU nodes. What is not set here is as for the run."""

    partition: SlurmWord | None = Field(default=None, description="of CPU nodes; null: the partition of the run")
    cpus_per_task: Annotated[int, Field(strict=True, ge=1, le=1024)] = Field(
        default=4, description="worker processes of each task"
    )
    memory: Bytes | None = Field(default=None, description="of each task; null: the default of the cluster")
    time: TimeLimit | None = Field(default=None, description="limit of each task")
    tasks: Annotated[int, Field(strict=True, ge=1, le=1000)] | None = Field(
        default=None, description="tasks that share the work; null: by the size of the sources"
    )


class SlurmSpec(BackendSection):
    """Options of the Slurm job. ``extra`` takes any further long option of sbatch, without its dashes."""

    starting_text: ClassVar[str] = """\
  slurm:
    time: 24h
    # partition: gpu
    # account: lab

"""

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    time: TimeLimit | None = None
    reservation: SlurmWord | None = None
    constraint: SlurmWord | None = None
    exclude: Hostlist | None = None
    nodelist: Hostlist | None = None
    licenses: SlurmWord | None = None
    switches: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    switches_wait: PositiveSeconds | None = Field(default=None, description="then any nodes will do")
    memory_per_node: Bytes | None = None
    gres_type: SlurmWord | None = Field(default=None, description="type in --gpus-per-node=TYPE:N, e.g. h100")
    gpu_request: Literal["gpus-per-node", "gres", "none"] = Field(
        default="gpus-per-node",
        description="option of sbatch for the GPUs, gres as --gres=gpu:TYPE:N; none: whole nodes (--exclusive), whose "
        "GPUs Slurm does not manage",
    )
    gres: tuple[Gres, ...] = Field(default=(), description="other generic resources per node, as nvme:500")
    modules: list[Module] = []
    activate: AbsolutePath | None = Field(default=None, description="a script to source, as /opt/venv/bin/activate")
    activate_arguments: list[Annotated[str, Matching(r"[^\x00\n]+", 4096, "must be one line")]] = Field(
        default=[], description="of that script, as [myenv] for the one of conda"
    )
    container: ContainerSpec | None = None
    preparation: SlurmPreparationSpec = LEFT_OUT
    extra: dict[SlurmOption, SlurmValue] = {}

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.activate_arguments and self.activate is None:
            yield "activate_arguments", "has no effect without slurm.activate, the script that gets them. Set it."
        if self.switches_wait is not None and self.switches is None:
            yield "switches_wait", "has no effect without slurm.switches, the maximum number of leaf switches. Set it."
        for name in sorted(_NOT_EXTRA.keys() & self.extra.keys()):
            yield f"extra.{name}", _NOT_EXTRA[name]
        if self.gpu_request == "none" and self.gres_type is not None:
            yield "gres_type", "has no effect with slurm.gpu_request: none, which requests no GPUs. Remove one of them."
        for index, word in enumerate(self.gres):
            if word.partition(":")[0] == "gpu":
                yield f"gres.{index}", _GPUS.replace("from extra", "from gres")
        for key, message in self.container.inconsistencies() if self.container is not None else ():
            yield f"container.{key}", message

    @property
    def summary(self) -> str:
        given = {"partition": self.partition, "account": self.account, "QOS": self.qos, "reservation": self.reservation}
        time = self.time or UNLIMITED_SECONDS
        limit = f", requeued after {seconds_text(time)}" if time < UNLIMITED_SECONDS else ""
        return "".join(f", {what} {value}" for what, value in given.items() if value is not None) + limit

    def unseen_place(self, folder: Path, path: str) -> str:
        place = PurePosixPath(folder / expand_home(path))
        if self.container is not None:
            seen = [mount.split(":")[:2] for mount in self.container.mounts]
            if not any(len(set(mount)) == 1 and place.is_relative_to(mount[0]) for mount in seen):
                return "in the container"
        beside_the_submitter = not expand_home(path).is_absolute()
        if beside_the_submitter or os.path.lexists(place) or is_shared(place):
            return ""
        return "on the nodes"

    @property
    def gpu_kind(self) -> str:
        return self.gres_type or ""

    @property
    def host_memory_per_node(self) -> float | None:
        return self.memory_per_node

    def cluster_inconsistencies(self, *, grace_seconds: float) -> Iterator[tuple[str, str]]:
        """Yield the key ``time`` if the job would end before it starts to train."""
        warning = max(60.0, grace_seconds)  # the job's notice before its end; Slurm checks every 30 s
        if self.time is not None and self.time < warning + 120:
            yield (
                "time",
                f"must be at least {warning + 120:.0f} s: ranks are signaled {warning:.0f} s before the end "
                "(grace_seconds, at least 60), before training would start.",
            )
