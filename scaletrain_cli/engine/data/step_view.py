"""The command ``step``: the samples of one training step as the ranks read them, with their text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.stages import batch_number, merged_skip_ranges, stages_of_run
from scaletrain_cli.data.tokenizers.files import load_tokenizer
from scaletrain_cli.engine.data.batches import PADDING_MULTIPLE, BatchReader, MicroBatch
from scaletrain_cli.engine.data.chat_tokenizer import first_copies
from scaletrain_cli.engine.data.dataset import JoinedSequences, TextSequences
from scaletrain_cli.engine.data.rows import NOT_COUNTED, PADDING_DOCUMENT, JoinedRows, RowSamples, RowSequences
from scaletrain_cli.engine.data.sample_order import SampleOrder, sample_order
from scaletrain_cli.engine.data.splits import RunData, held_back_of, open_reader, open_splits
from scaletrain_cli.engine.data.stats import datasets_of
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, coordinates_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.stages import replicas
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.journal import has_committed, read_events, read_rollbacks
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.spec import LlavaSpec, RunSpec


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Return samples, given SPEC_JSON RUNS_ROOT RUN STEP RANK MICRO_BATCH COUNT PNG.

    PNG: the file to write with the images, or empty. RUN is the folder of a run; steps and micro-batches count from 1,
    ranks from 0. RUN, RANK and MICRO_BATCH may be empty: without RANK the samples of all ranks are shown, in the order
    of the global batch. Raises UsageError.
    """
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    run = RunDir(Path(arguments[2])) if arguments[2] else None
    step, count = int(arguments[3]), int(arguments[6])
    rank, micro_batch = (int(text) if text else None for text in arguments[4:6])
    layout = make_plan(spec).layout if run is None else read_record(run).plan.layout
    _check_range(spec, layout, step, rank, micro_batch)
    datasets = datasets_of(spec, Path(arguments[1]), run)
    data = opened_data(spec, layout, run, datasets)
    skipped = [] if run is None else [rollback.skip for rollback in read_rollbacks(run)]
    number = batch_number(step, merged_skip_ranges([*spec.data.skip, *skipped]))
    chosen = list(_places(layout, rank, micro_batch))
    of_layout = ("data_parallel", "micro_batch_size", "gradient_accumulation_steps")
    head = {
        "step": step,
        "batch": number,
        "layout": {name: getattr(layout, name) for name in of_layout},
        "rank": rank,
        "samples_in_all": len(chosen),
    }
    if is_of_images(spec):
        shown = _shown_images(spec, layout, run, data, number, chosen[:count], arguments[7])
        return {**head, "seq_len": None, "images": True, **shown}
    samples = _Samples(spec, layout, run, data, load_tokenizer(str(next(iter(datasets.values())) / "tokenizer.json")))
    return {
        **head,
        "seq_len": spec.language_model.seq_len,
        "samples": [samples.shown(number, place, rank) for place in chosen[:count]],
    }


def _shown_images(
    spec: RunSpec, layout: Layout, run: RunDir | None, data: RunData, number: int, places: "Sequence[Place]", png: str
) -> dict[str, Any]:
    from scaletrain_cli.engine.data.images.show import ShownImages, write_sheet  # which needs Pillow

    shown = ShownImages(spec, layout, data, order_of(spec, layout, run, data))
    meshes = {replica: _mesh(layout, replica, None) for replica in range(layout.data_parallel)}
    pictures = list(shown.of_step(number, places, meshes))
    if png:
        write_sheet([picture for _, picture in pictures], Path(png))
    return {"samples": [about for about, _ in pictures], "png": png or None}


class Place(NamedTuple):
    """A sample in a global batch; all counted from 0."""

    micro_batch: int
    replica: int
    row: int


def _places(layout: Layout, rank: int | None, micro_batch: int | None) -> Iterator[Place]:
    """Yield the places of a rank's samples in a batch, or of all, in the order of the global batch."""
    replicas = range(layout.data_parallel) if rank is None else [coordinates_of(layout, rank)["data"]]
    micros = range(layout.gradient_accumulation_steps) if micro_batch is None else [micro_batch - 1]
    return (
        Place(micro, replica, row) for micro in micros for replica in replicas for row in range(layout.micro_batch_size)
    )


