"""Progress lines: JSON lines that the first rank of a training program prints for programs that read its log.

One per logged step, in addition to the readable line:

    {"scaletrain": "progress", "step": 7, "total_steps": 80, "loss": 6.5133, "tokens_per_second": 1180.2}
"""

import contextlib
import json
import math
from typing import Any

_KIND = "progress"


def rate_name(unit: str) -> str:
    """Return the name of the throughput in metrics and progress lines; ``unit``: tokens, images or pairs."""
    return "tokens_per_second" if unit == "tokens" else "samples_per_second"


def progress_line(
    step: int, total_steps: int, loss: float, per_second: float | None = None, unit: str = "tokens"
) -> str:
    """Return the line after ``step`` optimizer steps; ``loss`` is null in the line where it is not finite.

    ``per_second``: tokens, or images or pairs, by ``unit``.
    """
    line: dict[str, Any] = {"scaletrain": _KIND, "step": step, "total_steps": total_steps}
    line["loss"] = loss if math.isfinite(loss) else None
    if per_second is not None and math.isfinite(per_second):
        line[rate_name(unit)] = per_second
    return json.dumps(line)


def read_object(line: str, *kinds: str) -> dict[str, Any] | None:
    """Return the JSON object of a line whose key ``scaletrain`` has one of the kinds; None for any other line."""
    if line.startswith('{"scaletrain"'):
        with contextlib.suppress(ValueError, RecursionError):  # any program can print a line that begins like this
            document: dict[str, Any] = json.loads(line)
            return document if document.get("scaletrain") in kinds else None
    return None


def read_progress(line: str) -> dict[str, float] | None:
    """Return the finite numbers of a progress line by name, or None for any other line."""
    progress = read_object(line, _KIND)
    if progress is None or not isinstance(progress.get("step"), int):
        return None
    return {
        name: value
        for name, value in progress.items()
        if type(value) is int or (isinstance(value, float) and math.isfinite(value))
    }
