"""Everything outside the run spec that a key of it names: what checks that it is there, and when.

``EXTERNAL_KEYS`` is the table that docs/checks.md shows. ``check_external`` looks at what this machine can see: files,
modules, credentials. Every verb that starts a run asks it before anything is made or queued, and so does the agent of
each node before it starts a rank, for what only the nodes can see. What Slurm and Kubernetes hold, their own preflights
ask.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from scaletrain_cli.errors import Problem, UsageError, WrongNodesError
from scaletrain_cli.rundir.code import code_file, paths_in
from scaletrain_cli.rundir.journal import has_committed
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.corpus_files import PYTHON_STDLIB, find_files, kind_of, problems_of
from scaletrain_cli.spec.weights_config import config_mismatches

if TYPE_CHECKING:
    from scaletrain_cli.launch.code_snapshot import Snapshot

_HERE = "scaletrain_cli.launch.external_checks:"
_NODE = "the node agent"
_SLURM = "scaletrain_cli.launch.slurm_preflight:judge"
_SBATCH = "scaletrain_cli.launch.slurm:SlurmScheduler"
_KUBERNETES = "scaletrain_cli.launch.kubernetes.preflight:check"
_EXISTENCE = "scaletrain_cli.launch.kubernetes.existence:"
_CAPACITY = "scaletrain_cli.launch.kubernetes.capacity:"
_API = "the API server's own check of each object"
_PLACED = "`status` and `explain`, from the pods' events"
_LOAD, _PLAN, _SUBMIT, _SCHEDULER = "load", "plan", "submit", "submit (asks the scheduler)"


@dataclass(frozen=True)
class ExternalKey:
    """One key (``*`` stands for a name or an index) and the thing that it names.

    ``when``: ``load`` is every verb that reads the spec; ``plan`` every verb that plans; ``submit`` is validate (as a
    warning), submit, submit --dry-run, train, resume and each node; ``submit (asks the scheduler)`` is submit and
    resume. ``instead`` says where it cannot be checked then, and what does it. ``by`` is the code, as MODULE:NAME.
    """

    key: str
    names: str
    checked: str
    when: str
    instead: str
    by: str


def _row(key: str, names: str, checked: str, when: str, by: str, instead: str = "") -> ExternalKey:
    return ExternalKey(key, names, checked, when, instead, by)


_K8S, _SL = "cluster.kubernetes.", "cluster.slurm."
_UNSEEN = "places that only the nodes see: the node agent"

EXTERNAL_KEYS: tuple[ExternalKey, ...] = (
    _row("model.preset", "a preset of this package", "known", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        "model.hf_config",
        "a Hugging Face config.json",
        "readable; every key used, irrelevant or refused by name",
        _LOAD,
        "scaletrain_cli.spec.architecture_source:from_hugging_face",
    ),
    _row(
        "model.weights",
        "a folder of *.safetensors",
        "there, readable, each file whole; config.json agrees with the spec",
        _SUBMIT,
        f"{_HERE}weights_problems",
        f"{_UNSEEN}; names and shapes of the tensors: each rank before it loads them",
    ),
    _row(
        "data.source",
        "files, or a prepared dataset",
        "there, readable, of a known format; the beginning of some of them is decoded and has the field `text`",
        _SUBMIT,
        f"{_HERE}source_problems",
        f"{_UNSEEN}; every document: rank 0, which prepares the data",
    ),
    _row(
        "data.tokenizer.path",
        "a tokenizer.json",
        "there, JSON, with a model and a token that ends a document; no id beyond model.vocab_size",
        _SUBMIT,
        f"{_HERE}tokenizer_problems",
        _UNSEEN,
    ),
    _row(
        "code.path",
        "a folder of a git working tree",
        "there, a git tree, within max_size, no submodules",
        _SUBMIT,
        "scaletrain_cli.launch.code_snapshot:take_snapshot",
        "validate does not read the tree; on the nodes every file is compared (launch/code_on_node.py)",
    ),
    _row(
        "code.engine",
        "a Python module",
        "in what is kept of code.path, or installed",
        _SUBMIT,
        f"{_HERE}engine_problems",
        f"validate does not read the tree; modules installed at {_UNSEEN}",
    ),
    _row(
        "code.import_root",
        "a folder below code.path",
        "there in what is kept",
        _SUBMIT,
        f"{_HERE}engine_problems",
        "validate does not read the tree",
    ),
    _row(
        "code.on_nodes",
        "a folder of the image or a volume",
        "nothing: only the nodes see it",
        "never before the start",
        "scaletrain_cli.launch.code_on_node:place_code",
        f"every file is compared with what was submitted by {_NODE}",
    ),
    _row(
        "checkpoint.dir",
        "a folder for checkpoints",
        "a folder that this user may write, or one that can be made; room for a checkpoint",
        _SUBMIT,
        f"{_HERE}checkpoint_problems",
        _UNSEEN,
    ),
    _row(
        "secret_env.*",
        "a variable of the submitter's environment",
        "set",
        _SUBMIT,
        f"{_HERE}secret_problems",
        "Kubernetes: cluster.kubernetes.secrets names the Secret that has it",
    ),
    _row(
        "tracking.wandb.project",
        "a project of Weights & Biases",
        "with mode: online that wandb is installed and has a key: WANDB_API_KEY, or an entry in .netrc",
        _SUBMIT,
        f"{_HERE}wandb_problems",
        "whether the key is valid: the first log-in. Training goes on without the mirror, with the event wandb-off",
    ),
    _row("cluster.gpu", "an accelerator of the catalogue", "known", _PLAN, "scaletrain_cli.plan:make_plan"),
    _row("cluster.gpu.name", "nothing: a table of its own", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        "cluster.gpus_per_node",
        "devices of the nodes",
        "local: as many on this machine. Slurm, Kubernetes: such nodes exist",
        "submit (asks the scheduler)",
        "scaletrain_cli.launch.node_check:problems_of_node",
        f"count, model and free memory: {_NODE}, exit 5",
    ),
    _row("cluster.network", "a network of the catalogue", "known", _PLAN, "scaletrain_cli.plan:make_plan"),
    _row(f"{_SL}partition", "a partition", "there, takes jobs, admits this one", _SCHEDULER, _SLURM),
    _row(f"{_SL}account", "an account", "one that the user may charge", _SCHEDULER, _SLURM, "no accounting: sbatch"),
    _row(f"{_SL}qos", "a QOS", "one that the user may use", _SCHEDULER, _SLURM, "no accounting: sbatch"),
    _row(f"{_SL}reservation", "a reservation", "there, for this user", _SCHEDULER, _SLURM, "hidden ones: sbatch"),
    _row(f"{_SL}constraint", "node features", "nodes have them", _SCHEDULER, _SBATCH, "sbatch --test-only judges it"),
    _row(f"{_SL}exclude", "nodes", "enough others are left", _SCHEDULER, _SLURM),
    _row(f"{_SL}nodelist", "nodes", "there, in the partition", _SCHEDULER, _SLURM),
    _row(f"{_SL}licenses", "licenses", "there", _SCHEDULER, _SBATCH, "sbatch --test-only judges it"),
    _row(f"{_SL}gres_type", "a type of GPU", "enough nodes have it", _SCHEDULER, _SLURM),
    _row(f"{_SL}memory_per_node", "memory of the nodes", "enough nodes have it", _SCHEDULER, _SLURM),
    _row(
        f"{_SL}modules.*",
        "an environment module of the nodes",
        "nothing: login nodes may have others",
        "never before the start",
        "scaletrain_cli.launch.slurm_environment:module_lines",
        "the job script loads it before anything else and ends the job if that fails",
    ),
    _row(
        f"{_SL}activate",
        "a script of the nodes",
        "there, if its file system is seen here",
        _SUBMIT,
        f"{_HERE}activate_problems",
        "the job script sources it before anything else and ends the job if that fails",
    ),
    _row(
        f"{_SL}container.image",
        "an image",
        "a file: there, if its file system is seen here",
        _SUBMIT,
        f"{_HERE}container_problems",
        "a name in a registry: srun or apptainer on the nodes",
    ),
    _row(
        f"{_SL}container.mounts.*",
        "folders of the nodes",
        "there, if their file system is seen here",
        _SUBMIT,
        f"{_HERE}container_problems",
        "srun or apptainer on the nodes",
    ),
    _row(
        f"{_SL}container.python",
        "an interpreter of the image",
        "nothing: only the image has it",
        "never before the start",
        "scaletrain_cli.launch.slurm_container:agent_words",
        "srun on the nodes",
    ),
    _row(f"{_SL}extra.*", "whatever the option names", "accepted", _SCHEDULER, _SBATCH, "sbatch --test-only judges it"),
    _row(
        f"{_K8S}context",
        "a context of the kubeconfig",
        "there",
        _SCHEDULER,
        "scaletrain_cli.launch.kubernetes.api:connect",
    ),
    _row(f"{_K8S}namespace", "a namespace", "there", _SCHEDULER, _KUBERNETES, f"no right to look: {_API}"),
    _row(
        f"{_K8S}backend",
        "the kind of object",
        "the cluster serves it",
        _SCHEDULER,
        _KUBERNETES,
    ),
    _row(
        f"{_K8S}queue",
        "a LocalQueue, or Volcano's queue",
        "there, active, with a quota that can hold the run",
        _SCHEDULER,
        f"{_CAPACITY}queue_room",
        "no right to look: a note says so",
    ),
    _row(f"{_K8S}priority", "a priority class of the queue", "there", _SCHEDULER, f"{_EXISTENCE}priority"),
    _row(f"{_K8S}pod_priority", "a PriorityClass", "there", _SCHEDULER, f"{_EXISTENCE}pod_priority"),
    _row(
        f"{_K8S}image",
        "an image in a registry",
        "given; named by digest, or a note",
        _SCHEDULER,
        _KUBERNETES,
        f"only the nodes pull it: {_PLACED}",
    ),
    _row(f"{_K8S}pull_secrets.*", "a Secret", "there", _SCHEDULER, f"{_EXISTENCE}secrets", "no right to look: a note"),
    _row(f"{_K8S}service_account", "a ServiceAccount", "there", _SCHEDULER, f"{_EXISTENCE}service_account"),
    _row(
        f"{_K8S}runs.claim", "a PersistentVolumeClaim", "there, bound, ReadWriteMany", _SCHEDULER, f"{_EXISTENCE}claims"
    ),
    _row(f"{_K8S}runs.path", "nothing: a path in the pods", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        f"{_K8S}runs.sub_path",
        "a folder of the volume",
        "nothing: only the nodes see it",
        "never before the start",
        "scaletrain_cli.launch.kubernetes.pod_agent:run_pod",
        "the kubelet makes it; pod 0 puts the run directory there",
    ),
    _row(f"{_K8S}volumes.*.claim", "a PersistentVolumeClaim", "there, bound", _SCHEDULER, f"{_EXISTENCE}claims"),
    _row(f"{_K8S}volumes.*.path", "nothing: a path in the pods", "-", _LOAD, "scaletrain_cli.spec.loading:load_spec"),
    _row(
        f"{_K8S}volumes.*.sub_path",
        "a folder of the volume",
        "nothing: only the nodes see it",
        "never before the start",
        f"{_HERE}check_on_node",
        f"what the spec names below it: {_NODE}",
    ),
    _row(f"{_K8S}secrets.*.secret", "a Secret", "there", _SCHEDULER, f"{_EXISTENCE}secrets", "no right: a note"),
    _row(f"{_K8S}secrets.*.key", "a key of it", "there", _SCHEDULER, f"{_EXISTENCE}secrets", "no right: a note"),
    _row(f"{_K8S}gpu_resource", "a device plugin", "enough nodes offer it", _SCHEDULER, f"{_CAPACITY}node_room"),
    _row(f"{_K8S}rdma_resource", "a device plugin", "enough nodes offer it", _SCHEDULER, f"{_CAPACITY}node_room"),
    _row(f"{_K8S}gpu_product", "a label of nodes", "enough nodes have it", _SCHEDULER, f"{_CAPACITY}node_room"),
    _row(f"{_K8S}node_selector.*", "a label of nodes", "enough nodes have it", _SCHEDULER, f"{_CAPACITY}node_room"),
    _row(f"{_K8S}tolerations.*.key", "a taint", "nothing: one that no node has is harmless", "never", _KUBERNETES),
    _row(f"{_K8S}tolerations.*.value", "a taint's value", "nothing: as the key", "never", _KUBERNETES),
    _row(
        f"{_K8S}topology.key",
        "a label of nodes",
        "accepted by the queue's admission",
        _SCHEDULER,
        _KUBERNETES,
        _PLACED,
    ),
)


@dataclass(frozen=True)
class Findings:
    """``problems`` keep the run from starting; ``notes`` name what could not be checked from here."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """From where a spec is looked at.

    ``folder``: what its relative paths are relative to. ``code``: the files kept of code.path, None where they were not
    taken. ``begun``: a checkpoint was committed, so that no first weights are read. ``on_node``: as the ranks see it.
    ``secrets``: names whose values the run directory holds.
    """

    spec: RunSpec
    folder: Path
    environment: Mapping[str, str]
    code: Collection[str] | None = None
    begun: bool = False
    on_node: bool = False
    secrets: Collection[str] = ()

    def problem(self, key: str, message: str, given: object, hint: str) -> Problem:
        return Problem(self.spec.where(key), key, message, str(given), hint)

    def unseen(self, path: str) -> str:
        """Where the ranks look for ``path``, if this machine cannot see that place; empty if it can."""
        cluster = self.spec.cluster
        if self.on_node or cluster.scheduler == "local":
            return ""
        if cluster.scheduler == "kubernetes":
            return "in the pods"
        place = PurePosixPath(self.folder / Path(os.path.expanduser(path)))
        if cluster.slurm.container is not None:
            seen = [mount.split(":")[:2] for mount in cluster.slurm.container.mounts]
            if not any(len(set(mount)) == 1 and place.is_relative_to(mount[0]) for mount in seen):
                return "in the container"
        beside_the_submitter = not Path(os.path.expanduser(path)).is_absolute()
        if beside_the_submitter or os.path.lexists(place) or _is_shared(place):
            return ""
        return "on the nodes"


def check_external(
    spec: RunSpec,
    folder: str | Path = "",
    *,
    code: Collection[str] | None = None,
    begun: bool = False,
    secrets: Collection[str] = (),
) -> Findings:
    """Look at everything that this machine can see. Touches nothing. ``folder`` as in View; by default the current one.

    Raises no error: the caller decides what problems mean.
    """
    view = View(spec, Path(folder or os.getcwd()), os.environ, code, begun, secrets=secrets)
    problems = tuple(dict.fromkeys(found for check in _CHECKS for found in check(view)))
    return Findings(problems, (*_not_checked(view), *_not_read(view)))


def require_external(spec: RunSpec, snapshot: Snapshot | None) -> tuple[str, ...]:
    """Check a new run, with the code that was taken; return notes. Raises UsageError with all problems."""
    return _require(check_external(spec, code=None if snapshot is None else paths_in(snapshot.listing)))


def require_external_to_resume(run: RunDir, record: RunRecord, snapshot: Snapshot | None = None) -> tuple[str, ...]:
    """Check a run to resume, with code taken anew or that kept with it; return notes. Raises UsageError."""
    code = None if snapshot is None else paths_in(snapshot.listing)
    if code is None and record.code is not None:
        with contextlib.suppress(OSError):  # place_code tells on the node
            listing = code_file(run, record.code, "sha256").read_bytes()
            code = paths_in(listing.decode("utf-8", "surrogateescape"))
    found = check_external(
        record.spec,
        record.working_folder,
        code=code,
        begun=has_committed(run),
        secrets=record.spec.secret_env if run.secrets.is_file() else (),
    )
    return _require(found)


def _require(found: Findings) -> tuple[str, ...]:
    if found.problems:
        count = "something" if len(found.problems) == 1 else f"{len(found.problems)} things"
        raise UsageError(f"the run spec names {count} that the run could not use", found.problems)
    return found.notes


def check_on_node(run: RunDir, record: RunRecord, node_rank: int, code_folder: Path | None) -> None:
    """The same on a node of the job, from the run's working folder, before any rank is started.

    Raises UsageError (exit 2) where it was the spec that named what is not there, and WrongNodesError (exit 5) where
    other nodes may have it: on Slurm, and after a checkpoint, up to which all of it was there.
    """
    spec, begun = record.spec, has_committed(run)
    view = View(spec, Path.cwd(), os.environ, None, begun, on_node=True)
    checks = [weights_problems, checkpoint_problems]
    if (
        node_rank == 0 or (Path(os.path.expanduser(spec.data.source)) / "dataset.json").is_file()
    ):  # its first rank prepares
        checks += [source_problems, tokenizer_problems]
    problems = [found for check in checks for found in check(view)]
    if code_folder is None and spec.code.engine is not None:
        problems += _installed_problems(view)
    if not problems:
        return
    message = "this node does not have what the run spec names"
    if begun or spec.cluster.scheduler == "slurm":
        raise WrongNodesError(message, tuple(problems))
    raise UsageError(message, tuple(problems))


def source_problems(view: View) -> Iterator[Problem]:
    """Yield what is wrong with ``data.source``, where this package's engine reads it."""
    source = view.spec.data.source
    if view.spec.code.engine is not None or source == PYTHON_STDLIB or view.unseen(_parent_of_glob(source)):
        return
    hint = f"Give {PYTHON_STDLIB}, a prepared dataset, or a path or glob of text files."
    prepared = view.folder / Path(os.path.expanduser(source))
    if (prepared / "dataset.json").is_file():
        if why := _prepared_problem(prepared, view.spec):
            yield view.problem("data.source", why, source, "Prepare it again with `scaletrain data prepare`.")
        return
    try:
        found = find_files(source, view.folder)
    except UsageError as error:
        what = error.message.partition(": ")[2].partition(". ")[0]
        yield view.problem("data.source", f"{what}.", source, hint)
        return
    for why in problems_of(found.files):
        yield view.problem("data.source", f"{why}.", source, "Repair the file, or leave it out of the source.")
    if why := _too_little_text(found.files, view.spec):
        yield view.problem("data.source", why, source, "Give more text, or a shorter model.seq_len.")
    here = view.spec.cluster.scheduler == "local"
    if here and any(kind_of(path) == "parquet" for path in found.files) and find_spec("pyarrow") is None:
        yield view.problem("data.source", "reading parquet needs pyarrow.", source, "Run pip install pyarrow.")


