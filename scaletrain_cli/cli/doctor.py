"""`scaletrain doctor`: check packages, hardware, schedulers and disk of this machine."""

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.backends.base import Check
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.node.gpu_health import NodeHealth, gpu_notes, gpu_problems, query_driver
from scaletrain_cli.plugins import (
    BACKENDS,
    DRILLS,
    GROUPS,
    MODEL_FAMILIES,
    OPTIMIZERS,
    TRACKERS,
    VERBS,
    PluginError,
    plugins,
)
from scaletrain_cli.project_files import project_file
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec.backend_traits import backend_names
from scaletrain_cli.text import binary_bytes_text, bytes_text, listed
from scaletrain_cli.ui.json import print_json

_FEW_BYTES = 20 * 10**9  # a few checkpoints of a small model
_SMALL_SHARED_MEMORY_BYTES = 2**30  # Docker's default of 64 MiB makes NCCL and data loaders fail

_CORE = ("typer", "rich", "pydantic", "ruamel.yaml")
_EXTRAS = {
    "train": (("torch", "deepspeed", "numpy", "tokenizers"), "to train on this machine"),
    "slurm": (("submitit",), "for the probe that checks Slurm nodes"),
    "k8s": (("kubernetes",), "to submit to Kubernetes"),
    "wandb": (("wandb",), "for the tracker wandb (Weights & Biases)"),
    "tensorboard": (("tensorboard",), "for the tracker tensorboard"),
    "mlflow": (("mlflow",), "for the tracker mlflow"),
}
# Number of leading version parts compared with the tested version: minor versions of torch and DeepSpeed matter.
_COMPARED_PARTS = {"torch": 2, "deepspeed": 2}


