"""The HTML page around the sections of a report: no outside reference, and scripts by their hash alone."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from scaletrain_cli.report.comparison_sections import comparison_sections
from scaletrain_cli.report.markup import safe, time_text
from scaletrain_cli.report.run_sections import run_sections

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hash}'" />
<meta name="generator" content="ScaleTrain" />
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<p class="soft">Made {made} UTC by <code>scaletrain report</code>.</p>
<div id="tip" role="status"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML document of a report (schema ``scaletrain.report/v1``)."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    is_one = len(runs) == 1 and report["sweep"] is None and not report["damaged"]
    tables: list[dict[str, Any]] = []
    body: Iterable[str] = run_sections(runs[0], tables) if is_one else comparison_sections(report, tables)
    title = runs[0]["run_id"] if is_one else report["sweep"]["name"] if report["sweep"] else f"{len(runs)} runs"
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    return _PAGE.format(
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=safe(f"{title}: report"),
        style=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        body="\n".join(body),
        made=time_text(report["made"]),
        data=_script_json(tables),
        script=script,
    )


def _script_json(value: Any) -> str:
    """Return JSON that ends no script element and begins no comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
