"""The texts of the planner, codes ``plan.*``, by topic: rules.py, search.py and advice.py."""

from __future__ import annotations

from scaletrain_cli.reason_texts.plan import advice, rules, search
from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = rules.TEXTS | search.TEXTS | advice.TEXTS
