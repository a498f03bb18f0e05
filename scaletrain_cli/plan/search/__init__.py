"""The search for a layout, and for the cluster: the space, its rules, bounds, and the choice."""
