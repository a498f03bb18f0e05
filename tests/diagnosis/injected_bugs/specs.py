"""Specs of tiny runs on text, rows and images, and the data that they read. No tests here."""

import argparse
import json
import random
from pathlib import Path

from tests.drills.vision_runs import draw_pairs

TEXT = """
schema: scaletrain/v1
name: tiny
model: {family: llama, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
  intermediate_size: 96, vocab_size: 384, seq_len: 32}
data:
  source: text.txt
  tokenizer: {kind: bpe, vocab_size: 384}
training:
  global_batch_size: 8
  steps: 160
  precision: fp32
  optimizer: {name: adamw, lr: 5.0e-3, betas: [0.9, 0.95], weight_decay: 0.1}
  schedule: {name: cosine, warmup_steps: 16}
  seed: 1
evaluation: {every: 40, batches: 8}
telemetry: {interval: 0.1s, layers_every: 10}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 80}
"""
IMAGES = """
schema: scaletrain/v1
name: digits
model: {family: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], num_channels: 1,
  num_labels: 10, image_size: 16}
data: {source: sklearn-digits, validation_split: 0.2, images: {mean: [0.3], std: [0.38]}}
training: {global_batch_size: 32, steps: 160, precision: fp32, optimizer: {name: momentum, lr: 0.1},
  schedule: {name: cosine, warmup_steps: 16}}
evaluation: {every: 40, batches: 4}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 80}
"""
PAIRS = """
schema: scaletrain/v1
name: pairs
model: {family: clip, projection_dim: 8, vision_config: {hidden_size: 16, num_hidden_layers: 1,
  num_attention_heads: 2, intermediate_size: 32, image_size: 16, patch_size: 8}, text_config: {hidden_size: 16,
  num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, vocab_size: 16,
  max_position_embeddings: 8, eos_token_id: 12}}
data: {source: shapes/pairs, validation_split: 0.2, tokenizer: {kind: file, path: shapes/tokenizer.json}}
training: {global_batch_size: 16, steps: 120, precision: fp32, optimizer: {name: adamw, lr: 2.0e-3},
  schedule: {name: cosine, warmup_steps: 10}}
evaluation: {every: 40, batches: 1}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 80}
"""
SPECS = {"text": TEXT, "images": IMAGES, "pairs": PAIRS}
NOISE = "data.sources=[{name: text, path: text.txt, weight: 0.7}, {name: noise, path: noise.txt, weight: 0.3}]"
SOURCES = "data.sources=[{name: text, path: text.txt, weight: 0.6}, {name: more, path: more.txt, weight: 0.4}]"


def write_data(folder: Path) -> None:
    """Write texts, rows and pictures to train on into a folder."""
    text = Path(str(argparse.__file__)).read_text(encoding="utf-8")
    more = Path(str(json.__file__)).read_text(encoding="utf-8") + Path(str(random.__file__)).read_text(encoding="utf-8")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 7))) for _ in range(9000)]
    noise = "\n\n".join(" ".join(words[at : at + 60]) for at in range(0, len(words), 60))
    texts = {"text.txt": text, "more.txt": more, "little.txt": text[:9000], "noise.txt": noise}
    texts |= {"one.txt": text[:600], "copies.txt": 20 * text[:6000]}
    for name, content in texts.items():
        (folder / name).write_text(content, encoding="utf-8")
    draw_pairs(folder / "shapes")
    _write_rows(folder, chance)
    _write_weights(folder / "weights")


def _write_rows(folder: Path, chance: random.Random) -> None:
    """Write 400 sums as conversations, and as preference pairs with a wrong answer."""
    questions, pairs = [], []
    for _ in range(400):
        a, b = chance.randrange(100), chance.randrange(100)
        asked = {"role": "user", "content": f"{a} + {b} ="}
        right, wrong = ({"role": "assistant", "content": str(a + b + off)} for off in (0, chance.randint(1, 9)))
        questions.append({"messages": [asked, right]})
        pairs.append({"prompt": [asked], "chosen": [right], "rejected": [wrong]})
    for name, rows in {"questions.jsonl": questions, "pairs.jsonl": pairs}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_weights(folder: Path) -> None:
    """Write the weights of a Llama of the size of TEXT, under the names of Hugging Face."""
    import numpy as np
    from safetensors.numpy import save_file

    draw, width, keys, inner, vocabulary = np.random.default_rng(0), 48, 24, 96, 384
    shapes = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width), "model.norm": (width,)}
    for layer in range(2):
        attention = {"q_proj": (width, width), "o_proj": (width, width)}
        attention |= {"k_proj": (keys, width), "v_proj": (keys, width)}
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        norms = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
        parts |= {f"mlp.{name}": shape for name, shape in mlp.items()} | norms
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {
        f"{name}.weight": (draw.normal(0, 0.02, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "vocab_size": vocabulary,
    }
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": inner}
    config |= {"max_position_embeddings": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
