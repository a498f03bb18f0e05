"""Tensor, sequence, expert and pipeline parallelism."""
