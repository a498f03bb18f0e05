import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.loss import logits_of
from scaletrain_cli.engine.model.materialization import materialize
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.plan.trained_parameters import trained_at
from scaletrain_cli.plan.vision.states import vision_states
from scaletrain_cli.rundir.evaluations import read_validations
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.spec import RunSpec, load_spec
from tests.cli.command_line import scaletrain
from tests.engine.parity.layouts import train_in_layout
from tests.engine.vision.llava_rows import COLORS, SPEC, STAGES, colors, write_rows

CPU = torch.device("cpu")
pytestmark = pytest.mark.long


def first_weights(spec: RunSpec) -> dict[str, Tensor]:
    model = outline(spec.model)
    materialize(model, model.first_weights(spec.training.seed, CPU), CPU)
    return model.state_dict()


def test_a_staged_run_continues_bit_exactly_within_the_planned_bytes(tmp_path: Path) -> None:
    """Interrupted within the first stage, and after its last step. Ranks have different numbers of images."""
    spec = colors(tmp_path, STAGES)
    whole, resumed = train_in_layout(spec), train_in_layout(spec, 3, 4)
    assert resumed.trained.losses == whole.trained.losses
    assert resumed.trained.norms == whole.trained.norms
    first = first_weights(spec)
    assert whole.trained.weights.keys() == first.keys()
    for name, values in whole.trained.weights.items():
        assert torch.equal(resumed.trained.weights[name], values)
        assert torch.equal(values, first[name]) == name.startswith("vision_tower."), name
    for rank, held in enumerate(whole.states):
        planned = vision_states(spec, whole.record.plan.layout, trained_at(spec, spec.total_steps), rank)
        assert {name: getattr(held, name) for name in planned._fields} == planned._asdict()


def test_both_stages_learn_and_the_export_answers_in_transformers(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "colors.yaml").write_text(SPEC)
    own = (
        *(f"data.source={tmp_path}/rows.jsonl", "layout.zero_stage=0", "cluster.gpus_per_node=1"),
        *("training.steps=60", "evaluation={every: 20, batches: 1, sample_answers: 2}"),
        STAGES.replace("start_step: 5, lr: 2.0e-3", "start_step: 21, lr: 5.0e-3"),
    )
    sets = [word for each in own for word in ("--set", each)]
    scaletrain("train", tmp_path / "colors.yaml", "--run-id", "r1", *sets, code=0)
    run = find_run("r1")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    for first, last in ((0, 20), (20, 60)):
        assert sum(losses[last - 5 : last]) < 0.95 * sum(losses[first : first + 5])
    validated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert validated[1] < validated[0]
    assert all(line["tokens_per_second"] > line["samples_per_second"] for line in lines if "loss" in line)
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    (measured,) = (event for event in events if event["event"] == "measured")
    assert measured["model_states"] == measured["planned"]
    (validation,) = (one for one in read_validations(run) if one.step == 60)
    answers = validation.details["answers"]
    assert [Path(answer["sample"]).stem for answer in answers] == [answer["expected"] for answer in answers]
    assert all("Which color has" in answer["prompt"] for answer in answers)

    scaletrain("checkpoint", "export", "r1", "--output", tmp_path / "out", "--dtype", "fp32", code=0)
    processor: Any = transformers.LlavaProcessor.from_pretrained(tmp_path / "out")
    theirs: Any = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    question = [{"role": "user", "content": "<image>\nWhich color has 1?"}]
    prompt = processor.apply_chat_template(question, add_generation_prompt=True)
    pictures = [Image.open(tmp_path / f"{color}.png") for color in COLORS]
    inputs = processor(text=[prompt] * len(pictures), images=pictures, return_tensors="pt")
    ours: Any = outline(load_spec(tmp_path / "colors.yaml").model)
    materialize(ours, HuggingFaceFolder(tmp_path / "out", outline(ours.spec)), CPU)
    with torch.no_grad():
        expected = theirs(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits
        found = ours.eval()(
            inputs["input_ids"],
            inputs["input_ids"],
            inputs["pixel_values"],
            output=lambda language, hidden: logits_of(language.final_norm(hidden), language.lm_head.weight),
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # the answer that the run wrote for its first row is that of transformers
    picture = Image.open(answers[0]["sample"])
    asked = answers[0]["prompt"].split("\n\n")[1].split("\n")[0]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": f"<image>\n{asked}"}], add_generation_prompt=True
    )
    inputs = processor(text=prompt, images=picture, return_tensors="pt")
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answered = theirs.generate(
        input_ids=inputs["input_ids"],
        pixel_values=inputs["pixel_values"],
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=end,
    )
    text = processor.tokenizer.decode(answered[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip() == answers[0]["answer"]
