"""Classification without training on the classes: by the text features of prompts (arXiv:2103.00020, section 3.1.4)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.data.images.captions import CaptionTokenizer
from scaletrain_cli.engine.data.images.reading import ImageBatchReader
from scaletrain_cli.engine.evaluation.measures import Accuracy, Figures, in_sample_order, rows_of_all, slices_of
from scaletrain_cli.engine.parallel.mesh import Axis

_PROMPTS_AT_A_TIME = 64


def class_features(
    classes: Sequence[str], templates: Sequence[str], encode: Callable[[Sequence[str]], Tensor], axis: Axis
) -> Tensor:
    """Return the feature of each class, [classes, d] in fp32 on the CPU, the same on every rank. Collective.

    The features of the prompts of a class are normalized, their mean is normalized again. ``encode``: returns the text
    features of prompts, [prompts, d]; every rank calls it equally often, with chunks that do not depend on the number
    of ranks.
    """
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    chunks = list(slices_of(len(prompts), _PROMPTS_AT_A_TIME))
    vectors, numbers = [], []
    for first in range(0, len(chunks), axis.size):
        number = min(first + axis.rank, len(chunks) - 1)  # the last chunk stands in, so that all ranks call alike
        part = chunks[number]
        vectors.append(F.normalize(encode(prompts[part]).detach().float(), dim=1))
        numbers.append(torch.arange(part.start, part.stop))
    order = in_sample_order(rows_of_all(torch.cat(numbers), axis))
    features = rows_of_all(torch.cat(vectors), axis)[order]
    return F.normalize(features.view(len(classes), len(templates), -1).mean(1), dim=1)


@dataclass(frozen=True)
class ZeroShot:
    """Labeled images of other data, classified by the names of their classes. ``measure`` is collective.

    ``reader``: of the images with their labels, without captions. ``classes``: names in the order of the labels.
    """

    reader: ImageBatchReader
    classes: Sequence[str]
    templates: Sequence[str]
    tokenizer: CaptionTokenizer
    axis: Axis
    device: torch.device

    def measure(
        self,
        forward: Callable[[Tensor | None, Tensor | None], Any],
        pixels: Callable[[ImageMicroBatch], Tensor],
        batches: Iterable[ImageMicroBatch],
        goes_on: Callable[[], bool],
    ) -> Figures | None:
        """Return ``zero_shot_top1`` and ``_top5`` over all images; None once ``goes_on`` returns False on every rank.

        ``forward``: the model in evaluation, from pixels or tokens, the others None; it returns the features of both as
        ``image`` and ``text``. ``pixels``: normalizes the images of a micro-batch. ``batches``: of this rank, in an
        evaluation of all images of ``reader``. ``goes_on`` is called before each use of the model.
        """

        def encode(prompts: Sequence[str]) -> Tensor:
            if not goes_on():
                raise _PreemptedError
            of_prompts: Tensor = forward(None, torch.from_numpy(self.tokenizer.encode(prompts)).to(self.device)).text
            return of_prompts

        try:
            features = class_features(self.classes, self.templates, encode, self.axis).to(self.device)
        except _PreemptedError:
            return None
        accuracy = Accuracy(len(self.classes), self.classes, prefix="zero_shot_")
        for batch in batches:
            if not goes_on():
                return None
            on_device = batch.to(self.device)
            assert on_device.targets is not None
            image = F.normalize(forward(pixels(on_device), None).image.float(), dim=1)
            accuracy.add(image @ features.T, on_device.targets, on_device.real)
        return accuracy.result(self.axis) or Figures({}, {})


class _PreemptedError(Exception):
    """A preemption signal has arrived, on every rank alike."""
