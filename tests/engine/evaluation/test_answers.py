"""Answers about images: the tokens that transformers generates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.splits import open_reader
from scaletrain_cli.engine.evaluation.inference import SampleAnswers
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.objectives.image_text import ImageText
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.rundir.paths import runs_root
from tests.engine.data.test_batches import WHOLE
from tests.engine.model.vision.towers import IMAGE_TOKEN, images, llava, loaded, spec_of
from tests.engine.vision.llava_rows import colors

CPU = torch.device("cpu")
NO_END = -1


def answers_of(spec: Any, *, compiled: bool = False) -> SampleAnswers:
    """Return what answers prompts, without rows."""
    nothing: Any = None
    return SampleAnswers(spec, nothing, nothing, CPU, compiled)


@pytest.mark.parametrize("count", [1, 2])
def test_answers_are_those_that_transformers_generates(tmp_path: Path, count: int) -> None:
    theirs: Any = llava(tmp_path, "llama")
    spec = spec_of(tmp_path)
    ours = loaded(spec, tmp_path).eval()
    pixels = images(count)
    prompt = [1, *[IMAGE_TOKEN] * (spec.tokens_per_image * count), 7, 9, 11]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [IMAGE_TOKEN]}
    expected = theirs.generate(input_ids=torch.tensor([prompt]), pixel_values=pixels, **settings)
    found = answers_of(spec).greedy(ours, prompt, pixels, 2)
    assert [token for token in expected[0, len(prompt) :].tolist() if token != 2] == found[:8]
    for compiled in (False, True):
        until = answers_of(spec, compiled=compiled).greedy(ours, prompt, pixels, found[2])
        assert until == found[: found.index(found[2])]


def test_an_answer_depends_on_the_image_and_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    llava(tmp_path, "llama")
    spec = spec_of(tmp_path)
    ours, answers = loaded(spec, tmp_path).eval(), answers_of(spec)
    prompt = [1, *[IMAGE_TOKEN] * spec.tokens_per_image, 7]
    one, other = (answers.greedy(ours, prompt, image, NO_END) for image in images(2).split(1))
    assert one != other
    assert len(prompt) + len(one) == spec.text_config.seq_len + 1
    assert answers.greedy(ours, [1, 7], None, NO_END) != []
    with pytest.raises(ValueError, match="image tokens"):
        answers.greedy(ours, [1, 7], images(1), NO_END)


def test_an_answer_has_no_image_token(tmp_path: Path) -> None:
    """Nothing takes the place of an image token in an answer, however likely a model in training makes it."""
    spec, axis = colors(tmp_path), Axis(1, 0)
    own: Any = spec.model
    model: Any = outline(own)
    materialize(model, model.first_weights(1, CPU), CPU)
    folder = prepare_rows(spec, runs_root())
    _, train, _ = open_data_of(spec, folder)
    reader = open_reader(spec, train, WHOLE, mesh := Mesh(data=axis, replicas=axis))
    assert isinstance(reader, BatchReader)
    samples = SampleAnswers(own, reader, folder / "tokenizer.json", CPU, compiled=False)
    objective = ImageText(spec, mesh)
    prompt = [5, *[own.image_token_index] * own.tokens_per_image, 7]
    pixels = images(1, own.vision_config.image_size)
    likeliest = samples.greedy(model.eval(), prompt, pixels, NO_END)[0]
    with torch.no_grad():
        head = model.language_model.lm_head.weight
        head[[likeliest, own.image_token_index]] = head[[own.image_token_index, likeliest]]
    found = samples.greedy(model, prompt, pixels, NO_END)
    assert len(found) > 3
    assert own.image_token_index not in found
    for row in range(3):
        shown = samples.answer(model, objective, row)
        assert "<image>" not in shown["answer"]
