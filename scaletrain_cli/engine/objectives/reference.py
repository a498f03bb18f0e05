"""The log-probabilities of answers under the reference model: computed once, before step 1, and kept in the run.

The reference is the model with its first weights, so that no second model is in memory. Resumed attempts read the file
``reference/<split>``, or ``<split>-<source>`` for each of ``data.sources``: a line of JSON, then fp32 [pairs, 2], the
chosen answers first. It is replaced as a whole while it is computed, and an attempt that finds a part of it continues.
"""

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.data.batches import BatchReader, MicroBatch
from scaletrain_cli.engine.data.rows import JoinedRows, RowSequences
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, make_folder, replace_file
from scaletrain_cli.spec import RunSpec

logger = logging.getLogger(__name__)

SCHEMA = "scaletrain.reference/v1"
_WRITE_SECONDS = 15.0  # the most that a SIGKILL loses
# The largest difference of a log-probability from the one that was computed before, over its size, at step 0. In
# 16 bits the kernels, which may depend on the size of the batch, round differently.
_TOLERANCE = {"fp32": 1e-4, "tf32": 5e-3}
_TOLERANCE_16_BITS = 5e-2

Values = npt.NDArray[np.float32]


class ReferenceDataError(DoNotRequeueError):
    """The reference log-probabilities are missing, or are not those of the first weights (exit 93)."""

    failure_reason = "data"


def reference_key(spec: RunSpec, dataset: Sequence[str]) -> dict[str, Any]:
    """Return what the log-probabilities depend on; ``dataset``: the hashes of tokens, weights and templates."""
    model = spec.transformer.model_dump(mode="json")
    return {
        "dataset": list(dataset),
        "seq_len": spec.transformer.seq_len,
        "precision": spec.training.precision,
        "model": hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest(),
        "weights": _weights_key(spec),
    }


def _weights_key(spec: RunSpec) -> str:
    """Return a hash of the seed, or of names, sizes and times of the files in ``model.weights``."""
    if spec.transformer.weights is None:
        return f"seed {spec.training.seed}"
    folder = expand_home(spec.transformer.weights)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(folder), seen]).encode()).hexdigest()


