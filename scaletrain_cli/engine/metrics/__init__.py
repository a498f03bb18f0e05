"""Per-step metrics, goodput, and memory measured beside the plan."""
