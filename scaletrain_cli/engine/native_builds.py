"""Build DeepSpeed's native operators so that a killed build cannot hold up those that come after. Knows no training.

torch marks a build with a file named ``lock`` beside its output, which whoever comes second waits to see gone
(torch/utils/file_baton.py); when the builder is killed, for ever. We build under a lock of the kernel's, which goes
with its owner. Who holds that and still finds a ``lock`` that no process has open has found a dead builder's.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

from scaletrain_cli.errors import UsageError
from scaletrain_cli.safe_files import locked, make_folder


def load_async_io() -> None:
    """What NVMe offload reads and writes with; minutes the first time. Raises UsageError where it cannot be built."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise UsageError(
            "layout.offload_device = nvme: DeepSpeed's async_io operator needs libaio with its headers and a C++ "
            "compiler on every node (Debian: apt-get install libaio-dev g++). Or offload to cpu."
        )
    load_operator(builder)


def load_operator(builder: Any) -> None:
    """Build a DeepSpeed operator (its ``OpBuilder``) or load what was built before; DeepSpeed then finds it loaded."""
    with sole_builder(extensions_folder()):
        builder.load()


def extensions_folder() -> Path:
    """Where torch builds, in folders of folders: $TORCH_EXTENSIONS_DIR, or the user's cache."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


@contextmanager
def sole_builder(folder: Path) -> Generator[None]:
    """Within, no other process of ours builds in this folder, and nothing there waits for a build that has died."""
    make_folder(folder)
    with locked(folder / ".scaletrain-builds"):
        for lock in folder.rglob("lock"):
            if not _is_open(lock):
                lock.unlink(missing_ok=True)
        yield


def _is_open(path: Path) -> bool:
    """Whether a process on this node that we may look at has the file open, as a living builder has."""
    wanted = path.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = descriptor.stat()
        except OSError:  # gone meanwhile, or not ours
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
