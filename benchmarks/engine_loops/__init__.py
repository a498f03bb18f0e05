"""The engine's training loop beside others, and beside its plan: what runs on the ranks, and what starts them."""
