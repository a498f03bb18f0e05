"""Checkpoints: when they are due, what they hold, how they are saved, restored and exported."""
