"""The interfaces of models that the engine trains: of any model, and of networks for images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from scaletrain_cli.engine.model.materialization import DrawnWeights, Initial, WeightSource

if TYPE_CHECKING:
    from scaletrain_cli.engine.model.causal_lm import CausalLM


class TrainedModel(nn.Module, ABC):
    """A model with Hugging Face parameter names and without parallel code; ``spec`` has its dimensions.

    ``forward`` takes what ``MicroBatch.inputs`` has, and an ``output``: a callable that gets the model and the result
    of the forward pass, and returns what to return instead, such as a loss.
    """

    spec: Any
    measured: ClassVar[str] = "forward"  # the method whose saved activations are compared with the plan

    @property
    def language(self) -> CausalLM | None:
        """The language model that is trained, alone or with an image tower; None of other models."""
        return None

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleDict:
        """The units of activation checkpointing and compilation, by a name of their own."""

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """Return the distribution of the first values of a parameter or stored buffer, by its Hugging Face name."""

    def first_weights(self, seed: int, device: torch.device) -> WeightSource:
        """Return the random weights that training begins with; ``device`` draws them."""
        return DrawnWeights(seed, device, self.initial)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return the least and largest value of parameters that each update is followed by a clamp of, by name."""
        return {}

    def never_decays(self, name: str) -> bool:
        """Return True for a parameter without weight decay although it has several dimensions, such as positions."""
        return False


class VisionModel(TrainedModel):
    """A network for images, or for pairs of image and text.

    pixels: [images, channels, height, width], normalized, in the dtype of the weights. A network for images is called
    with ``forward(pixels, samples=None, *, output=None)`` and returns [images, num_labels]: logits, predicted numbers,
    or the features that nt_xent compares. ``samples``: [images] int64, unique numbers of the images in the run, which
    key stochastic depth; None in evaluation. One for pairs is called with ``forward(pixels, tokens, *, output=None)``.
    """
