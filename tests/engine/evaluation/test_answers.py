"""Answers about images: the tokens that transformers generates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.splits import open_reader
from scaletrain_cli.engine.evaluation.inference import SampleAnswers, answer
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.objectives.image_text import ImageText
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.rundir.paths import runs_root
from tests.engine.data.test_batches import WHOLE
from tests.engine.model.vision.towers import IMAGE_TOKEN, images, llava, loaded, spec_of
from tests.engine.vision.llava_rows import colors


@pytest.mark.parametrize("count", [1, 2])
def test_answers_are_those_that_transformers_generates(tmp_path: Path, count: int) -> None:
    theirs: Any = llava(tmp_path, "llama")
    spec = spec_of(tmp_path)
    ours = loaded(spec, tmp_path)
    pixels = images(count)
    prompt = [1, *[IMAGE_TOKEN] * (spec.tokens_per_image * count), 7, 9, 11]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [IMAGE_TOKEN]}
    expected = theirs.generate(input_ids=torch.tensor([prompt]), pixel_values=pixels, **settings)
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


def test_an_answer_has_no_image_token(tmp_path: Path) -> None:
    """Nothing takes the place of an image token in an answer, however likely a model in training makes it."""
    spec, cpu, axis = colors(tmp_path), torch.device("cpu"), Axis(1, 0)
    own: Any = spec.model
    model: Any = outline(own)
    materialize(model, model.first_weights(1, cpu), cpu)
    folder = prepare_rows(spec, runs_root())
    _, train, _ = open_data_of(spec, folder)
    reader = open_reader(spec, train, WHOLE, mesh := Mesh(data=axis, replicas=axis))
    assert isinstance(reader, BatchReader)
    samples = SampleAnswers(own, reader, folder / "tokenizer.json", cpu, compiled=False)
    objective = ImageText(spec, mesh)
    prompt = [5, *[own.image_token_index] * own.tokens_per_image, 7]
    pixels = images(1, own.vision_config.image_size)
    likeliest = answer(model.eval(), prompt, pixels, max_new_tokens=1, end_tokens=[])[0]
    with torch.no_grad():
        head = model.language_model.lm_head.weight
        head[[likeliest, own.image_token_index]] = head[[own.image_token_index, likeliest]]
    found = answer(model, prompt, pixels, max_new_tokens=3, end_tokens=[])
    assert len(found) == 3
    assert own.image_token_index not in found
    for row in range(3):
        shown = samples.answer(model, objective, row)
        assert "<image>" not in shown["answer"]
