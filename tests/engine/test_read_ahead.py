"""The loop has as many batches read ahead as its readers can read at once, in training and in an evaluation."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.data.loader import BatchesAndRounds, Loader, Round
from scaletrain_cli.engine.trainer import Trainer
from scaletrain_cli.engine.validation import ReadAhead, Validation
from scaletrain_cli.spec.sources import LoaderSpec
from tests.engine.alone import context_of
from tests.engine.data.images.pictures import Pictures, layout, reader
from tests.waiting import wait_until

CPU = torch.device("cpu")


class Requests:
    """A loader that notes what is asked for, and reads it at once."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read, self.noted = read, list[tuple[Any, list[Any]]]()

    def take(self, number: Any, following: Any = ()) -> Any:
        self.noted.append((number, list(following)))
        return self._read(number)


def trainer_with(loader: Any, settings: LoaderSpec, *, steps: int = 20, accumulation: int = 1) -> Any:
    spec = SimpleNamespace(data=SimpleNamespace(loader=settings), total_steps=steps)
    plan = SimpleNamespace(layout=SimpleNamespace(gradient_accumulation_steps=accumulation))
    trainer: Any = object.__new__(Trainer)
    trainer.context, trainer.loader = context_of(None, SimpleNamespace(spec=spec, plan=plan)), loader
    trainer.readers = settings.workers if settings.workers != "auto" else 0
    trainer.guard = SimpleNamespace(batch_number=lambda step: step + 100)
    trainer.validation = object.__new__(Validation)
    trainer.validation.context = trainer.context
    return trainer


def validated(trainer: Any, images: Any, count: int) -> Iterator[Any]:
    """Return the micro-batches of a validation after step 5."""
    ahead = ReadAhead(trainer.loader, trainer._following(5), trainer._read_ahead)
    return trainer.validation._batches("source", images, count, ahead)


@dataclass(frozen=True)
class Slow:
    """A read that takes long, and writes when it begins and ends."""

    folder: Path

    def __call__(self, number: int) -> torch.Tensor:
        (self.folder / f"{number}-{os.getpid()}").touch()
        time.sleep(0.5)
        (self.folder / f"{number}-{os.getpid()}").unlink()
        return torch.tensor(number)


@pytest.mark.parametrize(("workers", "prefetch", "expected"), [(0, 2, 2), (4, 2, 4), (2, 6, 6)])
def test_each_worker_has_a_batch_to_read_ahead(workers: int, prefetch: int, expected: int) -> None:
    trainer = trainer_with(None, LoaderSpec(workers=workers, prefetch=prefetch))
    assert trainer._following(3) == list(range(104, 104 + expected))
    assert trainer._following(18) == [119, 120]


@pytest.mark.process
@pytest.mark.long
def test_as_many_batches_are_in_flight_as_there_are_workers(tmp_path: Path) -> None:
    settings = LoaderSpec(workers=4, prefetch=2)
    loader: Loader[Any] = Loader(Slow(tmp_path), CPU, workers=4)
    trainer = trainer_with(loader, settings, steps=10_000)
    with contextlib.closing(loader):
        assert loader._processes is not None
        most, step = 0, 0
        own = f"-{os.getpid()}"  # until its processes have started, a rank reads by itself
        while most < 4:
            step += 1
            loader.take(step + 100, trainer._following(step))
            most = max(most, sum(not file.name.endswith(own) for file in tmp_path.iterdir()))
        assert most == 4


def test_the_images_of_an_evaluation_are_read_ahead_and_then_the_batches_of_the_next_steps() -> None:
    images = reader(Pictures(30), at=layout(8, 1, 4), size=8)
    requests = Requests(BatchesAndRounds(images.batch, {"source": images}))
    trainer = trainer_with(requests, LoaderSpec(prefetch=2), accumulation=2)
    found = list(validated(trainer, images, 26))
    for micro, expected in zip(found, images.in_order(26), strict=True):
        assert torch.equal(micro.images, expected.images)
        assert torch.equal(micro.targets, expected.targets)
    rounds = [Round("source", number, 26) for number in range(1, 8)]
    assert [number for number, _ in requests.noted] == rounds
    assert requests.noted[0][1] == rounds[1:5]
    assert requests.noted[4][1] == [*rounds[5:], 106]
    assert requests.noted[6][1] == [106, 107]


def test_a_thread_reads_the_next_round_during_the_computation_of_a_round() -> None:
    images = reader(Pictures(30), at=layout(4), size=8)
    read: list[int] = []
    loader: Loader[Any] = Loader(partial(noted, read, BatchesAndRounds(images.batch, {"source": images})), CPU)
    trainer = trainer_with(loader, LoaderSpec(prefetch=2), steps=5)
    with contextlib.closing(loader):
        waiting = validated(trainer, images, 20)
        for taken in range(1, 6):
            next(waiting)
            wait_until(lambda taken=taken: len(read) >= min(taken + 2, 5), "the rounds ahead are read")
            assert read == list(range(1, min(taken + 2, 5) + 1))
        assert next(waiting, None) is None


def test_an_evaluation_that_is_preempted_leaves_the_loader_ready_for_training() -> None:
    images = reader(Pictures(30), at=layout(4), size=8)
    loader: Loader[Any] = Loader(BatchesAndRounds(images.batch, {"source": images}), CPU)
    trainer = trainer_with(loader, LoaderSpec(prefetch=2))
    trainer.validation.step_sync = SimpleNamespace(goes_on=lambda step: False)
    with contextlib.closing(loader):
        assert trainer.validation._mean_loss(5, validated(trainer, images, 20)) is None
        assert torch.equal(loader.take(3, [4]).images, images.batch(3).images)


def noted(read: list[int], function: Callable[[Round], Any], request: Round) -> Any:
    found = function(request)
    read.append(request.number)
    return found
