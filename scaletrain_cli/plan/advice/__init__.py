"""What a plan reports beside its numbers: warnings, assumptions, recipe checks, explanations and comparisons."""
