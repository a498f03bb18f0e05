"""Retrieval between images and texts: recall at 1, 5 and 10 in both directions, with any number of texts per image."""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.evaluation.measures import (
    Figures,
    Measures,
    in_sample_order,
    rows_of_all,
    slices_of,
    sum_over,
)
from scaletrain_cli.engine.parallel.mesh import Axis

RECALLS = (1, 5, 10)
_SCORES_AT_A_TIME = 1 << 23
_MOST_SAMPLES = 1 << 40  # of a source


def content_keys(items: Tensor) -> Tensor:
    """Return a 64-bit hash of each item, [items] int64: equal for equal pixels, or for equal token ids."""
    found = [hashlib.blake2b(item.numpy().tobytes(), digest_size=8).digest() for item in items.cpu().contiguous()]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in found], dtype=torch.int64)


def ranks_of_best(scores: Tensor, positives: Tensor) -> Tensor:
    """Return how many items come before the best positive one of each query, [queries] int64.

    scores [queries, items]; positives alike, bool. Of equal scores the item with the lower index comes first. NaN comes
    before all others. A query without a positive item has the number of items.
    """
    items = torch.arange(scores.shape[1], device=scores.device)
    best = scores.masked_fill(~positives, -torch.inf).max(1, keepdim=True).values
    first = (positives & (scores == best)).int().argmax(1, keepdim=True)
    ranks = (~(scores <= best) | ((scores == best) & (items < first))).sum(1)
    return torch.where(positives.any(1), ranks, scores.shape[1])


def recalls(queries: Tensor, items: Tensor, pairs: Tensor, axis: Axis) -> dict[int, float]:
    """Return the share of queries with a positive item among the first k, for each k in RECALLS. Collective.

    queries [queries, d] and items [items, d], the same on every rank; pairs [pairs, 2] int64: a query and an item that
    belong together. Queries without a pair are not counted. Ranks take chunks of queries in turn: the chunks, and so
    the rounding of the scores, do not depend on the number of ranks.
    """
    device = axis.device
    items = items.to(device)
    hits = torch.zeros(len(RECALLS) + 1, dtype=torch.int64, device=device)
    pairs = pairs[pairs[:, 0].argsort(stable=True)]
    chunk = max(1, _SCORES_AT_A_TIME // max(1, len(items)))
    for number, part in enumerate(slices_of(len(queries), chunk)):
        if number % axis.size != axis.rank:
            continue
        first, last = torch.searchsorted(pairs[:, 0].contiguous(), torch.tensor([part.start, part.stop])).tolist()
        own = pairs[first:last].to(device)
        positives = torch.zeros(part.stop - part.start, len(items), dtype=torch.bool, device=device)
        positives[own[:, 0] - part.start, own[:, 1]] = True
        known = positives.any(1)
        ranks = ranks_of_best(queries[part].to(device) @ items.T, positives)[known]
        hits += torch.stack([known.sum(), *((ranks < k).sum() for k in RECALLS)])
    counted, *found = sum_over(hits, axis).tolist()
    return {k: count / counted for k, count in zip(RECALLS, found, strict=True)} if counted else {}


class Retrieval(Measures):
    """``recall_at_<k>/image_to_text`` and ``/text_to_image`` among the first ``limit`` pairs of each source.

    Pairs with equal images are one image with several texts, and those with equal texts one text of several images: a
    query finds any of those that belong to it.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._source = limit, 0
        self._images: list[Tensor] = []
        self._texts: list[Tensor] = []
        self._keys: list[Tensor] = []  # [pairs, 3]: number of the sample, keys of image and text

    def add(
        self, features: tuple[Tensor, Tensor], content: tuple[Tensor, Tensor], samples: Tensor, counted: Tensor | None
    ) -> None:
        """Keep pairs on the CPU. ``features``: of images and texts, [pairs, d] each, normalized.

        ``content``: pixels [pairs, ...] and token ids [pairs, length], which tell equal images and texts. ``samples``:
        numbers of the pairs in the split, [pairs].
        """
        kept = samples < self._limit
        if counted is not None:
            kept &= counted
        if not kept.any():
            return
        for values, store in zip(features, (self._images, self._texts), strict=True):
            store.append(values.detach()[kept].float().cpu())
        keys = (content_keys(values[kept]) for values in content)
        numbers = samples[kept].cpu() + self._source * _MOST_SAMPLES
        self._keys.append(torch.stack([numbers, *keys], dim=1))

    def next_source(self) -> None:
        """Count the samples from the next call on as those of another source, with numbers of their own."""
        self._source += 1

    def result(self, axis: Axis) -> Figures | None:
        width = sum_over(torch.tensor([self._images[0].shape[1] if self._images else 0, int(bool(self._images))]), axis)
        if width[1] == 0:
            return None
        dim = int(width[0] // width[1])
        keys = rows_of_all(torch.cat([*self._keys, torch.empty(0, 3, dtype=torch.int64)]), axis)
        images, texts = (
            rows_of_all(torch.cat([*each, torch.empty(0, dim)]), axis) for each in (self._images, self._texts)
        )
        order = in_sample_order(keys[:, 0])
        (image, image_rows), (text, text_rows) = (_distinct(keys[order, column]) for column in (1, 2))
        queries = F.normalize(images[order][image_rows], dim=1), F.normalize(texts[order][text_rows], dim=1)
        pairs = torch.stack([image, text], dim=1)
        to_text = recalls(queries[0], queries[1], pairs, axis)
        to_image = recalls(queries[1], queries[0], pairs.flip(1), axis)
        metrics = {f"recall_at_{k}/image_to_text": value for k, value in to_text.items()}
        metrics |= {f"recall_at_{k}/text_to_image": value for k, value in to_image.items()}
        details = {"pairs": len(order), "images": len(image_rows), "texts": len(text_rows)}
        return Figures(metrics, {"retrieval": details})


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the distinct key of each row, in order of first rows, and the first row of each key."""
    _, inverse = torch.unique(keys, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), len(keys), dtype=torch.int64)
    first.scatter_reduce_(0, inverse, torch.arange(len(keys)), "amin")
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place[inverse], first[order]
