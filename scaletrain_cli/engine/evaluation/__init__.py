"""Evaluate a checkpoint on one device: held-out losses, generations, and tasks of lm-evaluation-harness."""
