"""The texts of a plan: warnings, assumptions, recipe checks, explanations and comparisons."""
