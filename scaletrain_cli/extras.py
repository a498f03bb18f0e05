"""The optional extras of this package: the modules of each, and the command that installs it."""

import importlib
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason

# As in pyproject.toml, by the names that are imported; a test compares.
EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("torch", "deepspeed", "huggingface_hub", "jinja2", "pynvml", "safetensors", "tokenizers"),
    "liger": ("liger_kernel",),
    "optimizers": ("bitsandbytes",),
    "fp8": ("torchao",),
    "parquet": ("pyarrow",),
    "vision": ("PIL",),
    "data": ("google.protobuf", "py3langid", "rensa", "sentencepiece", "tiktoken", "zstandard"),
    "remote": ("obstore",),
    "slurm": ("submitit",),
    "k8s": ("kubernetes",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "hub": ("huggingface_hub",),
    "prices": ("gpuhunt",),
    "plot": ("matplotlib",),
    "sample": ("transformers",),
    "mcp": ("mcp",),
}


def extra_of(module: str) -> str | None:
    """Return the extra that contains a module, or None."""
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, with the checkout to run it in (the package is not on PyPI)."""
    from scaletrain_cli.project_files import checkout

    folder = checkout()
    where = f"the checkout {folder}" if folder else "a checkout of ScaleTrain"
    return f"pip install -c constraints.txt '.[{extra}]' in {where}"


def require(module: str, extra: str, code: str = "", **params: str) -> Any:
    """Return a module of an optional extra. Raises UsageError with the command that installs it.

    ``code``: of a reason that has ``params`` and the error; empty for one that has the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        about = {**params, "error": str(error)} if code else {"module": module}
        reason = Reason(code or "sources.library-missing", about | {"command": install_command(extra)})
        raise UsageError(reason) from error
