"""``python -m gpu.deterministic_engine RUN_DIR``: one rank of the product's engine, with deterministic kernels.

An operation without a deterministic kernel warns in the rank's log and is used all the same: the bits tell.
"""

from __future__ import annotations

import os
import sys

import torch

from scaletrain_cli.engine.__main__ import main

if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in the engine: destructors of process groups wait for peers
