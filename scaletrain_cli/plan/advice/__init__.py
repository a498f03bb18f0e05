"""What a plan says about itself: reasons, warnings, assumptions, the recipe, comparisons and pictures."""