def _check_range(spec: RunSpec, layout: Layout, step: int, rank: int | None, micro_batch: int | None) -> None:
    if step > spec.total_steps:
        raise UsageError(Reason("data.step-out-of-range", {"step": step, "steps": spec.total_steps}))
    if rank is not None and rank >= layout.world_size:
        raise UsageError(Reason("data.rank-out-of-range", {"rank": rank, "ranks": layout.world_size}))
    count = layout.gradient_accumulation_steps
    if micro_batch is not None and micro_batch > count:
        raise UsageError(Reason("data.micro-batch-out-of-range", {"number": micro_batch, "count": count}))


def opened_data(spec: RunSpec, layout: Layout, run: RunDir | None, datasets: Mapping[str, Path]) -> RunData:
    """Return the data of a run as its engine opens them, or would: nothing is recorded."""
    begun = run is not None and has_committed(run)
    events = [] if run is None else list(read_events(run))

    def held_back(source: str | None, *sizes: int) -> int:
        return held_back_of(spec, layout, events, *sizes, source=source, begun=begun)[0]

    return open_splits(spec, datasets, held_back, begun=begun)


def order_of(spec: RunSpec, layout: Layout, run: RunDir | None, data: RunData) -> SampleOrder | None:
    """Return the order of the samples of several sources, with the changes that a run has recorded; else None."""
    if len(data.sizes) < 2:
        return None
    events = [] if run is None else read_events(run)
    stages = stages_of_run(spec.data, data.sizes, spec.total_steps, layout.global_batch_size, events)
    return sample_order(spec.training.seed, data.sizes, stages)