def _too_little_text(files: tuple[Path, ...], spec: RunSpec) -> str:
    """Return why plain files make no sequence: each trained token has at least a byte, and each document one more."""
    if any(path.suffix in (".parquet", ".gz") for path in files) or not isinstance(spec.model, ModelSpec):
        return ""
    try:
        size = sum(path.stat().st_size for path in files)
    except OSError:
        return ""
    if size == 0:
        return "holds no text."
    length = spec.model.seq_len
    if spec.data.tokenizer.kind == "file" or size + len(files) > length:
        return ""
    return f"holds {size} bytes, too few for one sequence of {length} tokens."


def tokenizer_problems(view: View) -> Iterator[Problem]:
    """Yield what is wrong with ``data.tokenizer.path``."""
    path = view.spec.data.tokenizer.path
    if view.spec.code.engine is not None or path is None or view.unseen(path):
        return
    why = tokenizer_problem(view.folder / Path(os.path.expanduser(path)), view.spec)
    if why:
        yield view.problem("data.tokenizer.path", f"{why}.", path, "Give a Hugging Face tokenizer.json.")


def tokenizer_problem(path: Path, spec: RunSpec) -> str:
    """Return what is wrong with a tokenizer.json; empty for a valid one."""
    from scaletrain_cli.spec.end_of_text import ENDS_OF_TEXT

    try:
        with open_to_read(path) as file:
            content = json.loads(file.read())
        model, added = content["model"], content.get("added_tokens") or []
        vocabulary = model["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
        ids = dict(pairs) | {str(token["content"]): int(token["id"]) for token in added}
        largest = max(ids.values())
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "is no tokenizer.json of Hugging Face tokenizers"
    if not any(name in ids for name in ENDS_OF_TEXT):
        return f"has no token that ends a document; one of {', '.join(ENDS_OF_TEXT)} is needed"
    if isinstance(spec.model, ModelSpec) and largest >= spec.model.vocab_size:
        return f"has token ids up to {largest}, and model.vocab_size is {spec.model.vocab_size}"
    return ""


def weights_problems(view: View) -> Iterator[Problem]:
    """Yield what is wrong with ``model.weights``; after the first checkpoint they are not read."""
    given = getattr(view.spec.model, "weights", None)
    if view.spec.code.engine is not None or given is None or view.begun or view.unseen(given):
        return
    folder = view.folder / Path(os.path.expanduser(given))
    if why := _weights_problem(folder):
        hint = "Give a folder with Hugging Face *.safetensors."
        yield view.problem("model.weights", f"{why}.", given, hint)
        return
    try:
        differing = list(config_mismatches(folder, view.spec.transformer))
    except UsageError as error:
        yield view.problem("model.weights", error.message.removeprefix("model.weights: "), given, "Give other weights.")
        return
    for problem in differing:
        message = f"its config.json has {problem.subject}, and {problem.message}"
        yield view.problem("model.weights", message, given, str(problem.hint))


def _weights_problem(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder" if folder.exists() else "does not exist"
    try:
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if not index.exists() and not (folder / "model.safetensors").exists():
            return "holds neither model.safetensors nor model.safetensors.index.json"
        if index.is_file():
            named = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
            if missing := sorted(name for name in named if not (folder / name).is_file()):
                return f"lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}, which its index names"
        for path in files:
            if why := _safetensors_problem(path):
                return f"{path.name}: {why}"
    except OSError as error:
        return f"cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "has an index that cannot be read"
    return ""


def _safetensors_problem(path: Path) -> str:
    """The header says how long the file is (github.com/huggingface/safetensors, Format)."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            return "is no safetensors file, or was cut off"
        try:
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "is no safetensors file"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"holds {size} bytes, and its header says {expected}"


def engine_problems(view: View) -> Iterator[Problem]:
    """Yield why ``code.engine`` or ``code.import_root`` is neither in the kept files of code.path nor installed."""
    code = view.spec.code
    if code.path is not None and view.code is None:
        return  # nothing was taken of the tree
    root = "" if code.import_root == "." else code.import_root.strip("/").removeprefix("./") + "/"
    kept = view.code or ()
    if code.path is not None and root and not any(path.startswith(root) for path in kept):
        message = f"what is kept of {code.path} has no such folder."
        yield view.problem("code.import_root", message, code.import_root, "Name one that git does not ignore.")
        return
    if code.engine is None or _module_in(kept, root + code.engine.replace(".", "/")):
        return
    yield from _installed_problems(view)


def _installed_problems(view: View) -> Iterator[Problem]:
    code, slurm = view.spec.code, view.spec.cluster.slurm
    engine = str(code.engine)
    other_python = slurm.activate is not None or slurm.modules or slurm.container is not None
    if not view.on_node and (view.spec.cluster.scheduler == "kubernetes" or other_python):
        if code.path is None:
            return  # an interpreter that is not seen here
    elif _is_installed(engine, view):
        return
    hint = "Commit its file, or set code.path and code.import_root to where it is."
    if engine.endswith(".py"):
        hint = f"It is the name of a module, not of a file: write {engine.removesuffix('.py').replace('/', '.')}."
    there = f"what is kept of {code.path} holds no such module, and it" if code.path is not None else "it"
    yield view.problem("code.engine", f"{there} is not installed.", engine, hint)


def _module_in(files: Collection[str], path: str) -> bool:
    return f"{path}.py" in files or f"{path}/__main__.py" in files


def _is_installed(module: str, view: View) -> bool:
    """Return whether ``python -m`` would find the module. Imports no parent package, which would run it."""
    first, *rest = module.split(".")
    try:
        found = find_spec(first)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    if found is not None and not places:
        return not rest and found.origin is not None
    searched = view.spec.env.get("PYTHONPATH", view.environment.get("PYTHONPATH", ""))  # as each rank gets it
    paths = (Path(entry) for entry in searched.split(os.pathsep) if entry)
    places += [view.folder / entry / first for entry in paths]
    for place in places:
        target = place.joinpath(*rest)
        if (target / "__main__.py").is_file() or (rest and target.with_name(f"{target.name}.py").is_file()):
            return True
    return not rest and any(place.with_name(f"{first}.py").is_file() for place in places)


def checkpoint_problems(view: View) -> Iterator[Problem]:
    """Yield why this user cannot write to ``checkpoint.dir``, or to its nearest existing parent."""
    given = view.spec.checkpoint.dir
    if given == "auto" or view.unseen(given):
        return
    folder = view.folder / Path(os.path.expanduser(given))
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        yield view.problem("checkpoint.dir", f"{there} is no folder.", given, "Name a folder.")
    elif not os.access(there, os.W_OK | os.X_OK):
        message = f"this user may not write {there}."
        yield view.problem("checkpoint.dir", message, given, "Name a folder of yours, or ask for the right.")


def secret_problems(view: View) -> Iterator[Problem]:
    """Yield each name of ``secret_env`` that is not set in this environment."""
    if view.spec.cluster.scheduler == "kubernetes":
        return
    for name in view.spec.secret_env:
        if name not in view.environment and name not in view.secrets:
            yield view.problem("secret_env", "is not set here.", name, "Export it before submitting.")


def wandb_problems(view: View) -> Iterator[Problem]:
    """Yield what keeps ``tracking.wandb`` with mode: online from logging."""
    from scaletrain_cli.launch.wandb_login import has_login

    spec, key = view.spec, "tracking.wandb.mode"
    if spec.tracking.wandb.mode != "online" or spec.code.engine is not None:
        return
    if spec.cluster.scheduler == "local" and find_spec("wandb") is None:
        hint = "Run pip install wandb, or set it to disabled."
        yield view.problem(key, "wandb is not installed here.", "online", hint)
    if has_login(spec, view.environment, view.folder):
        return
    where = {
        "kubernetes": "Add WANDB_API_KEY to secret_env and to cluster.kubernetes.secrets",
        "slurm": "Export WANDB_API_KEY and name it in secret_env, or run `wandb login`",
        "local": "Export WANDB_API_KEY, or run `wandb login`",
    }[spec.cluster.scheduler]
    hint = f"{where}; or set it to offline and send the files later with `wandb sync`."
    yield view.problem(key, "the run has no key of Weights & Biases.", "online", hint)


def activate_problems(view: View) -> Iterator[Problem]:
    """Yield why ``cluster.slurm.activate`` cannot be sourced."""
    path, key = view.spec.cluster.slurm.activate, "cluster.slurm.activate"
    if view.spec.cluster.scheduler == "slurm" and path is not None and _is_missing(path):
        yield view.problem(key, "there is no such file.", path, "Name the script that sets up Python on the nodes.")


def container_problems(view: View) -> Iterator[Problem]:
    """Yield missing files and folders of ``cluster.slurm.container``, where their file system is seen here."""
    container, key = view.spec.cluster.slurm.container, "cluster.slurm.container"
    if view.spec.cluster.scheduler != "slurm" or container is None:
        return
    if container.image.startswith("/") and _is_missing(container.image):
        yield view.problem(f"{key}.image", "there is no such file.", container.image, "Name an image.")
    for index, mount in enumerate(container.mounts):
        source = mount.partition(":")[0]
        if _is_missing(source):
            message = f"{source} does not exist."
            yield view.problem(f"{key}.mounts.{index}", message, mount, "Name a folder of the nodes.")


_CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    source_problems,
    tokenizer_problems,
    weights_problems,
    engine_problems,
    checkpoint_problems,
    secret_problems,
    wandb_problems,
    activate_problems,
    container_problems,
)


def _not_checked(view: View) -> Iterator[str]:
    """Yield a note for each place that this machine does not see, with the keys that name something there."""
    spec = view.spec
    own = spec.code.engine is not None
    paths = {
        "data.source": None if own or spec.data.source == PYTHON_STDLIB else spec.data.source,
        "data.tokenizer.path": None if own else spec.data.tokenizer.path,
        "model.weights": None if own or view.begun else getattr(spec.model, "weights", None),
        "checkpoint.dir": None if spec.checkpoint.dir == "auto" else spec.checkpoint.dir,
    }
    places: dict[str, list[str]] = {}
    for key, path in paths.items():
        if path is not None and (place := view.unseen(_parent_of_glob(path))):
            places.setdefault(place, []).append(f"{key} = {path}")
    for place, named in places.items():
        yield f"not checked here: {', '.join(named)}; looked for {place}. Each node checks it before it starts a rank."


def _not_read(view: View) -> Iterator[str]:
    """Files of a folder that no run would read."""
    source = view.spec.data.source
    if view.spec.code.engine is not None or source == PYTHON_STDLIB or view.unseen(_parent_of_glob(source)):
        return
    if (view.folder / Path(os.path.expanduser(source)) / "dataset.json").is_file():
        return
    with contextlib.suppress(UsageError):
        left_out = find_files(source, view.folder).not_read
        if left_out:
            kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(left_out.items()))
            yield f"data.source = {source}: these files are not read: {kinds}"


def _prepared_problem(folder: Path, spec: RunSpec) -> str:
    try:
        info = json.loads((folder / "dataset.json").read_bytes())
        width = {"uint16": 2, "uint32": 4}[info["dtype"]]
        for split in ("train", "validation"):
            found, said = (folder / f"{split}.bin").stat().st_size // width, info[f"{split}_tokens"]
            if found != said:
                return f"{split}.bin holds {found} tokens, and dataset.json says {said}."
        vocab_size, tokens = int(info["vocab_size"]), int(info["train_tokens"])
    except OSError as error:
        return f"is no complete prepared dataset: {error.filename}: {error.strerror or error}."
    except (ValueError, KeyError, TypeError):
        return "has a dataset.json that cannot be read."
    if isinstance(spec.model, ModelSpec) and vocab_size > spec.model.vocab_size:
        return f"has {vocab_size} token ids, and model.vocab_size is {spec.model.vocab_size}."
    if isinstance(spec.model, ModelSpec) and tokens <= spec.model.seq_len:
        return f"holds {tokens} tokens to train on, fewer than one sequence of {spec.model.seq_len}."
    return ""


def _parent_of_glob(source: str) -> str:
    """The part of a path before the first component with a wildcard."""
    if os.path.lexists(source):
        return source
    parts: list[str] = []
    for part in PurePosixPath(source).parts:
        if set(part) & set("*?["):
            break
        parts.append(part)
    return str(PurePosixPath(*parts)) if parts else "."


def _is_missing(path: str) -> bool:
    return not os.path.lexists(path) and _is_shared(PurePosixPath(path))


def _is_shared(path: PurePosixPath) -> bool:
    """Return whether nodes are taken to see at ``path`` what this machine does: not below folders of each host alone,
    nor below a top-level folder that is missing here."""
    own = ("/tmp", "/var", "/run", "/dev", "/proc", "/scratch", "/local", "/localscratch", "/opt", "/usr", "/etc")
    if any(path.is_relative_to(folder) for folder in own):
        return False
    return len(path.parts) < 2 or os.path.isdir(os.path.join("/", path.parts[1]))
