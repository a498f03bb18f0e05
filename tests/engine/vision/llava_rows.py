"""Questions about the colors of images, and specs of a tiny LLaVA that learns the answers."""

import json
from io import BytesIO
from pathlib import Path

from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.spec import RunSpec, parse_spec

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (250, 250, 250)}
# The projector alone up to step 4, then also the language model.
STAGES = (
    'training.trainable=[{match: "multi_modal_projector.*"}, {match: "language_model.*", start_step: 5, lr: 2.0e-3}]'
)
SPEC = """
schema: scaletrain/v1
name: colors
model: {family: llava, image_token_index: 3,
        vision_config: {hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,
                        image_size: 16, patch_size: 8, initializer_range: 0.2},
        text_config: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
                      num_key_value_heads: 2, intermediate_size: 64, vocab_size: 288, seq_len: 64,
                      initializer_range: 0.2}}
data: {source: rows.jsonl, validation_split: 0.2, tokenizer: {vocab_size: 280}}
training: {objective: sft, global_batch_size: 8, micro_batch_size: 2, steps: 8, precision: fp32, seed: 1,
           optimizer: {lr: 1.0e-2, weight_decay: 0.1}}
evaluation: {every: 0}
layout: {zero_stage: 3, activation_checkpointing: full}
cluster: {gpu: cpu, gpus_per_node: 2}
"""


def write_rows(folder: Path, count: int = 60) -> None:
    """Write images of one color, and rows of which each third one has no image."""
    from PIL import Image

    for color, value in COLORS.items():
        file = BytesIO()
        Image.new("RGB", (20, 16), value).save(file, "PNG")
        (folder / f"{color}.png").write_bytes(file.getvalue())
    rows = []
    for number in range(count):
        color = list(COLORS)[number * 7 % 4]
        if number % 3 == 2:
            rows.append({"conversations": [_turn("human", "Say yes"), _turn("gpt", "yes")]})
        else:
            turns = [_turn("human", f"<image>\nWhich color has {number % 5}?"), _turn("gpt", color)]
            rows.append({"image": f"{color}.png", "conversations": turns})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def colors(folder: Path, *overrides: str) -> RunSpec:
    """The spec of a run whose rows are prepared; ``folder`` has their files."""
    write_rows(folder)
    spec = parse_spec(
        SPEC, file="colors.yaml", base_dir=folder, overrides=(f"data.source={folder}/rows.jsonl", *overrides)
    )
    prepare_rows(spec, runs_root())
    return spec
