"""Open the sequences that a run trains on and validates on, by their sources."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scaletrain_cli.data.images.compatibility import caption_tokenizer_digest
from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.stages import recorded_changes
from scaletrain_cli.engine.data.batches import BatchReader, Pixels, padded_to
from scaletrain_cli.engine.data.dataset import DatasetInfo, JoinedSequences, TextSequences
from scaletrain_cli.engine.data.prepared import open_data_of
from scaletrain_cli.engine.data.row_dataset import find_datasets
from scaletrain_cli.engine.data.rows import JoinedRows, RowSamples, RowSequences
from scaletrain_cli.engine.data.sample_order import SampleOrder
from scaletrain_cli.engine.metrics.reporting import report_event
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.plan.data_size import ENOUGH_TO_VALIDATE, validation_from_training
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.journal import has_committed, read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.shared_datasets import (
    datasets_file,
    entries_of,
    owner_of_dataset,
    read_entries,
    record_datasets,
    recorded_folders,
)
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT

if TYPE_CHECKING:
    from scaletrain_cli.engine.data.images.opening import ImagesInfo  # which needs Pillow

_HELD_BACK = "validation-held-back"


class Samples(Protocol):
    """The sequences, rows or images of a split of a source."""

    def __len__(self) -> int: ...

    def part(self, first: int, count: int) -> Any:
        """Return ``count`` of them from ``first`` on."""
        ...


class Reader(Protocol):
    """Reads the batches of one rank from one or several sources."""

    def __len__(self) -> int: ...

    def batch(self, number: int) -> Any:
        """Return this rank's part of the global batch with this number (1-based)."""
        ...

    def without_groups(self) -> Any:
        """Return a reader of the same batches without process groups, which another process can get as a pickle."""
        ...

    def in_order(self, count: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of an evaluation of the first ``count`` samples."""
        ...


@dataclass(frozen=True)
class RunData:
    """The sources of a run by name, in the order of the spec.

    Sequences that are held back from training for validation are in ``validation`` only. ``caption_tokenizer``: the
    SHA-256 of the tokenizer.json that encodes captions, None without captions. ``zero_shot``: the folder of the images
    of ``evaluation.zero_shot``.
    """

    infos: "Mapping[str, DatasetInfo | ImagesInfo]"
    train: Mapping[str, Samples]
    validation: Mapping[str, Samples]
    caption_tokenizer: str | None = None
    zero_shot: Path | None = None

    @property
    def dataset(self) -> "DatasetInfo | ImagesInfo":
        """The first source."""
        return next(iter(self.infos.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of training sequences of each source."""
        return {name: len(sequences) for name, sequences in self.train.items()}

    @property
    def samples(self) -> Samples:
        """The training samples of all sources, one after another."""
        sources = tuple(self.train.values())
        if texts := tuple(source for source in sources if isinstance(source, TextSequences)):
            return JoinedSequences(texts) if len(texts) > 1 else texts[0]
        if rows := [source for source in sources if isinstance(source, RowSequences)]:
            return JoinedRows.of(rows) if len(rows) > 1 else rows[0]
        from scaletrain_cli.engine.data.images.opening import ImageSamples, JoinedImages  # which needs Pillow

        return JoinedImages(tuple(source for source in sources if isinstance(source, ImageSamples)))

    def to_checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint states about the data that it was trained on."""
        entries: dict[str, Any] = {"dataset": self.dataset.fingerprint, "dataset_seal": self.dataset.seal}
        if len(self.infos) > 1:
            entries["sources"] = {name: info.fingerprint for name, info in self.infos.items()}
        if self.caption_tokenizer is not None:
            entries["caption_tokenizer"] = self.caption_tokenizer
        return entries

    def require_same(self, checkpoint: str, saved: Mapping[str, Any], trained: Collection[str]) -> None:
        """Raise UsageError if a source of the checkpoint is not here, or is another dataset. Others may be new.

        ``trained``: names of the sources that gave samples before the checkpoint; others may be gone.
        """
        sources = saved.get("sources") or {next(iter(self.infos)): saved["dataset"]}
        for name, fingerprint in sources.items():
            if name not in self.infos:
                if name not in trained:
                    continue
                raise UsageError(Reason("data.source-gone", {"source": name}))
            if fingerprint != self.infos[name].fingerprint:
                params = {"checkpoint": checkpoint, "saved": fingerprint[:12]}
                params["found"] = self.infos[name].fingerprint[:12]
                raise UsageError(Reason("engine.data-of-checkpoint-differs", params))
        if (saved.get("dataset_seal") or self.dataset.seal) != self.dataset.seal:
            raise UsageError(Reason("engine.data-was-edited", {"checkpoint": checkpoint}))


def open_data(run: RunDir, record: RunRecord, ranks: Ranks, consensus: RankConsensus) -> RunData:
    """Find the prepared data on rank 0, open them on every rank, and return them. Collective.

    Raises UsageError on every rank if the data cannot be prepared or are too small to validate on, and another
    ScaletrainError for what may pass, such as a store that does not answer.
    """
    spec, begun = record.spec, False
    folders: dict[str, Path] = {}
    problem: Reason | None = None
    may_pass = False
    if ranks.rank == 0:
        try:
            folders, begun = _folders(spec, run), has_committed(run)
            for folder in folders.values():
                if (owner := owner_of_dataset(folder)) is not None:
                    report_event(run, ranks.rank, "data-of-another-user", folder=str(folder), owner=owner)
        except ScaletrainError as error:
            problem = error.reason if error.reason and not error.problems else recorded(str(error))
            may_pass = error.exit_code == ExitCode.CRASHED
    folders, begun, problem, may_pass = consensus.follow_rank_zero((folders, begun, problem, may_pass))
    if problem is not None:
        raise ScaletrainError(problem) if may_pass else UsageError(problem)
    zero_shot = folders.pop(ZERO_SHOT, None)

    def held_back(source: str | None, *sizes: int) -> int:
        count = consensus.follow_rank_zero(
            sequences_held_back(run, record, *sizes, source=source) if ranks.rank == 0 else 0
        )
        if count < 0:
            raise UsageError(_too_little_to_validate(record, source, *sizes))
        return count

    share = (ranks.rank, ranks.world_size)  # of the files that this rank verifies
    if spec.cluster.kubernetes.runs.per_pod:  # each node has a copy of its own
        share = (ranks.local_rank, spec.cluster.gpus_per_node)
    data = open_splits(spec, folders, held_back, *share, begun=begun)
    copies = consensus.gather_everywhere({name: (info.fingerprint, info.seal) for name, info in data.infos.items()})
    if differing := [rank for rank, copy in enumerate(copies) if copy != copies[0]]:
        raise UsageError(
            Reason("engine.data-of-ranks-differ", {"folders": [*map(str, folders.values())], "ranks": differing})
        )
    return replace(data, caption_tokenizer=caption_tokenizer_digest(spec), zero_shot=zero_shot)


def open_splits(
    spec: RunSpec,
    folders: Mapping[str, Path],
    held_back: Callable[[str | None, int, int], int],
    rank: int = 0,
    ranks: int = 1,
    *,
    begun: bool,
) -> RunData:
    """Return the splits of each source in these folders. Raises UsageError and CorruptDataError.

    ``held_back``: returns how many training samples are moved to the validation split, given the name of the source,
    None for the only one, and the sizes of both splits.
    """
    opened: Mapping[str, tuple[DatasetInfo | ImagesInfo, Samples, Samples]]
    if is_of_images(spec):
        from scaletrain_cli.engine.data.images.opening import open_sources  # which needs Pillow

        opened = open_sources(spec, folders)
    else:
        texts = {name: open_data_of(spec, folder, rank, ranks, begun=begun) for name, folder in folders.items()}
        for name, (info, _, _) in texts.items():
            most = spec.language_model.vocab_size
            if info.vocab_size > most:
                params = {"folder": str(folders[name]), "token_ids": info.vocab_size, "vocab_size": most}
                raise UsageError(Reason("engine.vocabulary-too-large", params))
        _require_one_tokenizer(folders)
        opened = texts
    train: dict[str, Samples] = {name: split for name, (_, split, _) in opened.items()}
    validation: dict[str, Samples] = {name: split for name, (_, _, split) in opened.items()}
    for name in opened if spec.evaluation.every else ():
        size = len(train[name])
        count = held_back(name if len(opened) > 1 else None, size, len(validation[name]))
        if count > 0:
            train[name], validation[name] = train[name].part(0, size - count), train[name].part(size - count, count)
    return RunData({name: info for name, (info, _, _) in opened.items()}, train, validation)


def open_reader(
    spec: RunSpec, samples: Samples, layout: Layout, mesh: Mesh, order: SampleOrder | None = None
) -> Reader:
    """Return the reader of this rank's batches. ``order``: that of several sources in training. Raises UsageError."""
    if isinstance(samples, TextSequences | RowSamples):
        return BatchReader(
            samples,
            layout=layout,
            mesh=mesh,
            seed=spec.training.seed,
            mask_document_starts=spec.data.loss_mask == "document_starts",
            within_documents=spec.data.packing == "documents",
            padded_to=padded_to(layout),
            order=order,
            pixels=_pixels(spec),
        )
    from scaletrain_cli.engine.data.images.opening import ImageSamples, JoinedImages, image_reader

    assert isinstance(samples, ImageSamples | JoinedImages)
    return image_reader(spec, samples, layout, mesh, order)


def _pixels(spec: RunSpec) -> Pixels | None:
    """Return what decodes the images of rows; None for rows without images. Raises UsageError."""
    if not isinstance(spec.model, LlavaSpec):
        return None
    from scaletrain_cli.engine.data.images.reading import RowPixels  # which needs Pillow

    return RowPixels.of(spec)


def _folders(spec: RunSpec, run: RunDir) -> dict[str, Path]:
    """Return the folder of the prepared data of each source, by its name, and record them for later attempts.

    Raises UsageError if they are not prepared: the GPUs of a run do not wait for that. Raises OSError, too.
    """
    root, file = run.path.parent, datasets_file(run)
    known, gone = recorded_folders(spec, root, read_entries(file))
    try:
        if (folders := find_datasets(spec, root, known)) is None:
            paths = ", ".join(path for _, path in spec.data_paths())
            raise UsageError(Reason("data.run-not-prepared", {"paths": paths, "folder": str(root), "run": run.run_id}))
    except UsageError as error:
        if gone:
            params = {"folder": str(gone[0]), "run": run.run_id, "cause": error.reason or recorded(error.message)}
            error.explain(Reason("data.dataset-gone", params))
        raise
    with contextlib.suppress(OSError):  # a later attempt then looks the data up, as this one has
        record_datasets(file, entries_of(spec, root, folders))
    return folders


def _require_one_tokenizer(folders: Mapping[str, Path]) -> None:
    """Raise UsageError if two sources were prepared with different tokenizers."""
    digests = {name: _tokenizer_of(folder) for name, folder in folders.items()} if len(folders) > 1 else {}
    first, *others = [name for name, digest in digests.items() if digest is not None] or [""]
    if differing := [name for name in others if digests[name] != digests[first]]:
        raise UsageError(Reason("data.tokenizers-differ", {"first": first, "second": differing[0]}))


def _tokenizer_of(folder: Path) -> str | None:
    """Return the SHA-256 of the tokenizer of a dataset, as the dataset states it or of its file; None if unknown."""
    try:
        stated = json.loads((folder / "dataset.json").read_text(encoding="utf-8")).get("tokenizer")
        if isinstance(stated, dict):
            return str(stated["digest"])
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError):
        return None


