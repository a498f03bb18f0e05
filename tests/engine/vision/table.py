"""Networks for images in layouts: rows of the third table of ``make parity``, each against a plain torch loop."""

from functools import cache
from itertools import product

from tests.engine.parity.comparison import Difference
from tests.engine.parity.table import Table
from tests.engine.ranks import on_ranks
from tests.engine.vision.runs import ImageDifference, Row, Trained, difference, train_plainly, train_rank

LIMIT = ImageDifference(loss=1e-5, norm=1e-4, weight=1e-5, gradient=1e-5)
# Losses that compare the samples of a step, in networks without BatchNorm, whose gradients alone differ by more.
CONTRASTIVE = ImageDifference(loss=1e-5, norm=1e-4, weight=1e-5, gradient=1e-6)
_FIRST_LOSS = 1e-6  # relative; also at 1, 2 and 4 ranks with equal global batches
# With seed 42 an activation of a step of one micro-batch is so near to 0 that already the model of transformers trains
# to other weights in fp64 than in fp32.
_SEED = ("training.seed=3",)
_LAYOUTS = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)]  # ranks, ZeRO stage
_LOSSES = {
    "resnet": ("smoothing", "bce", "mse", "nt_xent"),
    "convnext": ("bce", "huber"),
    "vit": ("smoothing", "mse", "mae", "huber", "nt_xent"),
    "clip": ("sigmoid",),
}


def vision_rows() -> list[Row]:
    """Each family in each layout with its default loss, then its other losses on 1, 2 and 4 ranks."""
    rows = []
    for family, (number, (ranks, zero)) in product(_LOSSES, enumerate(_LAYOUTS)):
        rows.append(_row(family, "", ranks, zero, 1 + number % 2, "full" if number % 3 == 2 else "none"))
    for family, losses in _LOSSES.items():
        for loss, (ranks, zero) in product(losses, ((1, 0), (2, 2), (4, 3))):
            # BatchNorm mixes the samples of a micro-batch, which only one micro-batch makes the same for all layouts
            joined = family == "resnet" and loss == "nt_xent"
            rows.append(_row(family, loss, ranks, zero, 1 if joined or ranks != 2 else 2, "none"))
    return rows


def _row(family: str, loss: str, ranks: int, zero: int, accumulation: int, checkpointing: str) -> Row:
    overrides = _SEED if family == "resnet" and accumulation == 1 else ()
    return Row(family, zero, ranks, accumulation, checkpointing, overrides, loss=loss)


def name_of(row: Row) -> str:
    return f"vision {row}"


@cache
def _alone(row: Row) -> Trained:
    return train_plainly(row)


def reference_of(row: Row) -> Row:
    """The row without its layout: rows with the same one share their plain run."""
    images = row.family == "resnet" and not row.joins_samples  # whose statistics are those of a micro-batch
    return Row(row.family, 0, 1, row.accumulation if images else 1, "none", row.overrides, row.trainable, row.loss)


def figures(row: Row) -> tuple[list[str], bool]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    expected = _alone(reference_of(row))
    found: list[Trained] = on_ranks(row.ranks, train_rank, row)
    differences = [difference(each, expected) for each in found]
    first = max(abs(each.losses[0] - expected.losses[0]) / expected.losses[0] for each in found)
    limit: Difference = CONTRASTIVE if row.joins_samples and row.family != "resnet" else LIMIT
    cells = [max(getattr(each, name) for each in differences) for name in ("loss", "norm", "weight", "gradient")]
    right = all(each.within(limit) for each in differences) and first <= _FIRST_LOSS
    return [f"{cell:.1e}" for cell in [*cells, first]], right


TABLE = Table(
    ("images", "ranks", "loss", "gradient norm", "weights", "first gradient", "first loss"),
    vision_rows(),
    name_of,
    figures,
    lambda rows, _: (
        f"""## Images and pairs

{rows} networks and layouts, 20 steps each in fp32, against the models of transformers, torch's AdamW \
and losses written out in one process, which has the images of all ranks in each micro-batch: the largest \
difference of the loss, of the gradient norm (relative), of any weight or running statistic at the end, of \
any element of the first gradient (relative to its largest element), and of the first loss (relative). \
Allowed are {LIMIT.loss:g}, {LIMIT.norm:g}, {LIMIT.weight:g}, {LIMIT.gradient:g} and {_FIRST_LOSS:g}; of the \
gradients of contrastive losses {CONTRASTIVE.gradient:g}, where no BatchNorm is in the network.
"""
    ),
)
