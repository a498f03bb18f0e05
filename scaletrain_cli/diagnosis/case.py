"""The input of every check: spec, plan, measurements and events of one run, read from its directory."""

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from scaletrain_cli.diagnosis.curves import median, noise, smoothed
from scaletrain_cli.diagnosis.findings import Cause, Change, Finding
from scaletrain_cli.diagnosis.history import History, read_history
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import undamaged_document
from scaletrain_cli.rundir.goodput import Goodput, run_goodput
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.measured import Measured, read_measured
from scaletrain_cli.rundir.mirror_state import MirrorState, read_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_spec_lines
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.telemetry.run import Telemetry, read_telemetry
from scaletrain_cli.telemetry.series import Series

FEWEST = 3  # rows: one covers a second of training, or several older seconds
_RECENT_ROWS = 60
_STARTING_STEPS = 5  # of an attempt: they allocate, compile and fill caches
_Key = TypeVar("_Key", str, int)
_FIRST_STEPS = 3
_RECENT = 50  # measured steps; as many above the start are a divergence
_FEWEST = 16
# Rows read of each rank, GPU, node and layer, and the most nodes that are read: the cost must not depend on the run.
_ROWS, _ROWS_OF_MANY_NODES = 240, 16
_PAUSES = 32
_FEW_NODES, _MOST_NODES = 4, 32


@dataclass(frozen=True)
class Curve:
    """The training loss: ``start`` and ``now`` are medians of the first 3 steps and of the last 50 measured ones.

    ``noise``: standard deviation of a recent step. ``smooth``: medians of five.
    """

    steps: Sequence[int]
    values: Sequence[float]
    start: float
    now: float
    noise: float

    @cached_property
    def smooth(self) -> list[float]:
        return smoothed(self.values)


