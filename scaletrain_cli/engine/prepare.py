"""``python -m scaletrain_cli.engine.prepare SPEC_JSON RUNS_ROOT``: build the dataset of a resolved spec.

The last line of standard output is JSON; talk goes to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from scaletrain_cli.engine.chunk_hashes import DamagedDataError
from scaletrain_cli.engine.dataset import open_dataset, prepare_dataset
from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.spec import RunSpec


def main() -> int:
    """Build, open and describe the dataset; the exit code of the process."""
    spec = RunSpec.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(f"preparing {spec.data.source} ({spec.data.tokenizer.kind} tokenizer)", file=sys.stderr)
    started = time.monotonic()
    try:
        folder = prepare_dataset(spec.data, Path(sys.argv[2]))
        info, train, validation = open_dataset(folder, spec.transformer.seq_len)
    except DamagedDataError as error:
        print(error, file=sys.stderr)
        return int(ExitCode.CRASHED)
    except ScaletrainError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(f"ready in {time.monotonic() - started:.1f} s", file=sys.stderr)
    described = {
        "path": str(folder),
        "documents": info.documents,
        "train_tokens": info.train_tokens,
        "validation_tokens": info.validation_tokens,
        "train_sequences": len(train),
        "validation_sequences": len(validation),
        "vocab_size": info.vocab_size,
        "dtype": info.dtype,
    }
    print(json.dumps(described))
    return 0


if __name__ == "__main__":
    sys.exit(main())