class _Samples:
    """Reads samples through the reader of the engine."""

    def __init__(self, spec: RunSpec, layout: Layout, run: RunDir | None, data: RunData, tokenizer: Any) -> None:
        self._spec, self._layout, self._data, self._tokenizer = spec, layout, data, tokenizer
        self._sequences: Any = data.samples
        model = spec.model
        self._image = (model.image_token_index, model.tokens_per_image) if isinstance(model, LlavaSpec) else None
        self._order = order_of(spec, layout, run, data) or SampleOrder.of_one(spec.training.seed, len(self._sequences))
        self._batch = lru_cache(maxsize=1)(self._read)  # the samples of a replica follow one another

    def _read(self, number: int, replica: int, rank: int | None) -> list[MicroBatch]:
        layout, multiple = self._layout, PADDING_MULTIPLE
        if rank is None:  # whole sequences are padded as those that several ranks share
            multiple *= layout.sequence_parallel * layout.context_parallel
        reader = open_reader(self._spec, self._sequences, layout, _mesh(layout, replica, rank), self._order)
        assert isinstance(reader, BatchReader)
        return replace(reader, padding_multiple=multiple, pixels=None).batch(number).micro_batches()

    def shown(self, number: int, place: Place, rank: int | None) -> dict[str, Any]:
        """Return a sample of a batch as JSON values."""
        layout, size = self._layout, self._layout.micro_batch_size
        micro = self._batch(number, place.replica, rank)[place.micro_batch]
        first = (number - 1) * layout.global_batch_size
        sample = first + (place.micro_batch * layout.data_parallel + place.replica) * size + place.row
        sequence = self._order(sample)
        source, own = 0, sequence
        if isinstance(self._sequences, JoinedSequences | JoinedRows):
            source, own = self._sequences.located(sequence)
        pairs = isinstance(self._sequences, RowSamples) and self._sequences.pairs
        rows = {"chosen": place.row, "rejected": place.row + size} if pairs else {"text": place.row}
        part = _mesh(layout, place.replica, rank).part
        places = part.places(micro.tokens.shape[1] * part.ranks).tolist()
        return {
            "sample": sample,
            "source": list(self._data.sizes)[source],
            "sequence": own,
            "micro_batch": place.micro_batch + 1,
            "replica": place.replica,
            "texts": [{"name": name, **self._text(micro, row, sequence, places)} for name, row in rows.items()],
            **({} if self._image is None else {"images": self._images(own)}),
        }

    def _images(self, row: int) -> list[dict[str, Any]]:
        from scaletrain_cli.data.images.decode import size_of  # which needs Pillow

        assert isinstance(self._sequences, RowSequences)
        images = []
        for content, place in self._sequences.images_of(row):
            width, height = size_of(content, place)
            images.append({"place": place, "width": width, "height": height})
        return images

    def _text(self, micro: MicroBatch, row: int, sequence: int, places: list[int]) -> dict[str, Any]:
        """Return one row of a micro-batch. ``places``: the positions of its tokens in the whole sequence."""
        tokens, labels = micro.tokens[row].tolist(), micro.labels[row].tolist()
        positions = (micro.positions if micro.positions.dim() == 1 else micro.positions[row]).tolist()
        weights = [float(label != NOT_COUNTED) for label in labels]
        if micro.weights is not None:
            weights = micro.weights[row].tolist()
        documents = self._documents(micro, row, sequence, places)
        real = len(tokens) if micro.real is None else int(micro.real[row].sum())
        # The label at a position is the next token: a token is in the loss with the weight of the label before it.
        # That of the first token after a gap, as context ranks have one, is on another rank.
        jumps = [place != before + 1 for before, place in pairwise(places)]
        of_token = [None, *(None if jump else weight for jump, weight in zip(jumps, weights[:-1], strict=True))]
        runs = list(zip(documents, accumulate(jumps, initial=0), strict=True))
        follows = labels[-1] if real == len(tokens) and labels[-1] != NOT_COUNTED else None
        return {
            "tokens": tokens,
            "labels": labels,
            "weights": weights,
            "positions": positions,
            "start": places[0],
            "padding": len(tokens) - real,
            "documents": [
                self._document(list(numbers), tokens, positions, of_token, places)
                for _, numbers in groupby(range(real), key=runs.__getitem__)
            ],
            "follows": None if follows is None else {"text": self._decoded([follows]), "weight": weights[-1]},
        }

    def _documents(self, micro: MicroBatch, row: int, sequence: int, places: list[int]) -> list[int]:
        """Return the number of the document of each token in the whole sequence, from 0 on; -1 for padding."""
        if micro.documents is not None:
            return [int(number) for number in micro.documents[row, places]]
        if isinstance(self._sequences, TextSequences):
            last = self._sequences.document_ends_within(sequence, sequence + 1)
            return torch.bucketize(torch.tensor(places), torch.as_tensor(last)).tolist()
        assert micro.real is not None
        return [0 if real else PADDING_DOCUMENT for real in micro.real[row].tolist()]

    def _document(
        self,
        numbers: list[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        weights: Sequence[float | None],
        places: list[int],
    ) -> dict[str, Any]:
        first, last = numbers[0], numbers[-1]
        return {
            "first": places[first],
            "tokens": len(numbers),
            "positions": [positions[first], positions[last]],
            "parts": [
                {"text": self._decoded([tokens[number] for number in part]), "weight": weight}
                for weight, part in groupby(numbers, key=lambda number: weights[number])
            ],
        }

    def _decoded(self, tokens: list[int]) -> str:
        if self._image is not None:
            ids = np.array(tokens, np.int64)
            tokens = ids[first_copies(ids, *self._image)].tolist()
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _mesh(layout: Layout, replica: int, rank: int | None) -> Mesh:
    """Return the mesh of a rank, or of one that reads whole sequences of a replica, without process groups."""
    data = Axis(layout.data_parallel, replica)
    if rank is None:
        return Mesh(data=data, replicas=data)
    at = coordinates_of(layout, rank)
    context, sequence = Axis(layout.context_parallel, at["context"]), Axis(layout.sequence_parallel, at["sequence"])
    place = (replica * context.size + context.rank) * sequence.size + sequence.rank
    return Mesh(data=data, context=context, sequence=sequence, replicas=Axis(replicas(layout), place))
