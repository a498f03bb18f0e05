"""Short documents that a small model can learn, prepared like any corpus."""

import json
import random
from pathlib import Path

from scaletrain_cli.spec import DataSpec
from tests.engine.parity.rows import VOCAB_SIZE
from tests.prepared_text import prepared_text

_WORDS = "the model of a run is cut over ranks and each rank holds its own part".split()


def write_dataset(folder: Path) -> Path:
    """About a thousand sentences of chance length, each a document of its own."""
    draw = random.Random(0)
    sentences = (" ".join(draw.choices(_WORDS, k=draw.randint(3, 40))) for _ in range(1000))
    corpus = folder / "sentences.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences), encoding="utf-8")
    data = DataSpec.model_validate({"source": str(corpus), "tokenizer": {"kind": "bpe", "vocab_size": VOCAB_SIZE}})
    return prepared_text(data, folder)
