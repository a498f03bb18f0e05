"""Time of a step: kernels, links, pipelines and the work of the framework."""
