"""What a run measures: per-step metrics, goodput, and memory beside the plan's."""
