"""What each rank is fed at each step. Knows no model and no optimizer."""
