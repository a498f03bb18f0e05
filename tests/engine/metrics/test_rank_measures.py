import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.engine.data.sample_order import sample_at
from scaletrain_cli.engine.metrics import rank_measures
from scaletrain_cli.engine.metrics.layer_measures import MeasuredLayers
from scaletrain_cli.engine.metrics.rank_measures import LayersFile
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.telemetry.series import SeriesWriter, read_series
from tests.engine.parity.comparison import assert_same
from tests.engine.parity.layouts import begun_run, local_pieces, ready, replica
from tests.engine.parity.reference import batch_loss, first_weights, set_groups
from tests.engine.parity.rows import Row
from tests.engine.ranks import on_ranks

STEPS = 8
SLOW_SECONDS = 0.1  # of rank 1 in each forward pass
EVERY, FEWEST = 2, 3  # of the noise scale, in place of a run of hundreds of steps
OFF = "telemetry.enabled=false"
ON = "telemetry.layers_every=3"


class Outcome(NamedTuple):
    """One rank's losses, norms and weights, what it sent by step, and the noise scale by step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    sent: dict[int, dict[str, float]]
    noise: dict[int, float]


class Sent:
    """Takes the place of the pipe to the agent."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.rows[step] = dict(values)

    def send(self) -> None:
        pass


def train(path: Path) -> Outcome:
    from scaletrain_cli.engine.metrics import noise_scale, rank_measures

    rank_measures._SPLIT_SECONDS = 0.0
    noise_scale.EVERY, noise_scale._FEWEST, noise_scale._IGNORED = EVERY, FEWEST, 1
    noise_scale._MOST_STEPS = EVERY
    trainer = ready(path)
    rank, layout = trainer.context.rank, trainer.context.layout
    sent = trainer.measures._sender = Sent()  # type: ignore[assignment]
    if rank == 1:
        trainer.composed.engine.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
    measured = []
    with trainer.measures:
        for step in range(1, STEPS + 1):
            trainer.optimizer_step(step)
            trainer.measures.after_step(step)
            measured += trainer.deferred_metrics.remaining()
    pieces = local_pieces(trainer.composed.model, replica(rank, layout), layout)
    losses, norms = ([step.values[name] for step in measured] for name in ("loss", "grad_norm"))
    noise = {step.step: step.values["noise_scale"] for step in measured if "noise_scale" in step.values}
    return Outcome(list(losses), list(norms), {name: each.values for name, each in pieces.items()}, sent.rows, noise)


def noise_alone(spec: RunSpec, small: int) -> dict[int, float]:
    """The noise scale by step of a plain loop, from the first ``small`` sequences of each of two replicas."""
    _, sequences, _ = open_source_dataset(Path(spec.data.source), spec.transformer.seq_len)
    model: Any = first_weights(spec)
    settings = spec.training.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), betas=settings.betas, eps=settings.eps)
    optimizer.param_groups.clear()
    found: dict[int, float] = {}
    means, measured = (0.0, 0.0), 0

    def square(positions: range) -> float:
        drawn = [sample_at(position, seed=spec.training.seed, samples=len(sequences)) for position in positions]
        model.zero_grad()
        batch_loss(model, spec, torch.from_numpy(sequences.rows(drawn)), torch.tensor(positions)).backward()
        return sum(p.grad.double().square().sum().item() for p in model.parameters())

    for step in range(1, STEPS + 1):
        set_groups(optimizer, dict(model.named_parameters()), spec, step)
        first = 8 * (step - 1)
        of_small = sum(square(range(begin, begin + small)) for begin in (first, first + small)) / 2
        of_large = square(range(first, first + 8))
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.training.gradient_clipping)
        optimizer.step()
        if step % EVERY == 0:
            trace = (of_small - of_large) / (1 / small - 1 / 8)
            gradient = (8 * of_large - small * of_small) / (8 - small)
            if measured:
                means = 0.95 * means[0] + 0.05 * trace, 0.95 * means[1] + 0.05 * gradient
            measured += 1
            if measured >= FEWEST and min(means) > 0:
                found[step] = means[0] / means[1]
    return found


