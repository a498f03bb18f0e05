"""The engine's training loop beside other loops, and beside its plan."""