def checks(runs_root: Path) -> Iterator[Check]:
    """Yield all checks, the cheapest first."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    yield Check("cores", "ok", f"{usable}" if usable == present else f"{usable} of {present}")
    yield _memory()
    yield _shared_memory()
    yield from _gpus()
    yield from _compilers()
    for name in backend_names():
        try:
            yield from backend_for(name).checks()
        except (Exception, SystemExit) as error:  # code of another package may raise any exception
            yield Check(name, "warn", "the back end cannot be used", str(error) or type(error).__name__)
    yield from _plugins()
    yield _runs_root(runs_root)


def _plugins() -> Iterator[Check]:
    """Yield a line for each plug-in of another package, except for back ends that can be used: they have their own."""
    from scaletrain_cli.cli import app
    from scaletrain_cli.launch import drill
    from scaletrain_cli.spec import backend_traits, extensions
    from scaletrain_cli.spec.run import FAMILIES
    from scaletrain_cli.tracking import registry

    groups: dict[str, tuple[Collection[str], Callable[[str], object] | None]] = {
        BACKENDS: (backend_traits.BUILT_IN, None),
        TRACKERS: (registry.BUILT_IN, registry.tracker_class),
        OPTIMIZERS: (extensions.BUILT_IN_OPTIMIZERS, extensions.optimizer_extension),
        MODEL_FAMILIES: (FAMILIES, extensions.model_family_extension),
        VERBS: (app.BUILT_IN, app.module_of),
        DRILLS: (drill.KINDS, drill.drill_kind),
    }
    for group, (built_in, load) in groups.items():
        for plugin in plugins(group).values():
            origin = f"{GROUPS[group]} of the package {listed(plugin.packages)}"
            if plugin.name in built_in:
                advice = f"ignored, because a built-in {GROUPS[group]} has this name; rename the entry point"
                yield Check(plugin.name, "warn", origin, advice)
            elif load is not None:
                try:
                    load(plugin.name)
                    yield Check(plugin.name, "ok", origin)
                except PluginError as error:
                    yield Check(plugin.name, "warn", origin, str(error))


def _packages() -> Iterator[Check]:
    yield Check("scaletrain", "ok", ", ".join(f"{name} {version(name)}" for name in _CORE))
    text = project_file("constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.MULTILINE))
    for extra, (names, purpose) in _EXTRAS.items():
        present, missing = [], []
        hidden = [where for name in names if (where := _hidden_by(name)) is not None]
        for name in names:
            if (installed := _distribution(name)) is None:
                missing.append(name)
            else:
                present.append(f"{name} {installed.version}")
        text = ", ".join([*present, *(f"no {name}" for name in missing)])
        untested = [f"{name} {expected}" for name in names if (expected := _untested(name, tested))]
        if missing:
            yield Check(f"[{extra}]", "none", text, f"{purpose}: {install_command(extra)}")
        elif hidden:
            advice = f"another package of this name is imported: {listed(hidden)}; check PYTHONPATH"
            yield Check(f"[{extra}]", "warn", text, advice)
        elif untested:
            yield Check(f"[{extra}]", "warn", text, f"tested with {', '.join(untested)}: {install_command(extra)}")
        else:
            yield Check(f"[{extra}]", "ok", text)


def _distribution(name: str) -> Distribution | None:
    """Return the installed distribution of a package; that of MLflow has another name, too."""
    for one in (name, f"{name}-skinny"):
        with contextlib.suppress(PackageNotFoundError):
            return distribution(one)
    return None


def _hidden_by(name: str) -> str | None:
    """Return the file that an import of an installed package finds in its place, as by PYTHONPATH; None if none."""
    installed, spec = _distribution(name), find_spec(name)
    if installed is None or spec is None or spec.origin is None:
        return None
    own = Path(str(installed.locate_file(""))).resolve()
    return None if Path(spec.origin).resolve().is_relative_to(own) else spec.origin


def _untested(name: str, tested: dict[str, str]) -> str | None:
    """Return the tested version of an installed package where the installed one may behave differently, else None."""
    if (distribution := _distribution(name)) is None:
        return None
    parts = _COMPARED_PARTS.get(name, 1)
    expected = tested.get(name, distribution.version)
    return expected if expected.split(".")[:parts] != distribution.version.split(".")[:parts] else None


def _memory() -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        if (limit := int(Path("/sys/fs/cgroup/memory.max").read_text())) < total:
            return Check("memory", "ok", f"{binary_bytes_text(limit)} allowed of {binary_bytes_text(total)}")
    return Check("memory", "ok", binary_bytes_text(total))


def _shared_memory() -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Check("/dev/shm", "warn", "none", "ranks of one node communicate through it; mount a tmpfs")
    if size < _SMALL_SHARED_MEMORY_BYTES:
        return Check(
            "/dev/shm", "warn", binary_bytes_text(size), "too small for NCCL; give the container --shm-size=8g"
        )
    return Check("/dev/shm", "ok", binary_bytes_text(size))


def _gpus() -> Iterator[Check]:
    """Yield one check per NVIDIA GPU that the driver reports, or the reason why there is none."""
    if (health := query_driver()) is None:
        yield Check("gpu", "none", "no NVIDIA driver", "use cluster.gpu: cpu to train on CPU cores")
        return
    if health.note:
        yield Check("gpu", "none", "unknown", f"nvidia-ml-py is not installed: {install_command('train')}")
    for gpu in health.gpus:
        memory = "unknown memory" if gpu.memory_bytes is None else binary_bytes_text(gpu.memory_bytes)
        problems = [*gpu_problems(NodeHealth(), [gpu], needed_bytes=0), *gpu_notes([gpu])]
        summary = f"{gpu.name}, {memory}, driver {health.driver}"
        yield Check(f"gpu {gpu.index}", "warn" if problems else "ok", summary, "; ".join(map(str, problems)))
    if health.trouble:
        yield Check("gpu", "warn", "the NVIDIA driver reports an error", health.trouble)
    elif not health.gpus and not health.note:
        yield Check("gpu", "none", f"no GPU, driver {health.driver}", "use cluster.gpu: cpu to train on CPU cores")


def _compilers() -> Iterator[Check]:
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    advice = (
        f"DeepSpeed compiles its own kernels (offload) with {' and '.join(missing)}; install them" if missing else ""
    )
    paths = ", ".join(path for name in ("g++", "ninja") if (path := shutil.which(name))) or "neither g++ nor ninja"
    yield Check("compiler", "none" if missing else "ok", paths, advice)


def _runs_root(root: Path) -> Check:
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Check("runs", "warn", str(root), "not writable; set $SCALETRAIN_RUNS to a folder shared by all nodes")
    usage, inodes = shutil.disk_usage(existing), os.statvfs(existing).f_favail
    summary = f"{root}, {bytes_text(usage.free)} free of {bytes_text(usage.total)}"
    if usage.free < _FEW_BYTES:
        return Check(
            "runs",
            "warn",
            summary,
            "too little space for checkpoints; set $SCALETRAIN_RUNS to a folder on a larger disk",
        )
    if 0 < inodes < 100_000:
        return Check(
            "runs",
            "warn",
            f"{summary}, {inodes:,} free inodes",
            "too few inodes; set $SCALETRAIN_RUNS to a folder on another disk",
        )
    return Check("runs", "ok", summary)


EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(as_json: AsJson = False) -> None:
    """Check this machine: packages, cores, memory, GPUs, compilers, schedulers, disk.

    WARN marks a problem; a dash marks something that is missing and may not be needed.
    With --json: {"checks": [{"name", "state", "found", "advice"}]}; state is ok, warn or none.
    """
    findings = checks(runs_root())
    if as_json:
        print_json({"checks": [vars(check) for check in findings]})
        return
    from scaletrain_cli.ui.tables import show_checks

    show_checks((check.name, check.state, check.found, check.advice) for check in findings)