def trained(row: Row, dataset: Path, *overrides: str) -> list[Outcome]:
    spec = Row(**{**vars(row), "overrides": (*row.overrides, *overrides)}).spec(dataset)
    return on_ranks(spec.world_size, train, begun_run(spec).path, connected=False)


ROWS = [
    Row(1, data=2, accumulation=2),
    *(
        pytest.param(row, marks=pytest.mark.long)
        for row in (
            Row(0, data=2),
            Row(2, data=2, accumulation=2),
            Row(3, data=2, checkpointing="full"),
            Row(1, tensor=2, pipeline=2, accumulation=2),
            Row(2, data=2, overrides=("training.precision=fp16",), title="fp16"),
            Row(3, data=2, accumulation=2, overrides=("training.gradient_clipping_by=value",), title="by value"),
        )
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_run_is_the_same_with_and_without_telemetry(row: Row, dataset: Path) -> None:
    on, off = trained(row, dataset, ON), trained(row, dataset, OFF)
    for with_it, without in zip(on, off, strict=True):
        assert_same(with_it, without)
        assert with_it.weights.keys() == without.weights.keys()
        assert not without.sent
        assert not without.noise
    phases = {"step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "communication_seconds"}
    expected = {*phases, "data_wait_seconds", "host_seconds"} | ({"own_seconds"} if row.pipeline == 1 else set())
    for outcome in on:
        assert list(outcome.sent) == list(range(1, STEPS + 1))
        assert outcome.sent[1].keys() == {*expected, "memory_bytes"}
        for sent in outcome.sent.values():
            assert sent.keys() - {"memory_bytes"} == expected
            parts = sum(sent[f"{name}_seconds"] for name in ("forward", "backward", "optimizer"))
            assert 0 < parts < sent["step_seconds"] == sent["host_seconds"]
            assert 0 < sent["communication_seconds"] < sent["step_seconds"]
    if row.pipeline == 1:
        usual = [{name: median(sent[name] for sent in each.sent.values()) for name in expected} for each in on]
        assert usual[1]["forward_seconds"] > SLOW_SECONDS * row.accumulation
        # The rank that is slow waits least for the others, in the step in which the machine stopped rank 0 least.
        waited, own = (
            [on[0].sent[step].get(name, 0.0) - sent.get(name, 0.0) for step, sent in on[1].sent.items()]
            for name in ("communication_seconds", "own_seconds")
        )
        assert max(waited) > 0.5 * SLOW_SECONDS
        assert row.zero == 3 or min(own) < -0.5 * SLOW_SECONDS
        assert list(on[0].noise) == list(range(EVERY, STEPS + 1, EVERY))
    else:
        assert not on[0].noise
    if row.pipeline == 1 and not row.overrides:
        spec = row.spec(dataset)
        small = spec.training.micro_batch_size
        assert isinstance(small, int)
        wanted = on_ranks(1, noise_alone, spec, small, connected=False)[0]
        known = [{step: value for step, value in each.noise.items() if value == value} for each in on]
        assert known[0] == known[1]
        assert known[0] == pytest.approx(wanted, rel=1e-4)
        assert len(wanted) == (STEPS // EVERY) - FEWEST + 1


def test_a_file_system_that_hangs_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, monitored = threading.Event(), threading.Event()

    def hang(writer: SeriesWriter) -> None:
        monitored.set()
        released.wait()

    monkeypatch.setattr(rank_measures, "_WRITE_SECONDS", 0.01)
    monkeypatch.setattr(rank_measures, "_CLOSE_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(SeriesWriter, "flush", hang)
        file = LayersFile(tmp_path / "layers.jsonl.gz")
        monitored.wait()
        file.add(MeasuredLayers(3, {"head": {"weight_norm": 2.0}}))
        file.close()
        assert file._thread.is_alive()  # it hangs still
    released.set()
    file._thread.join()
    assert read_series(tmp_path / "layers.jsonl.gz")["layer head"].mean["weight_norm"][0] == 2.0