def sequences_held_back(
    run: RunDir, record: RunRecord, train: int, validation: int, *, source: str | None = None
) -> int:
    """Return the number of ``train`` sequences to validate on, if the ``validation`` split is too small.

    The first attempt that needs them decides for all later attempts and layouts, and records it as an event. The
    number is that of ``held_back_of``.
    """
    decided, is_recorded = held_back_of(
        record.spec,
        record.plan.layout,
        list(read_events(run)),
        train,
        validation,
        source=source,
        begun=has_committed(run),
    )
    if decided > 0 and not is_recorded:
        named = {} if source is None else {"source": source}
        report_event(run, 0, _HELD_BACK, sequences=decided, of=train, **named)
    return decided


def held_back_of(
    spec: RunSpec,
    layout: Layout,
    events: Sequence[Mapping[str, Any]],
    train: int,
    validation: int,
    *,
    source: str | None,
    begun: bool,
) -> tuple[int, bool]:
    """Return the number of ``train`` sequences to validate on, and True if ``events`` of the run record it.

    The number is 0 if the ``validation`` split is large enough, and -1 if both are too small or if the run has
    ``begun``: it has a checkpoint that was trained on all sequences. ``source``: the name of the source, if there are
    several: then the number is the same in every layout, because a round of validation need not be full, except of
    preference pairs.
    """
    fills_rounds = source is None or spec.training.objective == "dpo"
    width = layout.micro_batch_size * layout.data_parallel if fills_rounds else 1
    first = spec.data.all_sources[0].name
    # An event without a name is of a time when the run had one source, the first of those that it has now.
    known = [
        int(event["sequences"])
        for event in events
        if event["event"] == _HELD_BACK
        and event.get("source", first) == (source or first)
        # A resume that failed may have recorded it of another source with this name.
        and (source is None or event.get("of", train) == train)
    ]
    if known:
        decided = known[-1]
        return (-1 if decided < width or train < 2 * decided else decided), True
    decided = validation_from_training(train, validation, layout.global_batch_size, width if fills_rounds else None)
    if not decided:
        return 0, False
    changes = recorded_changes(events)
    trained = {name for _, stages in changes for stage in stages for name in stage.shares} or {first}
    if begun and (source is None or source in trained):
        # Trained on all sequences: with fewer, each step would get another batch. What there is for validation fills
        # a part of a round.
        return (0 if validation and spec.training.objective != "dpo" else -1), False
    return decided, False


