"""Bandwidth of storage and number of reader processes that the planned step time requires."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout, Time
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.loader_processes import loader_processes
from scaletrain_cli.spec.sources import MOST_WORKERS

_SMALL_VOCABULARY = 2**16  # token ids of two bytes
_WEIGHT_BYTES = 4  # of each token of rows, fp32
# Prepared files are compared with their hashes by chunks (data/chunk_hashes.py) and fetched by blocks
# (data/block_cache.py); a first read takes the whole of them.
_CHUNK_BYTES, _BLOCK_BYTES = 1 << 17, 1 << 20
# One process, ``benchmarks/loader.py`` on a 2-core x86 machine: 4.1 ms per 100 sequences with their places, and 0.15 ms
# for the hash of a chunk; 160 million tokens a second of plain text, and 36 and 17 of packed text and of rows.
_SEQUENCE_SECONDS, _CHUNK_SECONDS = 15e-6, 150e-6
_TOKEN_SECONDS = {"plain": 3e-9, "documents": 25e-9, "rows": 60e-9}
# Where labels are masked or weighted, each rank looks up every sequence of the whole batch.
_LOOKUP_SECONDS = 1.2e-6
_BUSY_SHARE = 0.5  # of a reader's time; the thread of a rank also shares Python's lock with the training loop


@dataclass(frozen=True)
class DataFeed:
    """The data that ranks and nodes read.

    ``rank_bytes``, ``node_bytes``: bytes of tokens per second. ``node_first_bytes``: largest number of bytes per second
    while chunks are read for the first time; ``remote_first_bytes``: the same for blocks of remote data.
    ``reader_seconds``: time that the readers of a rank need for each step. ``workers``: number of processes that
    suffice; 0: a thread.
    """

    rank_bytes: float
    node_bytes: float
    node_first_bytes: float
    remote_first_bytes: float
    reader_seconds: float
    workers: int


def data_feed(spec: RunSpec, layout: Layout, step_seconds: float) -> DataFeed:
    """Return what a rank and a node read of the tokens of a run whose steps take ``step_seconds``."""
    rows = spec.training.objective != "causal_lm"
    kind = "rows" if rows else "plain" if spec.data.packing == "none" else "documents"
    width = (2 if spec.transformer.vocab_size <= _SMALL_VOCABULARY else 4) + (_WEIGHT_BYTES if rows else 0)
    samples = layout.global_batch_size / layout.data_parallel
    size = width * (spec.units_per_sample + 1)
    # All ranks of a replica read the same, from the page cache of their node.
    per_replica = layout.tensor_parallel * layout.sequence_parallel * layout.context_parallel
    replicas = min(layout.data_parallel, max(1, spec.cluster.gpus_per_node // per_replica))
    seconds = samples * (_SEQUENCE_SECONDS + _CHUNK_SECONDS * math.ceil(size / _CHUNK_BYTES))
    seconds += samples * spec.units_per_sample * _TOKEN_SECONDS[kind]
    if rows or spec.data.loss_mask != "none" or kind == "documents":
        seconds += layout.global_batch_size * _LOOKUP_SECONDS
    rate, busy = samples / step_seconds, seconds / step_seconds
    return DataFeed(
        rank_bytes=rate * size,
        node_bytes=replicas * rate * size,
        node_first_bytes=replicas * rate * max(size, _CHUNK_BYTES),
        remote_first_bytes=replicas * rate * max(size, _BLOCK_BYTES),
        reader_seconds=seconds,
        workers=0 if busy <= _BUSY_SHARE else min(MOST_WORKERS, math.ceil(busy / _BUSY_SHARE)),
    )


def feed_assumptions(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield what storage and the readers of the engine have to deliver for the plan's speed."""
    if not _is_fed(spec):
        return
    feed = data_feed(spec, layout, time.step)
    params = {"rank": feed.rank_bytes, "node": feed.node_bytes, "first": feed.node_first_bytes}
    yield Reason("plan.assumes-data-rate", params)
    if any("://" in source.path and not is_reference(source.path) for source in spec.data.all_sources):
        remote = {"first": feed.remote_first_bytes, "block": _BLOCK_BYTES, "cache": spec.data.cache.size}
        yield Reason("plan.assumes-remote-data", remote)
    seconds = {"seconds": feed.reader_seconds, "step": time.step}
    if feed.workers:
        yield Reason("plan.assumes-data-workers", {**seconds, "workers": feed.workers})
    else:
        yield Reason("plan.assumes-data-thread", seconds)


def feed_warnings(spec: RunSpec, layout: Layout, time: Time) -> Iterator[Reason]:
    """Yield a warning if ``data.loader.workers`` are too few for the plan's speed."""
    if not _is_fed(spec):
        return
    feed, given = data_feed(spec, layout, time.step), loader_processes(spec)
    if given < feed.workers:
        params = {"given": given, "needed": feed.workers, "seconds": feed.reader_seconds, "step": time.step}
        yield Reason("plan.too-few-readers", params)


def _is_fed(spec: RunSpec) -> bool:
    """Return whether the engine reads prepared tokens."""
    return framework_of(spec).is_engine and spec.unit == "tokens" and not spec.code.own_program
