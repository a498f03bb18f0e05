"""Preparation of the data of a run: which work there is, worker processes, and what is kept of each step."""