def _too_little_to_validate(record: RunRecord, source: str | None, train: int, validation: int) -> Reason:
    layout, spec = record.plan.layout, record.spec
    width = layout.micro_batch_size * layout.data_parallel if source is None or spec.training.objective == "dpo" else 1
    shown = spec.data.shown(source or spec.data.all_sources[0].name)
    if is_of_images(spec):
        counts = {"unit": spec.unit, "train": train, "validation": validation, "width": width}
        return Reason("engine.images-too-few-to-validate", counts | {"source": shown})
    params = {"source": shown, "train": train, "length": spec.language_model.seq_len, "validation": validation}
    return Reason("engine.data-too-small-to-validate", {**params, "width": width})


def sequences_validated(record: RunRecord, there: int, share: float | None, *, whole_rounds: bool = True) -> int:
    """Return the number of sequences that a source is validated on. ``there``: those of its validation split.

    ``share``: of the source in the validation loss, None for a single source. The number is the same in every layout
    with several sources; a single one fills whole rounds of micro-batches of all replicas if it can, and pairs always
    do. Without ``whole_rounds`` it is the same in every layout, too.
    """
    layout = record.plan.layout
    width = layout.micro_batch_size * layout.data_parallel
    wanted = record.spec.evaluation.batches * layout.global_batch_size
    if share is not None:
        wanted = max(min(ENOUGH_TO_VALIDATE, layout.global_batch_size), round(wanted * share))
        if record.spec.training.objective == "dpo":
            return min(-(-wanted // width) * width, there - there % width)
        return min(wanted, there)
    count = min(wanted, there)
    return count - count % width or count if whole_rounds else count
