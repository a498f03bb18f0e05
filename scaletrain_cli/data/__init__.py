"""Preparation of training data and the order of their sources; without torch."""