@dataclass(frozen=True)
class Case:
    """A run to diagnose. ``spec_lines``: ``file:line`` of the keys of its spec, as far as they were recorded.

    ``dataset``: the prepared text of a run with one source, if it is here. ``telemetry``: of the newest attempt.
    ``mirror``: as its process last saw it.
    """

    spec: RunSpec
    plan: RunPlan
    history: History
    events: Sequence[Mapping[str, Any]]
    goodput: Goodput | None = None
    measured: Measured | None = None
    spec_lines: Mapping[str, str] = field(default_factory=dict)
    dataset: "Dataset | None" = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    mirror: MirrorState | None = None

    @property
    def epoch_steps(self) -> float | None:
        """Steps in which the text of a run with one source is read once; None if its size is not known."""
        model, tokens = self.spec.model, 0 if self.dataset is None else self.dataset.train_tokens
        if not isinstance(model, ModelSpec) or tokens <= 0:
            return None
        return tokens / (model.seq_len * self.spec.training.global_batch_size)

    def epochs_at(self, step: int) -> float | None:
        """Return how often the text has been read after a step; None if its size is not known."""
        return None if self.epoch_steps is None else step / self.epoch_steps

    @property
    def is_fresh_text(self) -> bool:
        """True for a language model that begins with random weights, all of which train on tokens."""
        model, training = self.spec.model, self.spec.training
        return (
            isinstance(model, ModelSpec)
            and not self.spec.code.own_program
            and self.spec.is_from_scratch
            and training.objective in ("causal_lm", "sft")
        )

    @property
    def changes_while_training(self) -> bool:
        """True if the data or what trains change during the run, which may change the level of the loss."""
        return bool(self.spec.data.stages) or len(self.plan.training_stages) > 1

    @cached_property
    def pauses(self) -> Sequence[tuple[float, float]]:
        """(begin, end) in Unix seconds of the newest validations, checkpoints and rollbacks, and a second around."""
        validated = {validation.step for validation in self.history.validations[-_PAUSES:]}
        times = zip(self.history.steps, self.history.column("time"), strict=True)
        pauses = [(time - 1, time + 1) for step, time in times if step in validated and time == time]
        for event in list(self.events_named("checkpoint", "rolled-back"))[-_PAUSES:]:
            time, took = event.get("time"), event.get("seconds")
            if isinstance(time, int | float):
                pauses.append((time - 1 - (took if isinstance(took, int | float) else 0.0), time + 1))
        return pauses

    @property
    def on_cpu(self) -> bool:
        return self.spec.cluster.gpu == "cpu"

    @cached_property
    def uninformed_loss(self) -> float | None:
        """The loss of outputs that are equal for all samples; None where the record does not define it.

        Text: ln of the vocabulary size; classes: ln of their number; contrastive losses: ln of the number of samples
        that are compared. Not for given weights, preference pairs, regression, and losses whose labels decide.
        """
        if not self.spec.is_from_scratch or self.spec.code.own_program:
            return None
        if isinstance(self.spec.model, ModelSpec):
            return math.log(self.spec.model.vocab_size) if self.is_fresh_text else None
        training = self.spec.training
        name = training.loss.of(training.objective) if training.objective in LOSSES_OF else ""
        classes, batch = getattr(self.spec.model, "num_labels", 0), training.global_batch_size
        if name == "cross_entropy" and classes > 1:
            return math.log(classes)
        if name == "info_nce" and batch > 1:
            return math.log(batch)
        return math.log(2 * batch - 1) if name == "nt_xent" and batch > 1 else None

    @cached_property
    def curve(self) -> Curve | None:
        """The training loss; None for fewer than 32 measured steps."""
        steps, values = self.history.known("loss")
        if len(values) < 2 * _FEWEST:
            return None
        first = [value for step, value in zip(steps, values, strict=True) if step <= steps[0] + _FIRST_STEPS - 1]
        recent = values[-min(_RECENT, max(_FEWEST, len(values) // 4)) :]
        return Curve(steps, values, median(first), median(recent), noise(recent))

    @cached_property
    def peak_rate(self) -> float:
        return self.spec.training.optimizer.lr

    def change(self, key: str, to: Any = None) -> Change:
        """Return a change of a key of the spec, with its location and its value; None for the value of a section."""
        value: Any = self.spec
        for part in key.split("."):
            fields = getattr(type(value), "model_fields", {})
            name = next((name for name, field in fields.items() if field.alias == part), part)
            value = getattr(value, name, None)
        if isinstance(value, tuple) and all(isinstance(one, int | float) for one in value):
            value = list(value)
        is_plain = isinstance(value, str | int | float | bool | list)
        return Change(key, place_of(key, self.spec_lines), value if is_plain else None, to)

    def cause(self, code: str, key: str | None = None, to: Any = None, /, **params: Any) -> Cause:
        """Return a likely cause, by the code of its reason, and the change of a key of the spec that removes it."""
        return Cause(Reason(code, params), None if key is None else self.change(key, to))

    def rate_too_high(self, to: float | None = None) -> Cause:
        """Return the cause that the learning rate is too high. ``to``: a better one, such as ``lower_rate``."""
        return self.cause("diagnosis.cause-rate-too-high", "training.optimizer.lr", to, lr=self.peak_rate)

    def rate_too_low(self, to: float | None = None) -> Cause:
        """Return the cause that the learning rate is too low. ``to``: a better one."""
        return self.cause("diagnosis.cause-rate-too-low", "training.optimizer.lr", to, lr=self.peak_rate)

    def short_warm_up(self, to: int | None = None) -> Cause:
        """Return the cause that the warm-up is too short. ``to``: a better one."""
        steps = self.spec.training.schedule.warmup_steps
        return self.cause("diagnosis.cause-short-warm-up", "training.schedule.warmup_steps", to, steps=steps)

    def slow_rank(self, rank: int) -> tuple[Cause, ...]:
        """Return the causes that a rank holds up the others."""
        uneven = self.cause("diagnosis.cause-uneven-data", "data.loader.workers")
        return self.cause("diagnosis.cause-slow-node", rank=rank), uneven

    @property
    def lower_rate(self) -> float:
        """A third of the learning rate, and no more than is usual: one may be too high by orders of magnitude."""
        return float(f"{min(self.spec.training.optimizer.traits.highest_usual_lr, self.peak_rate / 3):.1g}")

    def events_named(self, *names: str) -> Iterator[Mapping[str, Any]]:
        """Yield the events with these names, oldest first."""
        return (event for event in self.events if event.get("event") in names)


@dataclass(frozen=True)
class Check:
    """A check: ``findings`` yields what is wrong with a run.

    ``of_engine``: it judges settings, plans or records of the built-in engine, which a program of the user's need not
    follow. ``explains``: by the code of a finding of this check, those of symptoms that are left out beside it.
    """

    findings: Callable[[Case], Iterator[Finding]]
    of_engine: bool
    explains: Mapping[str, tuple[str, ...]]

    def __call__(self, case: Case) -> Iterator[Finding]:
        return self.findings(case)


def check(
    *, of_engine: bool = False, explains: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[Callable[[Case], Iterator[Finding]]], Check]:
    """Make a check of a function, which checks.py finds in the modules of its ``THEMES``."""
    return lambda findings: Check(findings, of_engine, explains or {})


def place_of(key: str, spec_lines: Mapping[str, str]) -> str:
    """Return ``file:line`` of a key, or of the section that lacks it, or of the beginning of the spec.

    ``run.json`` where no line was recorded.
    """
    while key and key not in spec_lines:
        key = key.rpartition(".")[0]
    if key:
        return spec_lines[key]
    file = next((place.rpartition(":")[0] for place in spec_lines.values() if ":" in place), "")
    return f"{file}:1" if file else "run.json"


def read_case(run: RunDir, record: RunRecord) -> Case:
    """Return what the directory of a run has. Raises UsageError for a damaged record."""
    events = read_events(run)
    rows = _ROWS if record.spec.cluster.nodes <= _FEW_NODES else _ROWS_OF_MANY_NODES
    return Case(
        spec=record.spec,
        plan=record.plan,
        history=read_history(run.metrics, events, record.spec.evaluation.every),
        events=events,
        goodput=run_goodput(run),
        measured=read_measured(run),
        spec_lines=read_spec_lines(run),
        dataset=read_dataset(run, record.spec),
        telemetry=read_telemetry(run, newest=rows, most_nodes=_MOST_NODES),
        mirror=None if record.spec.checkpoint.mirror.to is None else read_mirror_state(run),
    )


_BLOCKS, _BLOCK_BYTES = 8, 1 << 18
_CODES = {"uint16": "H", "uint32": "I"}
_PASSAGES = 200
_PASSAGE_TOKENS = 32


@dataclass(frozen=True)
class Dataset:
    """The text of a run with one source. ``train_tokens``: of one epoch; ``dtype``: of a token in ``files``."""

    train_tokens: int
    dtype: str
    files: tuple[Path, ...]
    seal: str

    @cached_property
    def token_entropy(self) -> float | None:
        """The entropy of the token frequencies in nats: the least loss of a model that ignores the context.

        Of a sample of up to a million tokens, with the correction of Miller (1955) for its size; None for fewer than
        4,096 tokens, or without a readable file.
        """
        return _sampled(self.files, self.dtype, self.seal).entropy

    @cached_property
    def repeated_share(self) -> float | None:
        """The share of 200 passages of 32 tokens that occur again in the sample; None as above."""
        return _sampled(self.files, self.dtype, self.seal).repeated


@dataclass(frozen=True)
class _Sampled:
    entropy: float | None = None
    repeated: float | None = None


def read_dataset(run: RunDir, spec: RunSpec) -> Dataset | None:
    """Return the prepared text of a run; None for rows, images, several sources, and data that are not here."""
    if not isinstance(spec.model, ModelSpec) or spec.training.objective != "causal_lm" or spec.code.own_program:
        return None
    folders, _ = recorded_folders(spec, run.path.parent, read_entries(datasets_file(run)))
    if len(folders) != 1:
        return None
    (folder,) = folders.values()
    document = undamaged_document(folder / "dataset.json") or {}
    tokens, tokenizer = document.get("train_tokens"), document.get("tokenizer")
    dtype = tokenizer.get("dtype") if isinstance(tokenizer, dict) else None
    if not isinstance(tokens, int) or dtype not in _CODES:
        return None
    return Dataset(tokens, dtype, tuple(sorted(folder.glob("[0-9]*/train.bin"))), str(document.get("seal")))


@lru_cache(maxsize=16)
def _sampled(files: tuple[Path, ...], dtype: str, seal: str) -> _Sampled:
    """Return the figures of a sample. ``seal`` tells the contents of the files apart."""
    try:
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        if total <= _BLOCKS * _BLOCK_BYTES:
            places = [(path, 0, size) for path, size in zip(files, sizes, strict=True)]
        else:
            places = [_place_at(total * number // _BLOCKS // 8 * 8, files, sizes) for number in range(_BLOCKS)]
        blocks = []
        for path, start, count in places:
            with open_to_read(path) as file:
                file.seek(start)
                blocks.append(file.read(count))
    except OSError:
        return _Sampled()
    width = array(_CODES[dtype]).itemsize
    data = b"".join(block[: len(block) // width * width] for block in blocks)
    tokens = array(_CODES[dtype], data)
    if len(tokens) < 4096:
        return _Sampled()
    counts = Counter(tokens)
    plain = math.log(len(tokens)) - math.fsum(n * math.log(n) for n in counts.values()) / len(tokens)
    chance, length = random.Random(0), _PASSAGE_TOKENS * width
    starts = [chance.randrange(len(tokens) - _PASSAGE_TOKENS) * width for _ in range(_PASSAGES)]
    repeated = sum(_occurs_twice(data, data[at : at + length], width) for at in starts)
    return _Sampled(plain + (len(counts) - 1) / (2 * len(tokens)), repeated / _PASSAGES)


def _occurs_twice(data: bytes, passage: bytes, width: int) -> bool:
    place, times = data.find(passage), 0
    while place >= 0:
        times += place % width == 0
        if times > 1:
            return True
        place = data.find(passage, place + 1)
    return False


def _place_at(at: int, files: tuple[Path, ...], sizes: list[int]) -> tuple[Path, int, int]:
    """Return the file of a byte, the offset there, and the size of a block."""
    for path, size in zip(files, sizes, strict=True):
        if at < size:
            return path, at // 8 * 8, _BLOCK_BYTES
        at -= size
    return files[-1], 0, _BLOCK_BYTES


def recent(case: Case, series: Series, column: str) -> list[float]:
    """Return the newest measured means of a column, at most 60 rows, without those of the first steps of the attempt.

    Of nodes and GPUs also without those in which a checkpoint or a rollback was written, or a validation measured: that
    is other work than a step. The columns of ranks measure steps alone.
    """
    pauses = () if series.subject.startswith("rank") else case.pauses
    first = min((step for step in series.steps if step > 0), default=0)
    kept = [
        value
        for time, step, value in zip(series.times, series.steps, series.mean.get(column, ()), strict=False)
        if value == value and step > first + _STARTING_STEPS and not any(begin <= time <= end for begin, end in pauses)
    ]
    return kept[-_RECENT_ROWS:]


def level(case: Case, series: Series, column: str) -> float | None:
    """Return the median of the recent rows of a column; None for fewer than three."""
    values = recent(case, series, column)
    return median(values) if len(values) >= FEWEST else None


def levels(case: Case, subjects: Mapping[_Key, Series], column: str) -> dict[_Key, float]:
    """Return the level of a column by subject, of those that measure it."""
    pairs = ((key, level(case, series, column)) for key, series in subjects.items())
    return {key: value for key, value in pairs if value is not None}


def share(case: Case, series: Series, column: str) -> float | None:
    """Return the mean of the recent rows of a share of time; None for fewer than three."""
    values = recent(case, series, column)
    return sum(values) / len(values) if len(values) >= FEWEST else None


def worst(values: Mapping[_Key, float | None]) -> tuple[_Key, float] | None:
    """Return the subject with the largest value, and the value; None if none is known."""
    known = {key: value for key, value in values.items() if value is not None}
    if not known:
        return None
    key = max(known, key=known.__getitem__)
    return key, known[key]


def grown(series: Series, column: str) -> float:
    """Return how much a counter rose over the rows; 0 if it is not measured, or began anew."""
    values = [value for value in series.highest.get(column, ()) if value == value]
    return max(0.0, values[-1] - values[0]) if values else 0.0
