"""Optimizers, learning-rate schedules, gradient clipping, loss scaling and weight averaging."""
