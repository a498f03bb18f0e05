"""One rank of a large run on fake tensors: what it sends and holds in a step, beside the plan."""
