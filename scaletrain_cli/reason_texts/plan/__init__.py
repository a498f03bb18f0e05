"""The texts of the planner, codes ``plan.*``, by topic: rules, search, advice and recipe."""

from scaletrain_cli.reason_texts.plan import advice, recipe, rules, search
from scaletrain_cli.reasons import Texts

TEXTS: Texts = rules.TEXTS | search.TEXTS | advice.TEXTS | recipe.TEXTS
