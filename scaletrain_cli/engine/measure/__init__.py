"""What a rank really holds, beside what the plan says. Knows no step of training."""
