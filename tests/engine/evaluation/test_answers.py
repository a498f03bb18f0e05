"""Answers about images: the tokens that transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.evaluation.inference import answer
from tests.engine.model.vision.towers import IMAGE_TOKEN, images, llava, loaded, spec_of


@pytest.mark.parametrize("count", [1, 2])
def test_answers_are_those_that_transformers_generates(tmp_path: Path, count: int) -> None:
    theirs: Any = llava(tmp_path, "llama")
    spec = spec_of(tmp_path)
    ours = loaded(spec, tmp_path)
    pixels = images(count)
    prompt = [1, *[IMAGE_TOKEN] * (spec.tokens_per_image * count), 7, 9, 11]
    expected = theirs.generate(
        input_ids=torch.tensor([prompt]), pixel_values=pixels, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    found = answer(ours, prompt, pixels, max_new_tokens=8, end_tokens=[2])
    assert [token for token in expected[0, len(prompt) :].tolist() if token != 2] == found
    assert 0 < len(found) <= 8
    assert answer(ours, prompt, pixels, max_new_tokens=8, end_tokens=[found[2]]) == found[: found.index(found[2])]


def test_an_answer_depends_on_the_image_and_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    llava(tmp_path, "llama")
    spec = spec_of(tmp_path)
    ours = loaded(spec, tmp_path)
    prompt = [1, *[IMAGE_TOKEN] * spec.tokens_per_image, 7]
    one, other = (answer(ours, prompt, image, max_new_tokens=500, end_tokens=[]) for image in images(2).split(1))
    assert one != other
    assert len(prompt) + len(one) == spec.text_config.seq_len + 1
    assert answer(ours, [1, 7], None, max_new_tokens=3, end_tokens=[]) != []
    with pytest.raises(ValueError, match="image tokens"):
        answer(ours, [1, 7], images(1), max_new_tokens=1, end_tokens=[])
