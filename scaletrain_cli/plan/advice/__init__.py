"""What a plan says beside its numbers: warnings, assumptions, recipe checks, explanations and comparisons."""
