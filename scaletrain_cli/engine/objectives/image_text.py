"""Next-token prediction over rows of text with images in them."""

from typing import NamedTuple

from torch import Tensor

from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.data.images.mixing import normalized
from scaletrain_cli.engine.deepspeed_engine import forward_dtype
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.objectives.base import NextToken
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.vision_model import image_channels


class PreparedRows(NamedTuple):
    """A micro-batch, and its images as the model takes them.

    pixels: [images, channels, height, width], normalized, in the dtype of the weights; None: no row has an image.
    """

    rows: MicroBatch
    pixels: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, TokenContext]:
        return self.rows.tokens, self.rows.labels, self.pixels, self.rows.context


class ImageText(NextToken):
    """The loss of ``NextToken`` of a language model that reads images in the places of their tokens."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        super().__init__(spec, mesh)
        assert isinstance(spec.model, LlavaSpec)
        self._mean, self._std = spec.data.images.normalization(spec.model.family, image_channels(spec.model))

    def prepared(self, batch: MicroBatch) -> PreparedRows:
        """Return the micro-batch with its images normalized, in the dtype of the weights."""
        return PreparedRows(batch, self.pixels(batch.images))

    def pixels(self, images: Tensor | None) -> Tensor | None:
        """Return uint8 images [images, channels, height, width] as the model takes them; None without an image."""
        if images is None or not len(images):
            return None
        return normalized(images, mean=self._mean, std=self._std).to(forward_dtype(self.training.precision))

    def loss(self, model: CausalLM, hidden: Tensor, batch: PreparedRows) -> Tensor:  # type: ignore[override]
        return super().loss(model, hidden, batch.rows)
