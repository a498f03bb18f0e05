"""Time of a step: kernels, links, pipelines, and host work of the framework."""
