"""The section ``training.loss``: the loss of images and pairs, and its settings."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from scaletrain_cli.spec.quantities import Positive, Whole, not_a_switch
from scaletrain_cli.spec.section import Section, used_when, where

# The losses of each objective, its default first.
LOSSES_OF: dict[str, tuple[str, ...]] = {
    "classification": ("cross_entropy", "bce"),
    "regression": ("mse", "mae", "huber"),
    "contrastive": ("info_nce", "sigmoid", "nt_xent"),
}
_NAME = "training.loss.name"


class LossSpec(Section):
    """The loss of images or pairs. A plain string is its name.

    info_nce: images with the texts of all ranks and the reverse (CLIP, arXiv:2103.00020); sigmoid: each pair by itself
    (SigLIP, arXiv:2303.15343); nt_xent: two views of each image (SimCLR, arXiv:2002.05709).
    """

    name: Literal["auto", "cross_entropy", "bce", "mse", "mae", "huber", "info_nce", "sigmoid", "nt_xent"] = Field(
        default="auto", description="auto: cross_entropy, mse or info_nce, by training.objective"
    )
    pos_weight: Annotated[tuple[Positive, ...] | Positive | None, used_when(where(_NAME, "bce"))] = Field(
        default=None, description="bce: weight of positive labels, one number or one per class"
    )
    target_threshold: Annotated[
        Annotated[float, BeforeValidator(not_a_switch), Field(gt=0, lt=1)] | None, used_when(where(_NAME, "bce"))
    ] = Field(default=None, description="bce: mixed targets above this count as 1, others as 0; null: as they are")
    delta: Annotated[Positive, used_when(where(_NAME, "huber"))] = Field(
        default=1.0, description="huber: error from which on the loss is linear"
    )
    temperature: Annotated[Positive, used_when(where(_NAME, "nt_xent"))] = Field(
        default=0.1, description="nt_xent: divisor of the similarities"
    )
    chunk_size: Annotated[Whole, used_when(where("training.objective", "contrastive"))] = Field(
        default=4096, description="contrastive losses: features that a row is compared with at a time"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def of(self, objective: str) -> str:
        """Return the name of the loss of an objective in LOSSES_OF."""
        return LOSSES_OF[objective][0] if self.name == "auto" else self.name
