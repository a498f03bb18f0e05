"""JSON on stdout, the answer of every ``--json``: indented, UTF-8, and never NaN, which no JSON reader must accept."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(data: Any) -> None:
    """One JSON document."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
