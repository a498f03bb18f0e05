"""Retrieval and zero-shot classification: against plain loops, on any number of ranks."""

import math
from collections.abc import Sequence
from functools import cache
from operator import mul

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.evaluation import measures as module
from scaletrain_cli.engine.evaluation import zero_shot
from scaletrain_cli.engine.evaluation.measures import RECALLS, Figures, Retrieval, content_keys, ranks_of_best
from scaletrain_cli.engine.evaluation.zero_shot import class_features
from scaletrain_cli.engine.parallel.mesh import Axis
from tests.engine.ranks import on_ranks

IMAGES, PAIRS, WIDTH = 41, 97, 6


@cache
def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels and token ids of pairs, and their features: some images have up to five texts, some texts two images."""
    generator = torch.Generator().manual_seed(0)
    image = torch.cat([torch.arange(IMAGES), torch.randint(0, IMAGES, (PAIRS - IMAGES,), generator=generator)])
    text = torch.arange(PAIRS)
    text[50], text[51] = text[3], text[9]
    pixels = torch.randint(0, 256, (IMAGES, 3, 4, 4), dtype=torch.uint8, generator=generator)[image]
    tokens = torch.randint(0, 90, (PAIRS, 7), generator=generator)[text]
    image_features = F.normalize(torch.randn(IMAGES, WIDTH, generator=generator), dim=1)
    noise = 0.5 * torch.randn(PAIRS, WIDTH, generator=generator)
    text_features = F.normalize(image_features[image] + noise, dim=1)
    return pixels, tokens, image_features[image], text_features[text]


def plain_recalls(limit: int) -> dict[str, float]:
    """Return the recalls by a loop over queries: a query is right if any item that belongs to it is in the top k."""
    pixels, tokens, image_features, text_features = (values[:limit] for values in pairs())
    images = list(dict.fromkeys(tuple(image.flatten().tolist()) for image in pixels))
    texts = list(dict.fromkeys(tuple(text.tolist()) for text in tokens))
    owned = {(tuple(a.flatten().tolist()), tuple(b.tolist())) for a, b in zip(pixels, tokens, strict=True)}
    of_image = dict(zip((tuple(a.flatten().tolist()) for a in pixels), image_features.tolist(), strict=True))
    of_text = dict(zip((tuple(b.tolist()) for b in tokens), text_features.tolist(), strict=True))

    def share(k: int, queries: Sequence[object], items: Sequence[object], *, flip: bool) -> float:
        features = of_image | of_text
        hits = 0
        for query in queries:
            scores = {item: sum(map(mul, features[query], features[item])) for item in items}
            order = sorted(items, key=lambda item: -scores[item])
            hits += any(((item, query) if flip else (query, item)) in owned for item in order[:k])
        return hits / len(queries)

    to_text = {f"recall_at_{k}/image_to_text": share(k, images, texts, flip=False) for k in RECALLS}
    return to_text | {f"recall_at_{k}/text_to_image": share(k, texts, images, flip=True) for k in RECALLS}


def retrieved(rank: int, ranks: int, group: torch.distributed.ProcessGroup | None, limit: int) -> Figures:
    module._COMPARED_AT_A_TIME = 300  # several chunks of queries
    measures, size = Retrieval(limit), 8
    pixels, tokens, images, texts = pairs()
    for first in range(rank * size, -(-PAIRS // (size * ranks)) * size * ranks, size * ranks):
        places = torch.arange(first, first + size)
        rows = places.clamp(max=PAIRS - 1)
        measures.add((images[rows], texts[rows]), (pixels[rows], tokens[rows]), places, places < PAIRS)
    return measures.result(Axis(ranks, rank, group))


def retrieved_on_rank(limit: int) -> Figures:
    world = torch.distributed.group.WORLD
    return retrieved(torch.distributed.get_rank(), torch.distributed.get_world_size(), world, limit)


@pytest.mark.parametrize("limit", [PAIRS, 20])
def test_recalls_are_those_of_a_loop_with_several_texts_per_image(limit: int) -> None:
    found = on_ranks(1, retrieved_on_rank, limit)[0]
    assert found.metrics == pytest.approx(plain_recalls(limit), abs=1e-12)
    assert 0 < found.metrics["recall_at_1/image_to_text"] < found.metrics["recall_at_5/image_to_text"] < 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_recalls(ranks: int) -> None:
    for limit in (PAIRS, 5):  # with 5 pairs only the first rank has any
        alone = on_ranks(1, retrieved_on_rank, limit)
        assert on_ranks(ranks, retrieved_on_rank, limit) == alone * ranks


def test_pairs_texts_and_images_are_counted_once_each() -> None:
    found = on_ranks(1, retrieved_on_rank, PAIRS)[0]
    assert found.details == {"retrieval": {"pairs": PAIRS, "images": IMAGES, "texts": PAIRS - 2}}


def test_of_equal_scores_the_item_with_the_lower_index_comes_first() -> None:
    scores = torch.tensor([[1.0, 2, 2, 0], [0, 0, 0, 0], [1, 2, 2, 0], [math.nan] * 4, [1, 2, 3, 4]])
    positives = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert ranks_of_best(scores, positives).tolist() == [1, 3, 2, 4, 4]


def test_keys_are_equal_for_equal_content_alone() -> None:
    items = torch.arange(60, dtype=torch.uint8).view(5, 3, 4)
    items[4] = items[1]
    keys = content_keys(items.transpose(1, 2)).tolist()
    assert keys[4] == keys[1]
    assert len(set(keys)) == 4


CLASS_NAMES = [f"class {number}" for number in range(21)]
TEMPLATES = ["a photo of a {}.", "itap of a {}.", "a bad photo of the {}.", "art of the {}.", "a {} in a video game."]


def encode(prompts: Sequence[str]) -> Tensor:
    """Return features that depend on the prompt alone, not normalized."""
    return torch.stack(
        [torch.randn(WIDTH, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in prompts]
    )


def features_of_rank() -> tuple[Tensor, int]:
    zero_shot._PROMPTS_AT_A_TIME = 16
    calls = []

    def counted(prompts: Sequence[str]) -> Tensor:
        calls.append(len(prompts))
        return encode(prompts)

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = class_features(CLASS_NAMES, TEMPLATES, counted, Axis(ranks, rank, torch.distributed.group.WORLD))
    return found, len(calls)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_feature_of_a_class_is_the_normalized_mean_over_its_prompts(ranks: int) -> None:
    expected = []
    for name in CLASS_NAMES:
        features = [encode([template.format(name)])[0] for template in TEMPLATES]
        mean = torch.stack([feature / feature.norm() for feature in features]).mean(0)
        expected.append(mean / mean.norm())
    found = on_ranks(ranks, features_of_rank)
    for features, calls in found:
        assert torch.equal(features, found[0][0])
        assert torch.allclose(features, torch.stack(expected), atol=1e-6)
        assert calls == -(-7 // ranks)  # every rank calls equally often: 105 prompts in chunks of 16
