"""The search for a layout, and for a cluster: space, rules, bounds and choice."""
