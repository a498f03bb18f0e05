"""Reports beside the numbers of a plan: warnings, assumptions, recipe checks, explanations and comparisons."""
