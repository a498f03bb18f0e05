"""Trackers: experiment trackers that mirror the metrics and events of a run, and never disturb it.

Imports the base layer and pydantic. The library of each tracker is imported when the tracker starts.
"""