@dataclass(frozen=True)
class ReferenceFile:
    """The log-probabilities of the first pairs of a split: ``values`` [computed pairs, 2]."""

    key: dict[str, Any]
    pairs: int
    values: Values

    @property
    def is_complete(self) -> bool:
        return len(self.values) == self.pairs

    def write(self, path: Path) -> None:
        """Write the file with one rename. Raises OSError."""
        data = self.values.astype("<f4").tobytes()
        header = {"schema": SCHEMA, "key": self.key, "pairs": self.pairs, "sha256": hashlib.sha256(data).hexdigest()}
        make_folder(path.parent)
        replace_file(path, json.dumps(header | {"seal": _seal_of(header)}).encode() + b"\n" + data)

    @classmethod
    def read(cls, path: Path) -> "ReferenceFile | None":
        """Return the file; None if there is none, if header or values lack their hash, or with too many values."""
        try:
            line, _, data = path.read_bytes().partition(b"\n")
            header = json.loads(line)
            seal = header.pop("seal", None)
            if header["schema"] != SCHEMA or header["sha256"] != hashlib.sha256(data).hexdigest():
                return None
            if seal != _seal_of(header):
                return None
            key, pairs = header["key"], header["pairs"]
            values = np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, 2)
            if not isinstance(key, dict) or type(pairs) is not int or len(values) > pairs:
                return None
            return cls(key, pairs, values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _seal_of(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ReferencePass:
    """Computes or reads the log-probabilities of one rank's splits. Methods are collective.

    ``datasets``: the hashes of each source by its name, as of ``reference_key``, in the order of the spec.
    ``goes_on``: called between micro-batches; False on every rank after a preemption signal.
    """

    context: RankContext
    mesh: Mesh
    stepper: Stepper
    datasets: Mapping[str, Sequence[str]]
    goes_on: Callable[[], bool]

    def with_reference(
        self, reader: BatchReader, split: str, step: int, source: str | None = None
    ) -> BatchReader | None:
        """Return the reader with the log-probabilities of its pairs; None after a preemption signal.

        ``source``: whose pairs the reader has; None: those of all sources. Raises ReferenceDataError if the run has
        trained ``step`` > 0 steps and a file is missing: the weights are no longer the reference.
        """
        samples = reader.sequences
        assert isinstance(samples, JoinedRows | RowSequences)
        parts = samples.sources if isinstance(samples, JoinedRows) else (samples,)
        values = [np.zeros((samples.first, 2), np.float32)]
        for name, part in zip([source] if source else self.datasets, parts, strict=True):
            path = self.context.run.reference / (f"{split}-{name}" if self.context.spec.data.sources else split)
            computed = self._values(replace(reader, sequences=part), path, self.datasets[name], step)
            if computed is None:
                return None
            values.append(computed)
        return replace(reader, reference=np.concatenate(values))

    def _values(self, reader: BatchReader, path: Path, dataset: Sequence[str], step: int) -> Values | None:
        """Return the values of all pairs of one source, read or computed; None after a preemption signal."""
        pairs = len(reader)
        # Files of the weights may be gone once a checkpoint has replaced them.
        key = reference_key(self.context.spec, dataset) if step == 0 and self._leads else {"dataset": list(dataset)}
        file = ReferenceFile.read(path) if self._leads else None
        is_same = file is not None and file.pairs == pairs and key.items() <= file.key.items()
        known = self._shared(file.values if file is not None and is_same else None)
        if len(known) == pairs:
            return known
        if step > 0:
            raise ReferenceDataError(Reason("engine.reference-missing", {"path": str(path), "step": step}))
        return self._compute(reader, known, ReferenceFile(key, pairs, known), path)

    def check(self, batches: Sequence[MicroBatch]) -> None:
        """Compare the reference of a batch with the model at step 0. Raises ReferenceDataError if they differ."""
        worst = 0.0
        for batch, computed in zip(batches, self.stepper.log_probabilities(batches), strict=False):
            assert batch.reference is not None
            difference = (computed - batch.reference).abs() / batch.reference.abs().clamp(min=1.0)
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf).max()))
        worst = -self.context.long_consensus.least(-worst)
        allowed = _TOLERANCE.get(self.context.spec.training.precision, _TOLERANCE_16_BITS)
        if worst > allowed:
            params = {"folder": str(self.context.run.reference), "difference": worst, "allowed": allowed}
            raise ReferenceDataError(Reason("engine.reference-differs", params))

    @property
    def _leads(self) -> bool:
        return torch.distributed.get_rank() == 0

    def _shared(self, values: Values | None) -> Values:
        """Return the values of rank 0 on every rank."""
        text = self.context.long_consensus.follow_rank_zero("" if values is None else values.tobytes().hex())
        shared: Values = np.frombuffer(bytes.fromhex(text), np.float32).reshape(-1, 2).copy()
        return shared

    def _compute(self, reader: BatchReader, known: Values, file: ReferenceFile, path: Path) -> Values | None:
        """Return the values of all pairs, of which the first are known; None after a preemption signal."""
        layout, pairs = reader.layout, file.pairs
        values = np.concatenate([known, np.zeros((pairs - len(known), 2), np.float32)])
        width = layout.micro_batch_size * layout.data_parallel
        if self._leads:
            logger.info(
                "computing reference log-probabilities of %s: %d of %d pairs", path.name, pairs - len(known), pairs
            )
        began = written = time.monotonic()
        rounds = iter(range(len(known), pairs, width))
        done = len(known)
        # As many micro-batches at a time as a training step has, so that a pipeline is filled as well.
        while starts := list(itertools.islice(rounds, layout.gradient_accumulation_steps)):
            if not self.goes_on():
                if self._leads:
                    replace(file, values=values[:done]).write(path)
                return None
            parts = self.context.long_consensus.gather(self._part(reader, starts, pairs))
            done = min(starts[-1] + width, pairs)
            for numbers, chosen, rejected in parts or ():
                values[numbers, 0], values[numbers, 1] = chosen, rejected
            if self._leads and (done == pairs or time.monotonic() - written > _WRITE_SECONDS):
                replace(file, values=values[:done]).write(path)
                written = time.monotonic()
        if self._leads:
            logger.info("reference log-probabilities of %s: %.1f s", path.name, time.monotonic() - began)
        return self._shared(values if self._leads else None)

    def _part(self, reader: BatchReader, starts: list[int], pairs: int) -> tuple[list[int], list[float], list[float]]:
        """Return the numbers of pairs that this rank reports, and the log-probabilities of their answers.

        A round holds pairs ``start`` to ``start`` + micro_batch_size x data_parallel; the last pair stands in for
        those beyond the end.
        """
        size = reader.layout.micro_batch_size
        indices = [[start + self.mesh.data.rank * size + offset for offset in range(size)] for start in starts]
        batches = reader.read([[min(index, pairs - 1) for index in batch] for batch in indices])
        by_batch = self.stepper.log_probabilities([batch.to(self.context.device) for batch in batches])
        numbers: list[int] = []
        answers: list[Tensor] = []
        if self.mesh.tensor.rank == self.mesh.parts.rank == 0:  # others have the same values
            for batch, rows in zip(indices, by_batch, strict=False):
                within = [index for index in batch if index < pairs]
                numbers += within
                answers.append(rows.view(2, size)[:, : len(within)].cpu())
        if not answers:
            return [], [], []
        chosen, rejected = torch.cat(answers, dim=1).tolist()
        return numbers, chosen, rejected
