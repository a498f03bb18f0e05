"""The HTML page of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from scaletrain_cli.markup import document, time_text
from scaletrain_cli.report.comparison_sections import comparison_sections
from scaletrain_cli.report.run_sections import run_sections


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML document of a report (schema ``scaletrain.report/v1``)."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    is_one = len(runs) == 1 and report["sweep"] is None and not report["damaged"]
    tables: list[dict[str, Any]] = []
    body: Iterable[str] = run_sections(runs[0], tables) if is_one else comparison_sections(report, tables)
    title = runs[0]["run_id"] if is_one else report["sweep"]["name"] if report["sweep"] else f"{len(runs)} runs"
    parts = [
        *body,
        f'<p class="soft">Made {time_text(report["made"])} UTC by <code>scaletrain report</code>.</p>',
        '<div id="tip" role="status"></div>',
        f'<script type="application/json" id="data">{_script_json(tables)}</script>',
    ]
    return document(f"{title}: report", parts, files(__package__).joinpath("page.js").read_text(encoding="utf-8"))


def _script_json(value: Any) -> str:
    """Return JSON that ends no script element and begins no comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
