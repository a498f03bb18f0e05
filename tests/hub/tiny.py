"""A tiny Llama, its tokenizer and a data set, as files of repositories on the stand-in hub."""

import functools
import json
from pathlib import Path

from tests.hub.server import Hub
from tests.model_sizes import model_sizes

MODEL, DATA = "acme/tiny-llama", "acme/words"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    **model_sizes(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, vocab=300, positions=64),
}
TEXT = "".join(f"{number} the quick brown fox jumps over the lazy dog {number * 7}\n\n" for number in range(800))


@functools.cache
def tokenizer_json() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return str(tokenizer.to_str()).encode()


@functools.cache
def shards(seed: int = 0, hidden: int = 32) -> tuple[tuple[str, bytes], ...]:
    """Return two files of weights and their index."""
    import numpy as np
    from safetensors.numpy import save

    from scaletrain_cli.plan.parameters import model_parameters
    from scaletrain_cli.spec.hugging_face import from_config
    from scaletrain_cli.spec.model import ModelSpec

    found = from_config({**CONFIG, "hidden_size": hidden})
    model = ModelSpec.model_validate({**found, "seq_len": 32, "head_dim": hidden // 4})
    draw = np.random.default_rng(seed)
    tensors = {p.name: draw.normal(0, 0.02, p.shape).astype("float32") for p in model_parameters(model)}
    names = list(tensors)
    files, weight_map = [], {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        files.append((name, save({key: tensors[key] for key in part})))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    return (*files, ("model.safetensors.index.json", json.dumps(index).encode()))


def factors(rank: int) -> bytes:
    """Return the weights of an adapter of the default targets, all 0."""
    import numpy as np
    from safetensors.numpy import save

    from scaletrain_cli.plan.parameters import modules_with_adapter
    from scaletrain_cli.spec.hugging_face import from_config
    from scaletrain_cli.spec.model import ModelSpec
    from scaletrain_cli.spec.weight_files import peft_shapes

    adapter = {"name": "lora", "rank": rank}
    model = ModelSpec.model_validate({**from_config(CONFIG), "seq_len": 32, "head_dim": 8, "adapter": adapter})
    shapes = peft_shapes(model.adapter, modules_with_adapter(model))
    return bytes(save({name: np.zeros(shape, dtype="float32") for name, shape in shapes.items()}))


def model_files(seed: int = 0) -> dict[str, bytes]:
    """Return the files of the model's repository, with pickled weights that nothing may fetch."""
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "README.md": b"# a model",
        "pytorch_model.bin": b"pickled",
        "modeling_custom.py": b"raise SystemExit",
        **dict(shards(seed)),
    }


def publish(hub: Hub, **options: bool) -> tuple[str, str]:
    """Add the model and the data, and return their commits."""
    half = len(TEXT) // 2
    data = {"README.md": b"# words", "train/a.txt": TEXT[:half].encode(), "train/b.txt": TEXT[half:].encode()}
    return hub.add(MODEL, model_files(), **options), hub.add(DATA, data, kind="dataset")


def spec_text(*, nodes: int = 1, ranks: int = 2, revision: str = "main", steps: int = 2) -> str:
    """Return a run spec that takes everything from the hub."""
    return f"""\
schema: scaletrain/v1
name: from-the-hub
model:
  hf_config: hf://{MODEL}@{revision}
  weights: hf://{MODEL}@{revision}
  seq_len: 32
data:
  source: hf://datasets/{DATA}/train/*.txt
  tokenizer: {{kind: file, path: hf://{MODEL}@{revision}}}
training:
  global_batch_size: 4
  micro_batch_size: 2
  steps: {steps}
  precision: fp32
  optimizer: {{name: adamw, lr: 1.0e-3}}
evaluation: {{every: 0}}
guard: {{preflight: never}}
layout: {{zero_stage: 1}}
cluster: {{scheduler: local, nodes: {nodes}, gpus_per_node: {ranks}, gpu: cpu, grace_seconds: 20}}
checkpoint: {{every: 2}}
"""


def write_spec(folder: Path, **options: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(spec_text(**options), encoding="utf-8")  # type: ignore[arg-type]
    return path
