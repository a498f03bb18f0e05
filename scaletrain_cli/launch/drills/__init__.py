"""Drills: the product's own faults in runs on the user's own cluster, held against the run that nothing happened to."""
