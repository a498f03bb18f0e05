"""Open the token sequences that a run trains on and validates on."""

from __future__ import annotations

from pathlib import Path

from scaletrain_cli.engine.data.dataset import DatasetInfo, TokenSequences
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_data
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.engine.metrics.reporting import report_event
from scaletrain_cli.engine.process_group import RankConsensus, Ranks
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.journal import has_committed, read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.shared_datasets import owner_of_dataset

_HELD_BACK = "validation-held-back"


def open_data(
    run: RunDir, record: RunRecord, ranks: Ranks, consensus: RankConsensus
) -> tuple[DatasetInfo, TokenSequences | RowSequences, TokenSequences | RowSequences]:
    """Prepare the dataset on rank 0, open it on every rank, and return it with its two splits. Collective.

    Raises UsageError on every rank if the dataset cannot be prepared or is too small to validate on.
    """
    spec, folder, begun = record.spec, Path(), False
    problem: Reason | None = None
    if ranks.rank == 0:
        try:
            folder, begun = prepare_data(spec, run.path.parent), has_committed(run)
            if (owner := owner_of_dataset(folder)) is not None:
                report_event(run, ranks.rank, "data-of-another-user", folder=str(folder), owner=owner)
        except ScaletrainError as error:
            problem = error.reason if error.reason and not error.problems else recorded(str(error))
    folder, begun, problem = consensus.follow_rank_zero((folder, begun, problem))
    if problem is not None:
        raise UsageError(problem)
    info, train, validation = open_data_of(spec, folder, ranks.rank, ranks.world_size, begun=begun)
    if info.vocab_size > spec.transformer.vocab_size:
        params = {"folder": str(folder), "token_ids": info.vocab_size, "vocab_size": spec.transformer.vocab_size}
        raise UsageError(Reason("engine.vocabulary-too-large", params))
    if spec.evaluation.every:
        held_back = consensus.follow_rank_zero(
            sequences_held_back(run, record, len(train), len(validation)) if ranks.rank == 0 else 0
        )
        if held_back < 0:
            raise UsageError(_too_little_to_validate(record, len(train), len(validation)))
        if held_back:
            rest = len(train) - held_back
            train, validation = train.part(0, rest), train.part(rest, held_back)
    return info, train, validation


def sequences_held_back(run: RunDir, record: RunRecord, train: int, validation: int) -> int:
    """Return the number of ``train`` sequences to validate on, if the ``validation`` split is too small.

    The first attempt that needs them decides for all later attempts and layouts, and records it as an event. Returns 0
    if the split is large enough, and -1 if both are too small or if the run already has a checkpoint that was trained
    on all sequences.
    """
    layout, decided = record.plan.layout, None
    width = layout.micro_batch_size * layout.data_parallel
    for event in read_events(run):
        if event["event"] == _HELD_BACK:
            decided = int(event["sequences"])
    if decided is None:
        if validation >= width:
            return 0
        if has_committed(run):  # trained on all sequences: with fewer, each step would get another batch
            return -1
        # Enough for one round in every layout of this batch size, unless that is more than a tenth of the data.
        whole = layout.global_batch_size
        decided = whole if train >= 10 * whole else min(whole, max(width, train // 20))
    if decided < width or train < 2 * decided:
        return -1
    if not any(event["event"] == _HELD_BACK for event in read_events(run)):
        report_event(run, 0, _HELD_BACK, sequences=decided, of=train)
    return decided


def _too_little_to_validate(record: RunRecord, train: int, validation: int) -> Reason:
    layout, length = record.plan.layout, record.spec.transformer.seq_len
    width = layout.micro_batch_size * layout.data_parallel
    params = {"train": train, "length": length, "validation": validation, "width": width}
    return Reason("engine.data-too-small-to-validate", params)
