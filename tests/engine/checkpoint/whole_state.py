"""A checkpoint as whole matrices, saved by any layout; and one that is loaded and saved by another layout."""

import contextlib
import io
from pathlib import Path

import torch
from torch import Tensor

from scaletrain_cli.engine.checkpoint.shard_file import Slice, StateReader
from scaletrain_cli.engine.checkpoint.snapshot import WEIGHT
from scaletrain_cli.rundir.checkpoints import Checkpoint, read_checkpoint
from scaletrain_cli.worker.checkpoint_commit import open_attempt
from tests.engine.parity.layouts import assembled


def whole_state(folder: Path) -> dict[str, Tensor]:
    """Return every matrix of every kind, flat, as ``KIND/NAME``, and the counters of its optimizer."""
    checkpoint = read_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint), checkpoint
    reader = StateReader(folder, -1, (), checkpoint.files)
    shapes = {name: torch.Size(slices[0][1].whole_shape) for name, slices in sorted(reader._index.items())}
    trained = [name for name in shapes if any(reader.has(kind, name) for kind in reader.kinds - {WEIGHT})]
    counts = {f"counts/{name}": torch.tensor(list(reader.counts_of(name).values())) for name in trained}
    return counts | {
        f"{kind}/{name}": reader.read(kind, Slice(name, shape, None, 0, shape.numel()))
        for kind in reader.kinds
        for name, shape in shapes.items()
        if reader.has(kind, name)  # frozen parameters have no moments
    }


def save_again(path: Path, attempt: int, folder: Path) -> None:
    """On each rank: load a run's latest checkpoint in its present layout, and save it to another folder."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = assembled(path, attempt)
        begin = trainer.resume()
        trainer.checkpointer.folder = folder
        if trainer.context.rank == 0:
            open_attempt(folder, attempt)
        trainer.context.consensus.barrier()
        trainer.checkpointer.committed_step = None
        trainer.save(begin.step, wait=True)
