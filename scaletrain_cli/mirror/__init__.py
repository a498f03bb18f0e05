"""The mirror of a run: a second place with its checkpoints and its history, from which it can continue elsewhere.

Layout, protocol and limits: docs/mirror.md.
"""
