"""Documents and bytes per second of each step that looks at one document at a time, on one core.

The documents are the standard library's modules and docstrings, cut into pieces of about 3,500 characters.

    python benchmarks/document_steps.py [--documents 2000] [STEP ...]
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from scaletrain_cli.data.steps import Document, Removed, step_of
from scaletrain_cli.spec.preparation import QUALITY_RULES, AnyStep

SIZE = 3500


def documents(count: int) -> list[str]:
    """Return pieces of the standard library's sources."""
    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            pieces += [text[at : at + SIZE] for at in range(0, len(text), SIZE)]
        if len(pieces) >= count:
            break
    return pieces[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    options = parser.parse_args()
    texts = documents(options.documents)
    size = sum(len(text.encode()) for text in texts)
    section: TypeAdapter[Any] = TypeAdapter(AnyStep)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as evaluation:
        evaluation.writelines(text.replace("\n", " ") + "\n" for text in texts[::100])
        evaluation.flush()
        cases: dict[str, dict[str, Any]] = {
            "normalization": {"step": "normalization"},
            "language": {"step": "language", "keep": ["en"]},
            **{name: {"step": "quality", "rules": name} for name in QUALITY_RULES},
            "contamination": {"step": "contamination", "files": [evaluation.name]},
            "identifiers": {"step": "identifiers"},
            "identifiers, all": {"step": "identifiers", "replace": ["email", "ip", "phone", "key"]},
        }
        print(f"{len(texts)} documents, {size / 1e6:.1f} MB")
        for name, keys in cases.items():
            if options.steps and name not in options.steps:
                continue
            step = step_of(section.validate_python(keys))
            before = time.process_time()
            removed = sum(isinstance(step(Document(text, "", "")), Removed) for text in texts)
            seconds = time.process_time() - before
            print(f"{name:18} {len(texts) / seconds:8.0f} docs/s {size / seconds / 1e6:7.1f} MB/s {removed:6} removed")


if __name__ == "__main__":
    main()
